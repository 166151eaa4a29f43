"""Training that knows what export will do to the experts: rounding in the forward pass alone."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..kernels import mxfp4


def rounded(weights: Float[Array, "*rows inner"]) -> Float[Array, "*rows inner"]:
    """The values that MXFP4 gives back for `weights` (blocks of 32 along the last axis)."""
    wide = weights.astype(jnp.float32)
    return mxfp4.decode(*mxfp4.encode(wide), wide.dtype).astype(weights.dtype)


def straight_through(
    weights: Float[Array, "*rows inner"], on: Bool[Array, ""] | bool = True
) -> Float[Array, "*rows inner"]:
    """`rounded` in the forward pass where `on`, the identity in the backward pass (Bengio 2013).

    w + (r - w) would differ from r by a rounding, and r is what export writes: so r itself is
    returned, and the gradient is passed by hand.
    """
    return _round(weights, jnp.asarray(on))


@jax.custom_vjp
def _round(weights, on):
    return jnp.where(on, rounded(weights), weights)


_round.defvjp(lambda weights, on: (_round(weights, on), None), lambda _, gradient: (gradient, None))


def is_expert_weight(name: str) -> bool:
    """True for the parameters that MXFP4 holds: blocks.N.moe.experts.gate_up and .down."""
    return name.endswith((".experts.gate_up", ".experts.down"))
