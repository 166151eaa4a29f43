"""Parameters that are still in their files: read part by part, and looked at while read."""

import dataclasses
import functools

import numpy as np

from .layouts import KEPT_FLOAT32, Checkpoint
from .names import ONE_PER_EXPERT, Fill
from .values import Watch


class Part:
    """One parameter. `part[index]` reads those elements and nothing else, as `dtype`."""

    def __init__(
        self, found: Checkpoint, fill: Fill, watch: Watch, dtype: np.dtype | None, own: bool
    ):
        self.fill, self.watch = fill, watch
        stacked = ".experts." in fill.param and fill.row.how is not ONE_PER_EXPERT
        look = functools.partial(watch.look, fill.param, stacked)
        self.tensors = [
            dataclasses.replace(tensor, own=own, look=look) for tensor in found.tensors(fill)
        ]
        self.shape, self.dtype = fill.shape, np.dtype(dtype or self.tensors[0].dtype)
        self.blocks: Part | None = None  # of scales: the blocks they belong to

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return sum(t.nbytes for t in self.tensors)

    def __getitem__(self, index) -> np.ndarray:
        given = index if isinstance(index, tuple) else (index,)
        given = tuple(i for i in given if i is not Ellipsis)
        assert all(isinstance(i, slice) and i.step in (None, 1) for i in given), index
        index = given + (slice(None),) * (len(self.shape) - len(given))
        value = self.fill.row.how.read(self.tensors, self.shape, index)
        if self.blocks is not None and (value >= 253).any():
            self.watch.look_at_blocks(self.tensors[0].name, self.blocks[index], value)
        return value.astype(self.dtype, copy=False)

    def forget(self) -> None:
        """Lets go of mapped pages, where there are enough to matter."""
        if self.nbytes > 1 << 20:
            for tensor in self.tensors:
                tensor.forget()


def parts_of(
    found: Checkpoint, watch: Watch, dtype: np.dtype | None, *, own: bool = True
) -> dict[str, Part]:
    """Every parameter of a checkpoint, by its dotted path.

    dtype: of the dense weights; blocks and scales stay bytes, and what the model keeps in float32
    becomes that. None: everything as it is stored. own: read copies, not views of the file.
    """
    parts = {}
    for fill in found.fills:
        kept = fill.param.endswith(KEPT_FLOAT32)
        as_stored = dtype is None or fill.row.bytes_only
        wanted = None if as_stored else np.dtype(np.float32) if kept else dtype
        parts[fill.param] = Part(found, fill, watch, wanted, own)
    for name, part in parts.items():
        if name.endswith("_scales"):
            part.blocks = parts[name.removesuffix("scales") + "blocks"]
    return parts
