"""The same layer for XLA: bfloat16 in, float32 sums."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .reference import rms_norm


def linear(
    x_NI: Float[Array, "N I"],
    weight_OI: Float[Array, "O I"],
    bias_O: Float[Array, " O"] | None = None,
    *,
    norm_I: Float[Array, " I"] | None = None,
    eps: float = 1e-5,
    residual_NO: Float[Array, "N O"] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "N O"]:
    if norm_I is not None:
        x_NI = rms_norm(x_NI, norm_I, eps)
    out_NO = jnp.einsum(
        "NI,OI->NO",
        x_NI,
        weight_OI,
        preferred_element_type=jnp.float32,
        precision="highest" if x_NI.dtype == jnp.float32 else None,  # else tf32 on a GPU
    )
    for term in (bias_O, residual_NO):
        if term is not None:
            out_NO += term.astype(jnp.float32)
    return out_NO.astype(out_dtype or x_NI.dtype)
