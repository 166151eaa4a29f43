"""Checkpoint folders with one thing changed, for tests of what the loader refuses."""

import copy
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import checkpoints
import numpy as np

Tensors = dict[str, tuple[str, np.ndarray]]

# One layer is enough to have every kind of tensor. No two axes have the same length.
SMALL = checkpoints.TINY.replace(layers=1, experts=4, experts_per_token=2, vocab=290)


def tensors(weights: dict[str, np.ndarray], layout: str) -> Tensors:
    """{name: (stored dtype, array)} as `checkpoints.write` would store them."""
    named = {"bf16": checkpoints.as_bf16, "original": checkpoints.as_original}.get(layout, dict)
    return checkpoints.stored(named(weights))


def folder(
    path: Path,
    layout: str = "mxfp4",
    change: Callable[[Tensors], None] | None = None,
    *,
    numbers: checkpoints.Numbers = SMALL,
    weights: dict[str, np.ndarray] | None = None,
    config: Callable[[dict], None] | None = None,
    **options,
) -> Path:
    """A checkpoint of one file after `change` edited its tensors and `config` its config.json."""
    weights = checkpoints.make_weights(numbers) if weights is None else weights
    checkpoints.write(path, numbers, weights, layout, **options)
    if change is not None:
        edited = copy.copy(tensors(weights, layout))
        change(edited)
        checkpoints.save(path / "model.safetensors", edited)
    if config is not None:
        values = json.loads((path / "config.json").read_text())
        config(values)
        (path / "config.json").write_text(json.dumps(values))
    return path


def raw(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """A safetensors file with any header, true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    claimed = len(text) if length is None else length
    path.write_bytes(claimed.to_bytes(8, "little") + text + data)
    return path


def recipe():
    """recipes/random_checkpoint.py, which is a program and not of the package."""
    path = Path(__file__).parents[2] / "recipes" / "random_checkpoint.py"
    spec = importlib.util.spec_from_file_location("random_checkpoint", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
