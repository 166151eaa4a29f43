"""Which experts a token goes to, and the order in which a grouped matmul visits the rows."""

from .choose import top_k
from .tiles import Tiles, bound, combine, make_tiles

__all__ = ["Tiles", "bound", "combine", "make_tiles", "top_k"]
