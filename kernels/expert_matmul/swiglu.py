"""The experts' gated activation."""

import jax
from jaxtyping import Array, Float


def swiglu(
    gate: Float[Array, "*shape"],
    up: Float[Array, "*shape"],
    *,
    limit: float | None = 7.0,
    alpha: float = 1.702,
) -> Float[Array, "*shape"]:
    """gate * sigmoid(alpha * gate) * (up + 1), the gate clamped above and up on both sides.

    The gate keeps its negative side: at -8 the result is 5 times smaller than at -7, and a clamp
    there would hide in any test of whole logits. limit None does not clamp; 0 is refused, since a
    default of 0 in another program means "no limit".
    """
    if limit is not None:
        if not limit > 0:
            raise ValueError(f"swiglu's limit is positive, or None for no clamp; got {limit}.")
        gate = jax.numpy.minimum(gate, limit)
        up = jax.numpy.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)
