"""The experts' gated activation."""

import jax
import jax.numpy as jnp
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
        # Not minimum and clip: Pallas-Triton's return the limit for a NaN, which would hide it.
        gate = jnp.where(gate > limit, limit, gate)
        up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


def swiglu_of_rows(
    h_P: Float[Array, "*batch P"], *, limit: float | None, alpha: float
) -> Float[Array, "*batch F"]:
    """Of interleaved rows g0 u0 g1 u1 ..., as gate_up gives them.

    By a reshape: strided slices fused into the next product abort jax 0.11.2 on an H200
    (triton_tiling_propagation.cc:698, seen at 2 rows a tile).
    """
    pairs = h_P.reshape(*h_P.shape[:-1], h_P.shape[-1] // 2, 2)
    return swiglu(pairs[..., 0], pairs[..., 1], limit=limit, alpha=alpha)
