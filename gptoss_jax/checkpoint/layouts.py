"""Which layout a folder is in, decided by tensor names, and whether it is whole."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from ..config import Config
from ..errors import CheckpointError
from ..places import find
from . import names
from .config_json import config_from_json
from .files import Files, open_folder
from .names import BLOCK, ONE_EACH, Fill
from .safetensors_file import LazyTensor

# One tensor name that only this layout has.
_SIGNS = {
    "hf-mxfp4": r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj_(blocks|scales)",
    "hf-bf16": r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj",
    "hf-per-expert": r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_projs\.\d+\.weight",
    "original": r"block\.\d+\.(attn|mlp)\..+",
}
_WORKS = (
    "use the published MXFP4 checkpoint, or a bfloat16 copy (transformers: save_pretrained after "
    "loading with dequantize=True)"
)
# Quantised by others: sign among tensor names, whose it is, what sets it apart.
_FOREIGN = [
    (
        r".*\.(absmax|quant_map|quant_state.*|nested_absmax|nested_quant_map)(\..*)?",
        "bitsandbytes (Unsloth's bnb-4bit)",
    ),
    (r".*\.experts\.\d+\..*(weight_scale|w13|w2).*", "AMD Quark, an expert in each name"),
    (r".*\.experts\.(gate|up|down)_proj\.(weight|scales|biases|bias)", "MLX, gate and up split"),
    (r".*\.(qweight|qzeros|g_idx)", "GPTQ or AWQ"),
    (r".*\.(weight_packed|weight_scale|weight_scale_inv|input_scale)", "compressed-tensors or FP8"),
    (r"(blk\.\d+\..*|token_embd\.weight)", "llama.cpp names (from GGUF)"),
    (r".*lora_[AB].*", "a LoRA adapter, not a model"),
]
# quant_method of config.json, as its users call it.
_METHODS = {
    "bitsandbytes": "bitsandbytes (Unsloth's bnb-4bit)",
    "quark": "AMD Quark",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "fp8": "FP8",
    "compressed-tensors": "compressed-tensors",
}


@dataclasses.dataclass
class Checkpoint:
    """A folder that was looked through. problems: why it cannot be loaded, empty if it can."""

    files: Files
    layout: str | None = None
    config: Config | None = None
    fills: list[Fill] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def packed(self) -> bool:
        return self.layout in names.PACKED

    def tensors(self, fill: Fill) -> list[LazyTensor]:
        return [self.files.tensors[name] for name, _ in fill.tensors]

    def require(self) -> "Checkpoint":
        """Raises CheckpointError with all problems, if there are any."""
        if self.problems:
            raise CheckpointError(self.folder, self.problems)
        return self


def open_checkpoint(path) -> Checkpoint:
    """Finds a checkpoint and compares its headers with its config; reads no tensor.

    Raises CheckpointError only where there is no folder to look into.
    """
    files = open_folder(find(path))
    found = Checkpoint(files, problems=list(files.problems), notes=list(files.notes))
    if foreign := _foreign(files):
        found.problems = [foreign]
        return found
    if files.config:
        try:
            found.config = config_from_json(files.config)
        except ValueError as e:
            found.problems.append(str(e))
    if not files.tensors:
        return found
    found.layout = _layout(files)
    if found.layout is None:
        some = ", ".join(sorted(files.tensors)[:3])
        found.problems.append(f"these are not the tensors of a gpt-oss model: {some}, ...")
    elif found.config is not None:
        found.problems += _mismatches(found)
    quantized = files.config.get("quantization_config")
    if found.layout in ("hf-bf16", ONE_EACH) and quantized:
        found.notes.append("config.json says mxfp4; the experts are stored dense and read so.")
    return found


def _layout(files: Files) -> str | None:
    counts = {
        layout: sum(bool(re.fullmatch(sign, name)) for name in files.tensors)
        for layout, sign in _SIGNS.items()
    }
    best = max(counts, key=counts.__getitem__)
    if counts[best]:
        return best
    if any(name.startswith("model.layers.") for name in files.tensors):  # and no experts at all
        return "hf-mxfp4" if files.config.get("quantization_config") else "hf-bf16"
    return None


def _foreign(files: Files) -> str | None:
    quantized = files.config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    if method not in (None, "mxfp4"):
        what = _METHODS.get(str(method), repr(method))
        return f"quantised by {what}; only MXFP4 as published is read: {_WORKS}."
    if isinstance(files.config.get("quantization"), dict):
        return f"MLX's quantised layout, gate and up split; {_WORKS}."
    for sign, what in _FOREIGN:
        for name in files.tensors:
            if re.fullmatch(sign, name):
                return f"{name} is in the layout of {what}; {_WORKS}."
    return None


def _mismatches(found: Checkpoint) -> Iterator[str]:
    """Every tensor against every parameter: missing, unexpected, misshapen, mistyped."""
    config, tensors = found.config, found.files.tensors
    if widths := [f"{n} {w}" for n, w in _widths(config) if w % BLOCK and found.packed]:
        yield f"MXFP4 packs blocks of {BLOCK}; {' and '.join(widths)} cannot be packed."
        return
    if config.layers * (config.experts if found.layout == ONE_EACH else 1) > len(tensors):
        yield (
            f"config.json has {config.layers} layers of {config.experts} experts; "
            f"the files hold {len(tensors)} tensors."
        )
        return
    found.fills = list(names.fills(found.layout, config))
    floating = _floating(found)
    expected = set()
    for fill in found.fills:
        for name, shape in fill.tensors:
            expected.add(name)
            if name not in tensors:
                yield f"{name} is missing; {_drawn(fill.row.param)} needs it, {list(shape)}."
                continue
            tensor = tensors[name]
            if tensor.shape != shape:
                yield f"{name} is {list(tensor.shape)}; by config.json it is {list(shape)}."
            if tensor.stored not in _allowed(fill, floating):
                yield (
                    f"{name} is stored as {tensor.stored}; it must be "
                    f"{' or '.join(_allowed(fill, floating))}."
                )
    for name in tensors:
        if name not in expected:
            yield f"{name} is unexpected: no parameter of this model needs it."


def _widths(config: Config) -> tuple[tuple[str, int], ...]:
    return ("hidden_size", config.embed), ("intermediate_size", config.ffn)


def _drawn(param: str) -> str:
    return param.removeprefix("blocks.{n}.")


def _floating(found: Checkpoint) -> str:
    """The one dtype of a checkpoint's weights: bfloat16, or float32 where all of them are."""
    wide = [t.stored == "F32" for t in found.files.tensors.values() if t.stored != "U8"]
    return "F32" if sum(wide) * 2 > len(wide) else "BF16"


def _allowed(fill: Fill, floating: str) -> tuple[str, ...]:
    if fill.param.endswith("_scales"):
        return ("U8", "F8_E8M0")
    if fill.param.endswith("_blocks"):
        return ("U8",)
    if fill.param.endswith(KEPT_FLOAT32):
        # The model keeps these in float32, and some training programs store them so.
        return tuple(dict.fromkeys((floating, "F32")))
    return (floating,)


KEPT_FLOAT32 = ("norm.scale_D", "sinks_KG", "router_bias_E")
