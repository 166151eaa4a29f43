"""Checkpoint tensors and the model's parameters, as tables that are complete in both directions.

Each row: a parameter, its axes, the tensors it is made of with theirs, and how. The axes are
letters of the alphabet in gptoss_jax/__init__.py; two letters side by side are one fused axis of
their product, heads major. Lower-case d and f are D/32 and F/32, blocks of MXFP4. Rows stand in
the order in which openai/gpt-oss-20b stores them.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..config import Config
from .safetensors_file import LazyTensor

BLOCK = 32  # values that share a scale
Index = tuple[slice, ...]


class Same:
    """One tensor; its axes are split or fused, its elements stay in their order."""

    def read(
        self, tensors: Sequence[LazyTensor], shape: tuple[int, ...], index: Index
    ) -> np.ndarray:
        return tensors[0].reshape(*shape)[index]

    def write(self, value: np.ndarray, count: int) -> list[np.ndarray]:
        return [value]


class Transposed:
    """One stack [E, in, out] for our [E, out, in]. By layout, never by shape: 2880 = 2880."""

    def read(
        self, tensors: Sequence[LazyTensor], shape: tuple[int, ...], index: Index
    ) -> np.ndarray:
        return tensors[0].swapaxes(1, 2)[index]

    def write(self, value: np.ndarray, count: int) -> list[np.ndarray]:
        return [value.swapaxes(1, 2)]


class FusedRows:
    """Rows of q (all heads), then k, then v: as three tensors, or as one that holds all three.

    Query head k·G + g belongs to key/value head k. Ours: [K, M, ...], row m of kv head k is its
    query g = m, then its key, then its value.
    """

    def read(
        self, tensors: Sequence[LazyTensor], shape: tuple[int, ...], index: Index
    ) -> np.ndarray:
        (kv_heads, rows, width), rest = shape[:3], shape[3:]
        index = (*index, *(slice(None),) * (len(shape) - len(index)))
        groups, picked = rows - 2, range(rows)[index[1]]
        if len(tensors) == 1:
            q, kv = kv_heads * groups * width, kv_heads * width
            ends = (0, q, q + kv, q + 2 * kv)
            tensors = [tensors[0].rows(*ends[i : i + 2]) for i in range(3)]
        parts = []
        for tensor, first, count in zip(
            tensors, (0, groups, groups + 1), (groups, 1, 1), strict=True
        ):
            wanted = [m - first for m in picked if first <= m < first + count]
            if wanted:
                heads = tensor.reshape(kv_heads, count, width, *rest)
                span = slice(wanted[0], wanted[-1] + 1)
                parts.append(heads[(index[0], span, *index[2:])])
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def write(self, value: np.ndarray, count: int) -> list[np.ndarray]:
        groups, rest = value.shape[1] - 2, value.shape[3:]
        parts = [value[:, :groups], value[:, groups], value[:, groups + 1]]
        rows = [part.reshape(-1, *rest) for part in parts]
        return rows if count == 3 else [np.concatenate(rows)]


class OnePerExpert:
    """E tensors, one for each expert, stacked."""

    def read(
        self, tensors: Sequence[LazyTensor], shape: tuple[int, ...], index: Index
    ) -> np.ndarray:
        return np.stack([t[tuple(index[1:])] for t in tensors[index[0]]])

    def write(self, value: np.ndarray, count: int) -> list[np.ndarray]:
        return list(value)


SAME, TRANSPOSED, FUSED_ROWS, ONE_PER_EXPERT = Same(), Transposed(), FusedRows(), OnePerExpert()
How = Same | Transposed | FusedRows | OnePerExpert


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter and the tensors it is made of; {n} is the layer, {e} the expert."""

    param: str
    axes: str
    tensors: tuple[tuple[str, str], ...]
    how: How = SAME

    @property
    def bytes_only(self) -> bool:
        """Stored as U8 (or, for scales, F8_E8M0); everything else is floating."""
        return self.param.endswith(("_blocks", "_scales"))


def _row(param: str, axes: str, *tensors: str, how: How = SAME) -> Row:
    """tensors: "name: axes"."""
    return Row(param, axes, tuple(tuple(t.split(": ")) for t in tensors), how)


_HF = "model.layers.{n}."
_HF_ATTENTION = [
    _row("blocks.{n}.attn_norm.scale_D", "D", _HF + "input_layernorm.weight: D"),
    _row("blocks.{n}.attn.out_bias_D", "D", _HF + "self_attn.o_proj.bias: D"),
    _row("blocks.{n}.attn.out_DKGH", "D K G H", _HF + "self_attn.o_proj.weight: D KGH"),
    _row(
        "blocks.{n}.attn.qkv_bias_KMH",
        "K M H",
        _HF + "self_attn.q_proj.bias: KGH",
        _HF + "self_attn.k_proj.bias: KH",
        _HF + "self_attn.v_proj.bias: KH",
        how=FUSED_ROWS,
    ),
    _row(
        "blocks.{n}.attn.qkv_KMHD",
        "K M H D",
        _HF + "self_attn.q_proj.weight: KGH D",
        _HF + "self_attn.k_proj.weight: KH D",
        _HF + "self_attn.v_proj.weight: KH D",
        how=FUSED_ROWS,
    ),
    _row("blocks.{n}.attn.sinks_KG", "K G", _HF + "self_attn.sinks: KG"),
]
_HF_ROUTER = [
    _row("blocks.{n}.moe.router_bias_E", "E", _HF + "mlp.router.bias: E"),
    _row("blocks.{n}.moe.router_ED", "E D", _HF + "mlp.router.weight: E D"),
]
_HF_EXPERTS = _HF + "mlp.experts."
_HF_PACKED = [
    _row("blocks.{n}.moe.experts.gate_up_bias", "E P", _HF_EXPERTS + "gate_up_proj_bias: E P"),
    _row(
        "blocks.{n}.moe.experts.gate_up_blocks",
        "E P d 16",
        _HF_EXPERTS + "gate_up_proj_blocks: E P d 16",
    ),
    _row(
        "blocks.{n}.moe.experts.gate_up_scales", "E P d", _HF_EXPERTS + "gate_up_proj_scales: E P d"
    ),
    _row("blocks.{n}.moe.experts.down_bias", "E D", _HF_EXPERTS + "down_proj_bias: E D"),
    _row(
        "blocks.{n}.moe.experts.down_blocks", "E D f 16", _HF_EXPERTS + "down_proj_blocks: E D f 16"
    ),
    _row("blocks.{n}.moe.experts.down_scales", "E D f", _HF_EXPERTS + "down_proj_scales: E D f"),
]
_HF_DENSE = [
    _row("blocks.{n}.moe.experts.gate_up_bias", "E P", _HF_EXPERTS + "gate_up_proj_bias: E P"),
    _row(
        "blocks.{n}.moe.experts.gate_up",
        "E P D",
        _HF_EXPERTS + "gate_up_proj: E D P",
        how=TRANSPOSED,
    ),
    _row("blocks.{n}.moe.experts.down_bias", "E D", _HF_EXPERTS + "down_proj_bias: E D"),
    _row("blocks.{n}.moe.experts.down", "E D F", _HF_EXPERTS + "down_proj: E F D", how=TRANSPOSED),
]
_HF_LINEAR = [
    _row("blocks.{n}.moe.router_bias_E", "E", _HF + "mlp.router.linear.bias: E"),
    _row("blocks.{n}.moe.router_ED", "E D", _HF + "mlp.router.linear.weight: E D"),
    *(
        _row(
            f"blocks.{{n}}.moe.experts.{ours}",
            f"E {axes}",
            _HF_EXPERTS + f"{theirs}: {axes}",
            how=ONE_PER_EXPERT,
        )
        for ours, theirs, axes in (
            ("gate_up_bias", "gate_up_projs.{e}.bias", "P"),
            ("gate_up", "gate_up_projs.{e}.weight", "P D"),
            ("down_bias", "down_projs.{e}.bias", "D"),
            ("down", "down_projs.{e}.weight", "D F"),
        )
    ),
]
_HF_END = [_row("blocks.{n}.moe_norm.scale_D", "D", _HF + "post_attention_layernorm.weight: D")]
_HF_TOP = [
    _row("embed.weight_VD", "V D", "model.embed_tokens.weight: V D"),
    _row("norm.scale_D", "D", "model.norm.weight: D"),
    _row("unembed.weight_VD", "V D", "lm_head.weight: V D"),
]

_OPENAI = [
    _row("blocks.{n}.attn_norm.scale_D", "D", "block.{n}.attn.norm.scale: D"),
    _row("blocks.{n}.attn.qkv_bias_KMH", "K M H", "block.{n}.attn.qkv.bias: KMH", how=FUSED_ROWS),
    _row("blocks.{n}.attn.qkv_KMHD", "K M H D", "block.{n}.attn.qkv.weight: KMH D", how=FUSED_ROWS),
    _row("blocks.{n}.attn.sinks_KG", "K G", "block.{n}.attn.sinks: KG"),
    _row("blocks.{n}.attn.out_bias_D", "D", "block.{n}.attn.out.bias: D"),
    _row("blocks.{n}.attn.out_DKGH", "D K G H", "block.{n}.attn.out.weight: D KGH"),
    _row("blocks.{n}.moe_norm.scale_D", "D", "block.{n}.mlp.norm.scale: D"),
    _row("blocks.{n}.moe.router_bias_E", "E", "block.{n}.mlp.gate.bias: E"),
    _row("blocks.{n}.moe.router_ED", "E D", "block.{n}.mlp.gate.weight: E D"),
    *(
        _row(f"blocks.{{n}}.moe.experts.{ours}", axes, f"block.{{n}}.mlp.{theirs}: {axes}")
        for ours, theirs, axes in (
            ("gate_up_bias", "mlp1_bias", "E P"),
            ("gate_up_blocks", "mlp1_weight.blocks", "E P d 16"),
            ("gate_up_scales", "mlp1_weight.scales", "E P d"),
            ("down_bias", "mlp2_bias", "E D"),
            ("down_blocks", "mlp2_weight.blocks", "E D f 16"),
            ("down_scales", "mlp2_weight.scales", "E D f"),
        )
    ),
]
_OPENAI_TOP = [
    _row("embed.weight_VD", "V D", "embedding.weight: V D"),
    _row("norm.scale_D", "D", "norm.scale: D"),
    _row("unembed.weight_VD", "V D", "unembedding.weight: V D"),
]

LAYOUTS: dict[str, tuple[Row, ...]] = {
    "hf-mxfp4": (*_HF_ATTENTION, *_HF_ROUTER, *_HF_PACKED, *_HF_END, *_HF_TOP),
    "hf-bf16": (*_HF_ATTENTION, *_HF_ROUTER, *_HF_DENSE, *_HF_END, *_HF_TOP),
    "hf-per-expert": (*_HF_ATTENTION, *_HF_LINEAR, *_HF_END, *_HF_TOP),
    "original": (*_OPENAI, *_OPENAI_TOP),
}
DESCRIPTIONS = {
    "hf-mxfp4": "Hugging Face, experts in MXFP4",
    "hf-bf16": "Hugging Face, experts dense [E, in, out]",
    "hf-per-expert": "Hugging Face names, one dense tensor for each expert",
    "original": "OpenAI's original/, experts in MXFP4",
}
PACKED = {"hf-mxfp4", "original"}
ONE_EACH = "hf-per-expert"


@dataclasses.dataclass(frozen=True)
class Fill:
    """A row for one layer of one config: everything named and sized."""

    param: str
    shape: tuple[int, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    row: Row


def fills(layout: str, config: Config) -> Iterator[Fill]:
    """Every parameter once. Layers come in the order of their names, 0 1 10 11 ... 2 20, and what
    belongs to no layer last, as published.
    """
    letters = sizes(config)
    rows = LAYOUTS[layout]
    for n in sorted(range(config.layers), key=str):
        for row in rows:
            if "{n}" in row.param:
                yield _fill(row, n, letters)
    for row in rows:
        if "{n}" not in row.param:
            yield _fill(row, 0, letters)


def _fill(row: Row, n: int, letters: dict[str, int]) -> Fill:
    tensors = tuple(
        (name.replace("{n}", str(n)).replace("{e}", str(e)), shape(axes, letters))
        for name, axes in row.tensors
        for e in (range(letters["E"]) if "{e}" in name else (0,))
    )
    return Fill(row.param.replace("{n}", str(n)), shape(row.axes, letters), tensors, row)


def sizes(config: Config) -> dict[str, int]:
    c = config
    return dict(
        D=c.embed,
        K=c.kv_heads,
        G=c.q_per_kv,
        M=c.q_per_kv + 2,
        H=c.head_width,
        E=c.experts,
        F=c.ffn,
        P=2 * c.ffn,
        V=c.vocab,
        d=c.embed // BLOCK,
        f=c.ffn // BLOCK,
    )


def shape(axes: str, letters: dict[str, int]) -> tuple[int, ...]:
    """`shape("KGH D", sizes(config))` is (K·G·H, D)."""
    return tuple(
        int(axis) if axis.isdigit() else math.prod(letters[letter] for letter in axis)
        for axis in axes.split()
    )
