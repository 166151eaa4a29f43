"""Attention in plain JAX: the CPU path, the fallback, and what training differentiates.

The same maths as `reference`, with memory bounded by working through the queries in blocks.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .reference import visible

# Float32 scores held at once (128 MiB). 20b decodes 64 rows at 8k, or prefills 64 queries at 8k,
# in one block.
SCORES_AT_ONCE = 2**25


def attention(
    q_BTKGH: Float[Array, "B T K G H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    sinks_KG: Float[Array, "K G"],
    q_pos_BT: Int[Array, "B T"],
    k_pos_BS: Int[Array, "B S"],
    *,
    window: int | None = None,
    scores_at_once: int = SCORES_AT_ONCE,
) -> Float[Array, "B T K G H"]:
    """As `reference.attention`, [B, T, K, G, S] never whole when it would pass `scores_at_once`.

    Gradients recompute each block's scores, so training's memory is bounded too.
    """
    B, T, K, G, H = q_BTKGH.shape
    S = k_BKSH.shape[2]
    # A value that is not finite must reach those queries alone that see it, and 0 * NaN is NaN:
    # such values become zero and mark their slot, whose score is then NaN where it is seen.
    sound_BKSH = jnp.isfinite(v_BKSH)
    sound_BKS = jnp.all(sound_BKSH, axis=-1)
    v_BKSH = jnp.where(sound_BKSH, v_BKSH, jnp.zeros_like(v_BKSH))

    block = functools.partial(
        _block,
        k_BKSH=k_BKSH,
        v_BKSH=v_BKSH,
        sound_BKS=sound_BKS,
        sinks_KG=sinks_KG.astype(jnp.float32),
        k_pos_BS=k_pos_BS,
        window=window,
    )
    t = max(1, scores_at_once // (B * K * G * S))
    if t >= T:
        return block(q_BTKGH, q_pos_BT)
    t = -(-T // -(-T // t))  # as many blocks, all of about one size
    pad = -T % t
    q_BTKGH = jnp.pad(q_BTKGH, [(0, 0), (0, pad), (0, 0), (0, 0), (0, 0)])
    q_pos_BT = jnp.pad(q_pos_BT, [(0, 0), (0, pad)], constant_values=-1)
    blocks_q = jnp.moveaxis(q_BTKGH.reshape(B, -1, t, K, G, H), 1, 0)
    blocks_q_pos = jnp.moveaxis(q_pos_BT.reshape(B, -1, t), 1, 0)
    blocks_out = jax.lax.map(jax.checkpoint(lambda x: block(*x)), (blocks_q, blocks_q_pos))
    return jnp.moveaxis(blocks_out, 0, 1).reshape(B, T + pad, K, G, H)[:, :T]


def _block(q_BTKGH, q_pos_BT, *, k_BKSH, v_BKSH, sound_BKS, sinks_KG, k_pos_BS, window):
    einsum = functools.partial(
        jnp.einsum,
        preferred_element_type=jnp.float32,
        precision="highest" if q_BTKGH.dtype == jnp.float32 else None,  # else tf32 on a GPU
    )
    logits_BKGTS = einsum("BTKGH,BKSH->BKGTS", q_BTKGH, k_BKSH) * q_BTKGH.shape[-1] ** -0.5
    logits_BKGTS = jnp.where(sound_BKS[:, :, None, None, :], logits_BKGTS, jnp.nan)
    seen_BTS = visible(q_pos_BT, k_pos_BS, window)
    logits_BKGTS = jnp.where(seen_BTS[:, None, None], logits_BKGTS, -jnp.inf)

    sinks_KG11 = sinks_KG[:, :, None, None]
    top_BKGT1 = jnp.maximum(jnp.max(logits_BKGTS, axis=-1, keepdims=True), sinks_KG11)
    # The shift cancels in the quotient, so no gradient need pass through it.
    top_BKGT1 = jax.lax.stop_gradient(jnp.where(top_BKGT1 == -jnp.inf, 0.0, top_BKGT1))
    exps_BKGTS = jnp.exp(logits_BKGTS - top_BKGT1)
    total_BKGT1 = jnp.sum(exps_BKGTS, axis=-1, keepdims=True) + jnp.exp(sinks_KG11 - top_BKGT1)
    # Divided after the sum, so that what is rounded to bfloat16 lies in [0, 1]. The batch axes
    # lead in the result: XLA:CPU has no bfloat16 product with a float32 result otherwise.
    out_BKGTH = einsum("BKGTS,BKSH->BKGTH", exps_BKGTS.astype(v_BKSH.dtype), v_BKSH)
    out_BKGTH = out_BKGTH / jnp.where(total_BKGT1 == 0, 1.0, total_BKGT1)
    return jnp.moveaxis(out_BKGTH, 3, 1).astype(q_BTKGH.dtype)
