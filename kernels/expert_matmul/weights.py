"""The experts' weights of one layer, in one of several layouts."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ..mxfp4 import BLOCK, decode, from_lanes, has_wide_scales, to_lanes
from ..mxfp4.fragments import DEPTH, ROWS, from_fragments, to_fragments

Layout = Literal["dense", "checkpoint", "triton", "triton_wide", "mosaic", "mosaic_wide"]

_LANES = {
    "gate_up_bias": ("experts", "gate_up"),
    "down_bias": ("experts", "embed"),
    "gate_up_blocks": ("experts", None, None, None, "gate_up"),
    "gate_up_scales": ("experts", None, "gate_up"),
    "down_blocks": ("experts", None, "ffn", None, None),
    "down_scales": ("experts", "ffn", None),
}
_FRAGMENTS = {
    "gate_up_bias": ("experts", None),
    "down_bias": ("experts", "embed"),
    "gate_up_blocks": ("experts", None, None, None, None),
    "gate_up_scales": ("experts", None, None, None),
    "down_blocks": ("experts", None, None, None, None),
    "down_scales": ("experts", None, None, None),
}
# What a mesh may cut: per leaf, the logical name of each axis. "gate_up" is rows of gate_up and
# "ffn" the input of down; equal cuts of both in whole blocks of 32 ffn values belong together.
AXES: dict[str, dict[str, tuple[str | None, ...]]] = {
    "dense": {
        "gate_up_bias": ("experts", "gate_up"),
        "down_bias": ("experts", "embed"),
        "gate_up": ("experts", "gate_up", None),
        "down": ("experts", "embed", "ffn"),
    },
    "checkpoint": {
        "gate_up_bias": ("experts", "gate_up"),
        "down_bias": ("experts", "embed"),
        "gate_up_blocks": ("experts", "gate_up", None, None),
        "gate_up_scales": ("experts", "gate_up", None),
        "down_blocks": ("experts", "embed", "ffn", None),
        "down_scales": ("experts", "embed", "ffn"),
    },
    "triton": _LANES,
    "triton_wide": _LANES,
    # Tiles of 64 rows and columns: a tensor axis, which cuts in blocks of 32, cannot cut them.
    "mosaic": _FRAGMENTS,
    "mosaic_wide": _FRAGMENTS,
}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "gate_up_bias",
        "down_bias",
        "gate_up",
        "down",
        "gate_up_blocks",
        "gate_up_scales",
        "down_blocks",
        "down_scales",
    ],
    meta_fields=["layout"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """E experts. Every leaf has E first, so that a shard of the leading axis is whole experts.

    dense:       gate_up [E, P, D], down [E, D, F] in a floating dtype, [out, in] each
    checkpoint:  gate_up_blocks uint8 [E, P, D/32, 16], gate_up_scales uint8 [E, P, D/32],
                 down_blocks uint8 [E, D, F/32, 16], down_scales uint8 [E, D, F/32], as in the files
    triton:      the lanes of mxfp4.lanes, the planes of gate_up being gate and up, those of down
                 the halves of D: gate_up_blocks uint16 [E, 2, D/32, 8, F], gate_up_scales uint16
                 [E, D/32, F], down_blocks uint16 [E, 2, F/32, 8, D/2], down_scales [E, F/32, D/2]
    triton_wide: the same arrays, some scale byte of which is above 128: exact, one multiplication
                 a weight slower
    mosaic:      the tiles of mxfp4.fragments: gate_up_blocks uint16 [E, P/64, D/64, 4, 256],
                 gate_up_scales uint32 [E, P/64, D/64, 32], down_* with D and F in place of P and D
    mosaic_wide: to mosaic as triton_wide to triton
    and always   gate_up_bias [E, P], down_bias [E, D]

    P = 2 F; row 2i of gate_up is gate i and row 2i + 1 is up i, in the bias of every layout too.
    """

    layout: str
    # Any: jax rebuilds the dataclass with shapes, specs or None in place of arrays.
    gate_up_bias: Any
    down_bias: Any
    gate_up: Any = None
    down: Any = None
    gate_up_blocks: Any = None
    gate_up_scales: Any = None
    down_blocks: Any = None
    down_scales: Any = None

    def leaves(self) -> dict[str, Any]:
        """The arrays that this layout has, by name."""
        return {name: getattr(self, name) for name in AXES[self.layout]}

    @property
    def count(self) -> int:
        """E, of the arrays at hand: inside shard_map, this shard's."""
        return self.down_bias.shape[0]

    @property
    def embed(self) -> int:
        """D."""
        return self.down_bias.shape[-1]

    @property
    def ffn(self) -> int:
        """F, of the arrays at hand."""
        return self.gate_up_bias.shape[-1] // 2

    def check(self) -> None:
        """Raises ValueError where a leaf is missing or its shape disagrees with the biases'."""
        if self.layout not in AXES:
            raise ValueError(f"layout must be one of {sorted(AXES)}; got {self.layout!r}.")
        for name, shape in _shapes(self.layout, self.count, self.embed, self.ffn).items():
            leaf = getattr(self, name)
            if leaf is None:
                raise ValueError(f"layout {self.layout!r} needs {name}; it is None.")
            if leaf.shape != shape:
                raise ValueError(f"{name} must be {shape}; got {leaf.shape}.")

    def matrix(self, name: str, expert: Any, dtype: DTypeLike) -> Array:
        """[out, in] of one expert, or [E, out, in] for `...`; packed ones decoded exactly."""
        if self.layout == "dense":
            return getattr(self, name)[expert]
        blocks, scales = getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")
        blocks, scales = blocks[expert], scales[expert]
        if self.layout != "checkpoint":
            blocks, scales = _unpacked(self.layout, name, blocks, scales)
        exact = dtype if dtype in (jnp.bfloat16, jnp.float32) else jnp.float32
        return decode(blocks, scales, exact)

    def dense(self, dtype: DTypeLike = jnp.bfloat16) -> "ExpertWeights":
        """The same experts with whole matrices, decoded exactly; E (P D + D F) values."""
        if self.layout == "dense":
            return self
        return ExpertWeights(
            layout="dense",
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            gate_up=self.matrix("gate_up", ..., dtype),
            down=self.matrix("down", ..., dtype),
        )

    def to_layout(self, layout: str) -> "ExpertWeights":
        """The same experts in another packed layout, bit for bit; can be traced.

        Raises:
            ValueError: to or from "dense", which holds other values than the checkpoint's; for
                "triton" and "mosaic" where a scale byte is above 128 (not seen under a trace: ask
                `layout_for` before); for "mosaic" where D or F is no multiple of 64.
        """
        if layout == self.layout:
            return self
        if "dense" in (layout, self.layout) or layout not in AXES:
            raise ValueError(
                f"only packed layouts turn into each other; {self.layout} to {layout}."
            )
        if self.layout != "checkpoint":
            packed = {}
            for name in ("gate_up", "down"):
                blocks, scales = getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")
                blocks, scales = _unpacked(self.layout, name, blocks, scales)
                packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain = dataclasses.replace(self, layout="checkpoint", **packed)
            return plain.to_layout(layout)
        if not layout.endswith("_wide") and not isinstance(self.down_scales, jax.core.Tracer):
            if self.needs_wide():
                raise ValueError(f"a scale byte is above 128: layout '{layout}_wide' is for those.")
        packed = {}
        for name in ("gate_up", "down"):
            blocks, scales = getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")
            if layout.startswith("mosaic"):
                lanes, words = to_fragments(blocks, scales)
                packed |= {f"{name}_blocks": lanes, f"{name}_scales": words}
                continue
            if name == "gate_up":  # rows g0 u0 g1 u1 ... to g0 g1 ... u0 u1 ...
                blocks = jnp.concatenate([blocks[:, 0::2], blocks[:, 1::2]], axis=1)
                scales = jnp.concatenate([scales[:, 0::2], scales[:, 1::2]], axis=1)
            lanes, pairs = to_lanes(blocks, scales)
            packed |= {f"{name}_blocks": lanes, f"{name}_scales": pairs}
        return dataclasses.replace(self, layout=layout, **packed)

    def to_checkpoint(self) -> "ExpertWeights":
        """The checkpoint's own bytes, from any packed layout."""
        return self.to_layout("checkpoint")

    def needs_wide(self) -> bool:
        """Whether a scale byte is above 128. Reads the values; layout checkpoint only."""
        return has_wide_scales(self.gate_up_scales) or has_wide_scales(self.down_scales)


def _unpacked(layout: str, name: str, blocks: Array, scales: Array) -> tuple[Array, Array]:
    """The checkpoint's bytes of one matrix from any other packed layout."""
    if layout.startswith("mosaic"):
        return from_fragments(blocks, scales)
    return _from_lanes(name, blocks, scales)


def _from_lanes(name: str, lanes: Array, pairs: Array) -> tuple[Array, Array]:
    blocks, scales = from_lanes(lanes, pairs)
    if name == "down":
        return blocks, scales
    half = scales.shape[-2] // 2  # gates, then ups, to interleaved

    def interleave(rows: Array, axis: int) -> Array:
        gate, up = jnp.split(rows, [half], axis=axis)
        return jnp.stack([gate, up], axis=axis + 1 + rows.ndim).reshape(rows.shape)

    return interleave(blocks, -3), interleave(scales, -2)


def _shapes(layout: str, count: int, embed: int, ffn: int) -> dict[str, tuple[int, ...]]:
    if layout == "dense":
        return {"gate_up": (count, 2 * ffn, embed), "down": (count, embed, ffn)}
    if layout == "checkpoint":
        return {
            "gate_up_blocks": (count, 2 * ffn, embed // BLOCK, BLOCK // 2),
            "gate_up_scales": (count, 2 * ffn, embed // BLOCK),
            "down_blocks": (count, embed, ffn // BLOCK, BLOCK // 2),
            "down_scales": (count, embed, ffn // BLOCK),
        }
    if layout.startswith("mosaic"):
        gate_up, down = (2 * ffn // ROWS, embed // DEPTH), (embed // ROWS, ffn // DEPTH)
        return {
            "gate_up_blocks": (count, *gate_up, 4, 256),
            "gate_up_scales": (count, *gate_up, 32),
            "down_blocks": (count, *down, 4, 256),
            "down_scales": (count, *down, 32),
        }
    return {
        "gate_up_blocks": (count, 2, embed // BLOCK, 8, ffn),
        "gate_up_scales": (count, embed // BLOCK, ffn),
        "down_blocks": (count, 2, ffn // BLOCK, 8, embed // 2),
        "down_scales": (count, ffn // BLOCK, embed // 2),
    }
