"""The two PyTorch implementations of gpt-oss, opened on a checkpoint and traced as our model is.

    transformers   reads both Hugging Face layouts (MXFP4 is unpacked to dense weights)
    OpenAI's       package `gpt-oss`; reads the original/ layout

Both hold dense weights: four bytes a parameter in float32, two in bfloat16. torch is imported when
a reference is opened, never before.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

_INSTALL = {
    "torch": 'pip install "gptoss_jax[parity]"',
    "transformers": 'pip install "gptoss_jax[parity]"',
    "gpt_oss.torch.model": (
        "pip install --no-deps --ignore-requires-python gpt-oss==0.0.9 "
        "(it asks for Python 3.12 and a server's packages, which its torch model does not use)"
    ),
}
_CHUNK_BYTES = 1 << 28  # of expert weights that OpenAI's model gathers at a time


class ReferenceMissing(ImportError):
    """A package that the comparison needs is not installed; the message says how to get it."""


def is_original(folder: Path) -> bool:
    """Whether config.json is OpenAI's own, which names no architecture."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False  # what is wrong with it is for our loader to say
    return "architectures" not in config and "model_type" not in config


def require(folder: Path) -> None:
    """Raises ReferenceMissing where the packages that read this folder are not installed."""
    _import("torch")
    _import("gpt_oss.torch.model" if is_original(folder) else "transformers")


def open_reference(folder: Path, *, dtype: str = "float32", device: str = "cpu"):
    """The reference that reads this folder: `Transformers` or `OpenAI`.

    dtype: "float32" or "bfloat16", of weights and activations. device: as torch names it.
    Raises ReferenceMissing.
    """
    kind = OpenAI if is_original(folder) else Transformers
    return kind(folder, dtype=dtype, device=device)


class Transformers:
    """GptOssForCausalLM with eager attention, the one that has sinks on every device."""

    name = "transformers"

    def __init__(self, folder: Path, *, dtype: str = "float32", device: str = "cpu"):
        self.torch = _import("torch")
        transformers = _import("transformers")
        config = transformers.AutoConfig.from_pretrained(folder)
        options = {}
        if getattr(config, "quantization_config", None) is not None:
            options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
        with _quiet(transformers.utils.logging):
            self.model, found = transformers.GptOssForCausalLM.from_pretrained(
                folder,
                dtype=getattr(self.torch, dtype),
                attn_implementation="eager",
                output_loading_info=True,
                local_files_only=True,
                **options,
            )
        if wrong := {what: names for what, names in found.items() if names}:
            raise ValueError(f"transformers did not load {folder} completely: {wrong}")
        self.model = self.model.to(device).eval()
        self.version = transformers.__version__

    def trace(self, tokens: Sequence[int]) -> dict[str, list[np.ndarray] | np.ndarray]:
        """As `GptOss.trace`, for one sequence and without the batch axis; float32."""
        layers = self.model.model.layers
        taps = _Taps(self.torch)
        for layer in layers:
            taps.input("after_attention", layer.post_attention_layernorm)
            taps.output("after", layer)
            taps.output("router_logits", layer.mlp.router, 0)
            taps.output("router_ids", layer.mlp.router, 2)
        with taps:
            logits = self.logits(tokens)
        return taps.arrays(len(layers)) | {"logits": logits}

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [T, V], unmasked."""
        with self.torch.inference_mode():
            ids = self.torch.tensor([list(tokens)], device=self.model.device)
            return _array(self.model(ids, use_cache=False).logits[0])


class OpenAI:
    """OpenAI's torch model. It is written for bfloat16; float32 widens the loaded weights."""

    name = "openai"

    def __init__(self, folder: Path, *, dtype: str = "float32", device: str = "cpu"):
        self.torch = _import("torch")
        module = _import("gpt_oss.torch.model")
        self.model = module.Transformer.from_checkpoint(str(folder), device=device)
        if dtype == "float32":
            self.model = self.model.float()
        for block in self.model.block:
            _in_chunks(block.mlp, self.torch)
        self.device = device
        self.version = "0.0.9"

    def trace(self, tokens: Sequence[int]) -> dict[str, list[np.ndarray] | np.ndarray]:
        """As `GptOss.trace`, for one sequence and without the batch axis; float32."""
        taps = _Taps(self.torch)
        for block in self.model.block:
            taps.output("after_attention", block.attn)
            taps.output("after", block)
            taps.output("router_logits", block.mlp.gate)
        with taps:
            logits = self.logits(tokens)
        arrays = taps.arrays(len(self.model.block))
        chosen = self.model.block[0].mlp.experts_per_token
        best_first = [np.argsort(-x, axis=-1, kind="stable") for x in arrays["router_logits"]]
        arrays["router_ids"] = [ids[:, :chosen] for ids in best_first]
        return arrays | {"logits": logits}

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [T, V], unmasked."""
        with self.torch.inference_mode():
            return _array(self.model(self.torch.tensor(list(tokens), device=self.device)))


@contextlib.contextmanager
def _quiet(logging: ModuleType) -> Iterator[None]:
    """transformers without its progress bar where nobody watches, and without advice on kernels."""
    bar, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


class _Taps:
    """Forward hooks that keep what passes, under a name, in the order in which it passes."""

    def __init__(self, torch: ModuleType):
        self.torch = torch
        self.kept: dict[str, list] = {}
        self.handles = []

    def input(self, name: str, module) -> None:
        keep = self._keeper(name)
        self.handles.append(module.register_forward_pre_hook(lambda _, args: keep(args[0])))

    def output(self, name: str, module, part: int | None = None) -> None:
        keep = self._keeper(name)

        def hook(_, __, out):
            keep(out if part is None else out[part])

        self.handles.append(module.register_forward_hook(hook))

    def _keeper(self, name: str):
        parts = []
        self.kept.setdefault(name, []).append(parts)

        def keep(value) -> None:
            value = value[0] if isinstance(value, tuple) else value
            parts.append(_array(value.reshape(-1, value.shape[-1])))

        return keep

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()

    def arrays(self, layers: int) -> dict[str, list[np.ndarray]]:
        out = {name: [np.concatenate(p) for p in parts] for name, parts in self.kept.items()}
        assert all(len(parts) == layers for parts in out.values())
        return out


def _in_chunks(mlp, torch: ModuleType) -> None:
    """Runs an expert block on a few tokens at a time, which changes nothing: it is per token.

    OpenAI's code copies the chosen experts' weights for every token: 266 MB a token for 20b in
    float32.
    """
    per_token = mlp.experts_per_token * mlp.mlp1_weight[0].nbytes
    rows = max(1, _CHUNK_BYTES // per_token)
    whole = mlp.forward
    mlp.forward = lambda x: torch.cat([whole(part) for part in x.split(rows)])


def _array(tensor) -> np.ndarray:
    return (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise ReferenceMissing(
            f"parity needs {name.split('.')[0]} ({e}); install it with: {_INSTALL[name]}"
        ) from e
