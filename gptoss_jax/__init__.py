"""gpt-oss in JAX.

One alphabet for every array; a name ends in its axes.

    B batch     T query time       S key time (cache slots)           N tokens (B·T)
    D embed     K key/value heads  G query heads per key/value head   H head width
    M rows of one key/value head in the fused projection: G queries, one key, one value (M = G + 2)
    E experts   X experts chosen   F expert hidden width              V vocabulary
    P gate and up rows of an expert, interleaved as in the checkpoint: row 2i gates 2i + 1 (P = 2F)

Inside `shard_map` a lower-case letter is this shard's part of an axis.

Importing touches no device, sets no environment variable and changes no global configuration; the
names below are loaded when they are first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import CheckpointError as CheckpointError
    from .checkpoint import export as export
    from .checkpoint import inspect as inspect
    from .checkpoint import load as load
    from .compile_cache import enable_compilation_cache as enable_compilation_cache
    from .config import Config as Config
    from .generation import generate as generate
    from .generation import stream as stream
    from .model import GptOss as GptOss
    from .sampling import Sampler as Sampler
    from .sharding import make_mesh as make_mesh
    from .text import Tokenizer as Tokenizer
    from .text import harmony as harmony

__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": ".checkpoint",
    "Config": ".config",
    "GptOss": ".model",
    "Sampler": ".sampling",
    "Tokenizer": ".text",
    "enable_compilation_cache": ".compile_cache",
    "export": ".checkpoint",
    "generate": ".generation",
    "harmony": ".text",
    "inspect": ".checkpoint",
    "load": ".checkpoint",
    "make_mesh": ".sharding",
    "stream": ".generation",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
