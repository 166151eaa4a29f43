"""Compiled programs kept on disk, so that the next start need not compile them again."""

import os
from pathlib import Path

import jax

# Programs that compile faster than this are not worth a file.
_WORTH_KEEPING_S = 0.3


def enable_compilation_cache(path: str | os.PathLike | None = None) -> Path:
    """Lets JAX keep compiled programs in a folder, and returns it. For the whole process.

    path: the folder, made if it is missing; None is `gptoss_jax/programs` in XDG_CACHE_HOME, or
    where that is not set in `~/.cache`. The command line calls this; the library never does by
    itself. Entries are keyed by the program, the versions and the device; deleting the folder is
    always safe. Raises OSError where the folder cannot be made.
    """
    if path is None:
        path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "gptoss_jax" / "programs"
    folder = Path(path).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING_S)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX looks at the folder's name once, at its first compilation.
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()
    return folder
