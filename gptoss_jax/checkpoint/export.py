"""Writes checkpoints in the published layouts, from another checkpoint or from a live model.

    mxfp4     Hugging Face, experts packed: packed sources byte for byte, dense ones quantised
    bf16      Hugging Face, experts [E, in, out] in bfloat16: packed sources decoded exactly
    original  OpenAI's names, experts packed

One tensor at a time, or one expert of a stack, into a folder beside the target that takes the
target's name when all of it is on the disk.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from tqdm import tqdm

from ..config import Config
from ..errors import CheckpointError
from ..kernels import mxfp4
from ..model import GptOss
from ..places import find, vacant
from ..sharding import relayout
from . import names
from .config_json import config_to_hf, config_to_original, with_storage
from .files import CONFIG, INDEX, SINGLE
from .layouts import open_checkpoint
from .names import BLOCK, Fill
from .parts import parts_of
from .safetensors_file import nbytes, write_file
from .stops import GENERATION, side_folder, tokens
from .values import Watch

LAYOUT_OF: dict[str, str] = {"mxfp4": "hf-mxfp4", "bf16": "hf-bf16", "original": "original"}
SHARD = 4_800_000_000  # bytes; openai/gpt-oss-20b is cut at this size into its three files
_SIDE_FILES = (
    "generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json "
    "added_tokens.json chat_template.jinja LICENSE USAGE_POLICY"
).split()
_BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where values come from. read(param, experts) gives a parameter, or some experts of it, as it
    is stored; packed: whether the experts are blocks and scales.
    """

    where: str  # for errors
    config: Config
    packed: bool
    read: Callable[[str, slice], np.ndarray]
    watch: Watch
    side: Path | None  # a folder with tokenizer.json and its like
    hf: dict[str, Any] | None  # the source's own config.json, if it is Hugging Face's
    stop_tokens: tuple[int, ...]


def export(
    src,
    dst,
    *,
    format: str = "mxfp4",
    max_shard_size: int | str = SHARD,
    allow_zero: bool = False,
) -> Path:
    """Rewrites the checkpoint `src` (as in `load`) as the folder `dst`, and returns it.

    max_shard_size: bytes, or like "4.8GB"; a checkpoint that fits is one file. Raises ValueError
    where `dst` holds something or the arguments cannot be, CheckpointError where the source is
    wrong or the disk too small. Nothing half-written is left behind.
    """
    layout, shard = _checked(dst, format, max_shard_size)
    found = open_checkpoint(src).require()
    stop_tokens, _ = tokens(found)
    watch = Watch(allow_zero=allow_zero)
    parts = parts_of(found, watch, None, own=False)

    def read(param: str, experts: slice) -> np.ndarray:
        value = parts[param][experts]
        if experts.stop is None or experts.stop >= parts[param].shape[0]:
            parts[param].forget()
        return value

    hf = None if found.layout == "original" else found.files.config
    source = Source(
        where=str(found.folder),
        config=found.config,
        packed=found.packed,
        read=read,
        watch=watch,
        side=side_folder(found),
        hf=hf,
        stop_tokens=stop_tokens,
    )
    return write(source, Path(dst), layout, shard)


def export_model(
    model: GptOss,
    dst,
    *,
    format: str = "mxfp4",
    tokenizer: str | Path | None = None,
    max_shard_size: int | str = SHARD,
    allow_zero: bool = False,
) -> Path:
    """Writes a live model, as `export` does: float32 weights are rounded to bfloat16, dense experts
    quantised where the format packs them.

    tokenizer: a folder (or "tiny") whose tokenizer.json and other side files are copied. Raises
    NotImplementedError for a model that this process holds only a part of.
    """
    layout, shard = _checked(dst, format, max_shard_size)
    state = {
        ".".join(map(str, path)): variable[...]
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    if not all(array.is_fully_addressable for array in state.values()):
        raise NotImplementedError(
            "the model is spread over several processes; export it from one that holds all of it."
        )
    packed = model.blocks[0].moe.experts.layout != "dense"
    watch = Watch(allow_zero=allow_zero)

    @functools.lru_cache(maxsize=1)
    def stored(n: int) -> dict[str, jax.Array]:
        weights = model.blocks[n].moe.experts.weights()
        return relayout(weights, "checkpoint", model.mesh).leaves()

    def read(param: str, experts: slice) -> np.ndarray:
        inside = ".experts." in param
        if inside and packed:
            _, n, _, _, leaf = param.split(".")
            value = np.asarray(stored(int(n))[leaf][experts])
        else:
            value = np.asarray(state[param][experts])
        watch.look(param, inside, param, experts, value)
        return value

    source = Source(
        where="the model",
        config=model.config,
        packed=packed,
        read=read,
        watch=watch,
        side=None if tokenizer is None else find(tokenizer),
        hf=None,
        stop_tokens=tuple(model.stop_tokens),
    )
    return write(source, Path(dst), layout, shard)


def _checked(dst, format: str, max_shard_size: int | str) -> tuple[str, int]:
    if format not in LAYOUT_OF:
        raise ValueError(f"format must be one of {', '.join(LAYOUT_OF)}; got {format!r}.")
    vacant(dst)
    return LAYOUT_OF[format], size_in_bytes(max_shard_size)


def size_in_bytes(size: int | str) -> int:
    """`"4.8GB"` is 4_800_000_000; KB, MB, GB are powers of 1000, KiB, MiB, GiB of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]i?)?B?", str(size), re.IGNORECASE)
    if not match or not float(match[1]):
        raise ValueError(
            f"max_shard_size must be bytes, or like '4.8GB' or '512MiB'; got {size!r}."
        )
    unit = (match[2] or "").lower()
    power = " kmg".index(unit[:1] or " ")
    return max(int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** power), 1)


# --- what is written --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Planned:
    """One tensor of the target: tensor number `part` of a parameter."""

    stored: str
    shape: tuple[int, ...]
    fill: Fill
    part: int


def plan(layout: str, config: Config) -> dict[str, Planned]:
    """Every tensor of a layout, in the order of the published files."""
    out = {}
    for fill in names.fills(layout, config):
        for part, (name, shape) in enumerate(fill.tensors):
            out[name] = Planned("U8" if fill.row.bytes_only else "BF16", shape, fill, part)
    return out


def shards(tensors: dict[str, Planned], layout: str, limit: int) -> dict[str, list[str]]:
    """{file: its tensors}: a new file where the next tensor would pass `limit` bytes."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        more = nbytes(tensor.stored, tensor.shape)
        if groups[-1] and size + more > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += more
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    if layout == "original":  # counted from 1, and with two dashes
        return {
            f"model--{i:05}-of-{len(groups):05}.safetensors": g for i, g in enumerate(groups, 1)
        }
    last = len(groups) - 1
    return {f"model-{i:05}-of-{last:05}.safetensors": g for i, g in enumerate(groups)}


def index_json(tensors: dict[str, Planned], files: dict[str, list[str]]) -> str:
    """With the sizes of 20b, the published file to the byte."""
    total = sum(nbytes(t.stored, t.shape) for t in tensors.values())
    weight_map = {name: file for file, listed in files.items() for name in listed}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})


class Values:
    """The bytes of the target's tensors, made from the source one expert at a time."""

    def __init__(self, source: Source):
        self.source = source
        self.scales: dict[str, list[np.ndarray]] = {}  # of blocks that were just quantised

    def of(self, tensor: Planned) -> Iterator[np.ndarray]:
        param = tensor.fill.param
        if ".experts." not in param:
            yield self._stored(tensor, self.source.read(param, slice(None)))
            return
        stem = param.removesuffix("_scales")
        if stem != param and stem in self.scales:
            yield from self.scales.pop(stem)
            return
        for e in range(self.source.config.experts):
            yield self._stored(tensor, self._experts(param, slice(e, e + 1)))

    def _stored(self, tensor: Planned, value: np.ndarray) -> np.ndarray:
        if tensor.stored == "BF16":
            value = value.astype(_BF16, copy=False)
        return tensor.fill.row.how.write(value, len(tensor.fill.tensors))[tensor.part]

    def _experts(self, param: str, experts: slice) -> np.ndarray:
        read, packed = self.source.read, self.source.packed
        if param.endswith("_bias") or packed == param.endswith(("_blocks", "_scales")):
            return read(param, experts)
        if packed:
            return np.asarray(
                _decode(read(f"{param}_blocks", experts), read(f"{param}_scales", experts))
            )
        stem = param.removesuffix("_blocks")
        blocks, scales = map(np.asarray, _encode(read(stem, experts)))
        self.scales.setdefault(stem, []).append(scales)
        return blocks


_decode = jax.jit(functools.partial(mxfp4.decode, dtype=_BF16))
_encode = jax.jit(mxfp4.encode)


# --- how it is written ------------------------------------------------------------------


def write(source: Source, dst: Path, layout: str, limit: int = SHARD) -> Path:
    """Writes all of a layout (a key of LAYOUTS) in files of at most `limit` bytes of tensors."""
    config = source.config
    if layout in names.PACKED and (config.embed % BLOCK or config.ffn % BLOCK):
        raise ValueError(
            f"MXFP4 packs blocks of {BLOCK}; hidden_size {config.embed} and intermediate_size "
            f"{config.ffn} must be multiples. format='bf16' has no such limit."
        )
    config_values = _config_values(source, layout)
    tensors = plan(layout, config)
    files = shards(tensors, layout, limit)
    total = sum(nbytes(t.stored, t.shape) for t in tensors.values())
    values = Values(source)
    with _new_folder(dst, total) as folder:
        with tqdm(total=total, unit="B", unit_scale=True, desc="exporting", disable=None) as bar:

            def data(name: str) -> Iterator[np.ndarray]:
                for piece in values.of(tensors[name]):
                    bar.update(piece.nbytes)
                    yield piece

            for file, listed in files.items():
                header = {name: (tensors[name].stored, tensors[name].shape) for name in listed}
                write_file(folder / file, header, data)
        if problems := source.watch.problems():
            raise CheckpointError(source.where, problems)
        if len(files) > 1:
            (folder / INDEX).write_text(index_json(tensors, files))
        _dump(folder / CONFIG, config_values)
        if layout == "original":
            kinds = {name: _kind(name, tensors[name].stored) for name in tensors}
            _dump(folder / "dtypes.json", kinds)
        for name in _SIDE_FILES:
            if source.side is not None and (source.side / name).is_file():
                shutil.copyfile(source.side / name, folder / name)
        if source.stop_tokens and not (folder / GENERATION).exists():
            _dump(folder / GENERATION, _generation(source))
    return dst


def _config_values(source: Source, layout: str) -> dict[str, Any]:
    if layout == "original":
        return config_to_original(source.config)
    packed = layout in names.PACKED
    if source.hf is not None:
        return with_storage(source.hf, packed=packed)
    config = source.config
    if not config.eos and source.stop_tokens:
        config = dataclasses.replace(config, eos=source.stop_tokens)
    return config_to_hf(config, packed=packed)


def _kind(name: str, stored: str) -> str:
    return "UE8" if name.endswith(".scales") else "FP4" if name.endswith(".blocks") else stored


def _generation(source: Source) -> dict[str, Any]:
    pad = source.config.pad
    out = {"do_sample": True, "eos_token_id": list(source.stop_tokens)}
    return out if pad is None else out | {"pad_token_id": pad}


def _dump(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


@contextlib.contextmanager
def _new_folder(dst: Path, size_bytes: int) -> Iterator[Path]:
    """A folder beside `dst` that becomes `dst` at the end of the `with`, or is removed."""
    dst = dst.absolute()
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(dst.parent).free
        if free < size_bytes:
            raise CheckpointError(
                dst, [f"the export takes {size_bytes:,} bytes; the disk has {free:,} left."]
            )
        folder = dst.parent / f".{dst.name}.{uuid.uuid4().hex[:8]}.partial"
        folder.mkdir()
    except OSError as e:
        raise CheckpointError(dst, [f"cannot be written: {e.strerror}."]) from e
    try:
        yield folder
        os.rename(folder, dst)
    except OSError as e:
        raise CheckpointError(
            dst, [f"writing failed: {e.strerror or e}; nothing was left behind."]
        ) from e
    finally:
        shutil.rmtree(folder, ignore_errors=True)
