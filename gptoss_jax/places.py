"""Where a checkpoint lies: the folder that a name means, and what is none.

Imports nothing heavy, so that a wrong path is noticed before JAX is loaded.
"""

import os
import re
from pathlib import Path

from .errors import CheckpointError

TINY = Path(__file__).parent / "assets" / "tiny"
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
# Formats of other programs: file pattern, what it is, what would work.
FOREIGN = [
    ("*.gguf", "GGUF, llama.cpp's and Ollama's format", None),
    ("model.bin", "OpenAI's Metal format (or a pickle), with rows and scales rearranged", None),
    (
        "adapter_config.json",
        "a LoRA adapter, not a model",
        "merge it into its base model first (PEFT: merge_and_unload, then save_pretrained)",
    ),
    ("*.bin", "a PyTorch pickle, which can run code when it is opened", None),
    ("*.pt", "a PyTorch pickle, which can run code when it is opened", None),
    ("*.pth", "a PyTorch pickle, which can run code when it is opened", None),
    ("*.pkl", "a pickle, which can run code when it is opened", None),
    ("*.npz", "NumPy's format", None),
    (
        "_CHECKPOINT_METADATA",
        "a training checkpoint (Orbax)",
        "load the folder that training exported at its end",
    ),
]
WORKS = (
    "what works is a folder of safetensors as published: openai/gpt-oss-20b (MXFP4), a bfloat16 "
    "copy that transformers saved, or the original/ folder of OpenAI's repository"
)


def find(path: str | os.PathLike) -> Path:
    """The folder that `path` means: "tiny", a folder, or a name in Hugging Face's local cache.

    Raises CheckpointError, which says where it looked.
    """
    if str(path) == "tiny":  # always; a folder of that name is ./tiny
        return TINY
    folder = local(path)
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise CheckpointError(folder, [_foreign_file(folder)])
    if REPOSITORY.fullmatch(str(path)):
        return _cached(str(path))
    raise CheckpointError(folder, ["no such folder."])


def local(path: str | os.PathLike) -> Path:
    """A path with `~` filled in, whether something lies there or not.

    Raises CheckpointError for what cannot be one, such as a name too long or a user unknown.
    """
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise CheckpointError(f"{path!r:.80}", ["a path or a name is expected."])
    try:
        whole = Path(path).expanduser()
        whole.exists()
    except (OSError, RuntimeError, ValueError) as e:
        raise CheckpointError(f"{path!s:.80}", [f"no such folder: {_reason(e)}."]) from None
    return whole


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).rstrip(".")


def vacant(path: str | os.PathLike) -> Path:
    """A folder to be made, or one that is empty. Raises ValueError where something lies there."""
    folder = local(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; export to a new one.")
    return folder


def hub_cache() -> Path:
    """Hugging Face's local cache, by the same rules as huggingface_hub."""
    if given := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return local(given)
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return local(os.environ.get("HF_HOME") or Path(base) / "huggingface") / "hub"


def _cached(name: str) -> Path:
    """models--OWNER--NAME/snapshots/REVISION, the revision that refs/main names."""
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    snapshots = repository / "snapshots"
    main = repository / "refs" / "main"
    named = main.read_text("utf-8", "replace").strip() if main.is_file() else ""
    if re.fullmatch(r"\w[\w.-]*", named) and (snapshots / named).is_dir():
        return snapshots / named
    found = sorted(p for p in snapshots.glob("*") if p.is_dir())
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            name,
            [f"{repository} holds {len(found)} revisions and no refs/main; give one's folder."],
        )
    raise CheckpointError(
        name,
        [
            f"no folder of that name here, and none in Hugging Face's cache ({repository}); "
            f"`gptoss-jax download {name}` fetches it."
        ],
    )


def _foreign_file(path: Path) -> str:
    for pattern, what, way_out in FOREIGN:
        if path.match(pattern):
            return f"{path.name} is {what}; {way_out or WORKS}."
    if path.suffix == ".safetensors":
        return f"a file; give its folder, {path.parent}, where config.json lies too."
    return f"a file, not a checkpoint's folder; {WORKS}."
