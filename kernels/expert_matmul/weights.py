"""The experts' weights of one layer, in one of several layouts."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from ..mxfp4 import BLOCK, decode

Layout = Literal["dense", "checkpoint"]


# What a mesh may cut: per leaf, the logical name of each axis. "gate_up" is rows of gate_up and "ffn"
# the input of down; equal cuts of both in whole blocks of 32 ffn values belong together.
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
    and always   gate_up_bias [E, P], down_bias [E, D]

    P = 2 F; row 2i of gate_up is gate i and row 2i + 1 is up i, in the bias too.
    """

    layout: Layout
    gate_up_bias: Array
    down_bias: Array
    gate_up: Array | None = None
    down: Array | None = None
    gate_up_blocks: Array | None = None
    gate_up_scales: Array | None = None
    down_blocks: Array | None = None
    down_scales: Array | None = None

    def leaves(self) -> dict[str, Array]:
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
        """F."""
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

    def dense(self, dtype: jnp.dtype = jnp.bfloat16) -> "ExpertWeights":
        """The same experts with whole matrices, decoded exactly; E (P D + D F) values."""
        if self.layout == "dense":
            return self
        return ExpertWeights(
            layout="dense",
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            gate_up=decode(self.gate_up_blocks, self.gate_up_scales, dtype),
            down=decode(self.down_blocks, self.down_scales, dtype),
        )


def _shapes(layout: Layout, count: int, embed: int, ffn: int) -> dict[str, tuple[int, ...]]:
    if layout == "dense":
        return {"gate_up": (count, 2 * ffn, embed), "down": (count, embed, ffn)}
    return {
        "gate_up_blocks": (count, 2 * ffn, embed // BLOCK, BLOCK // 2),
        "gate_up_scales": (count, 2 * ffn, embed // BLOCK),
        "down_blocks": (count, embed, ffn // BLOCK, BLOCK // 2),
        "down_scales": (count, embed, ffn // BLOCK),
    }
