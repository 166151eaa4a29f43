"""The chosen experts of a token and their weights."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from .. import device
from . import in_kernel

Backend = Literal["xla", "triton"]


def top_k(
    logits_NE: Float[Array, "N E"], k: int, *, backend: Backend | None = None
) -> tuple[Int32[Array, "N X"], Float[Array, "N X"]]:
    """Ids of the k largest logits, largest first, and their softmax among themselves, in float32.

    Equal logits go to the lower index, -0.0 counts as 0.0. A row that holds a NaN gets NaN weights
    and ids inside [0, E), and no other row notices.

    Softmax over the chosen equals softmax over all, renormalised, but never divides by a small sum.

    Raises:
        ValueError: for k outside 1..E.
        NotImplementedError: for backend "triton" without an NVIDIA GPU.
    """
    experts = logits_NE.shape[-1]
    if not 1 <= k <= experts:
        raise ValueError(f"k must be between 1 and the {experts} experts; got {k}.")
    logits_NE = logits_NE.astype(jnp.float32)
    if backend is None:
        backend = "triton" if device.nvidia() else "xla"
    if backend == "triton":
        device.require_nvidia("backend 'triton'")
        return _in_kernel(logits_NE, k)
    # lax.top_k orders by bits: +0 before -0, and a negative NaN last.
    logits_NE = jnp.where(logits_NE == 0, 0.0, logits_NE)
    logits_NX, ids_NX = jax.lax.top_k(logits_NE, k)
    broken_N = jnp.isnan(logits_NE).any(axis=-1, keepdims=True)
    weights_NX = jax.nn.softmax(jnp.where(broken_N, jnp.nan, logits_NX), axis=-1)
    return ids_NX.astype(jnp.int32), weights_NX


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _in_kernel(logits_NE, k):
    return in_kernel.top_k(logits_NE, k, interpret=False)


def _forward(logits_NE, k):
    ids_NX, weights_NX = _in_kernel(logits_NE, k)
    return (ids_NX, weights_NX), (ids_NX, weights_NX, logits_NE)


def _backward(k, saved, cotangents):
    """Of the softmax, sent back to the logits that were chosen; the choice has no gradient."""
    ids_NX, weights_NX, logits_NE = saved
    _, g_NX = cotangents
    mean_N1 = jnp.sum(weights_NX * g_NX, axis=1, keepdims=True)
    onehot_NXE = jax.nn.one_hot(ids_NX, logits_NE.shape[1], dtype=jnp.float32)
    return (jnp.sum(onehot_NXE * (weights_NX * (g_NX - mean_N1))[..., None], axis=1),)


_in_kernel.defvjp(_forward, _backward)
