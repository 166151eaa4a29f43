"""What every part of the model uses: contraction with said precision, RMSNorm, and how to run."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .config import Config
from .kernels.linear.reference import rms_norm


def einsum(letters: str, *operands: Array) -> Float[Array, "..."]:
    """einsum summed in float32 and returned in float32.

    On a GPU a float32 contraction runs in tf32 (10 bits of mantissa) unless it asks for HIGHEST;
    bfloat16 products are exact in float32 and need nothing.
    """
    wide = any(x.dtype == jnp.float32 for x in operands)
    return jnp.einsum(
        letters,
        *operands,
        preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if wide else None,
    )


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype) -> Array:
    """Random weights of standard deviation 1/sqrt(fan_in)."""
    wide = jax.random.normal(rngs.params(), shape, jnp.float32) * jnp.float32(fan_in**-0.5)
    return wide.astype(dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) · scale in float32; the scale is applied before the cast back, as in OpenAI's."""

    def __init__(self, config: Config):
        self.eps = config.norm_eps
        self.scale_D = nnx.Param(jnp.ones(config.embed, jnp.float32))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return rms_norm(x, self.scale_D[...], self.eps)


def dense_backend(backend: str | None) -> str | None:
    """How dense layers run where the model's kernels run by `backend`.

    "triton" has dense kernels for few rows only, so that it means: where they serve.
    """
    return backend if backend in ("reference", "xla") else None
