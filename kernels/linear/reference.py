"""A linear layer as it is defined, with what stands in front of it and behind it."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


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
    """The definition: products and sums in float32, rounded once, at the end."""
    if norm_I is not None:
        x_NI = rms_norm(x_NI, norm_I, eps)
    out_NO = jnp.einsum(
        "NI,OI->NO",
        x_NI.astype(jnp.float32),
        weight_OI.astype(jnp.float32),
        precision="highest",
    )
    for term in (bias_O, residual_NO):
        if term is not None:
            out_NO += term.astype(jnp.float32)
    return out_NO.astype(out_dtype or x_NI.dtype)


def rms_norm(
    x_I: Float[Array, "*N I"], scale_I: Float[Array, " I"], eps: float
) -> Float[Array, "*N I"]:
    """x / sqrt(mean(x^2) + eps) * scale in float32, then rounded to x's dtype."""
    wide = x_I.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale_I.astype(jnp.float32)).astype(x_I.dtype)


def router(
    x_ND: Float[Array, "N D"], router_ED: Float[Array, "E D"], bias_E: Float[Array, " E"]
) -> Float[Array, "N E"]:
    """float32 logits; a bfloat16 product is exact in float32 and needs no more precision."""
    wide = jnp.float32 in (x_ND.dtype, router_ED.dtype)
    logits_NE = jnp.einsum(
        "ND,ED->NE",
        x_ND,
        router_ED,
        preferred_element_type=jnp.float32,
        precision="highest" if wide else None,
    )
    return logits_NE + bias_E.astype(jnp.float32)
