"""One decoding step of a layer's attention in one kernel: turn, attend, and write into the cache.

Apart, these are a rotation, slices, two scatters and the attention: seven launches of 1 to 2 us a
layer that each wait for the last. Together they are `decode` with two changes:

    q is turned as it is loaded; every program needs only its own heads' few rows
    the new key and value are attended from registers, by the first split, which also writes them

so that no program waits for another's write: the slot that is written is unseen in memory, and what
a racing read finds there does not matter.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .decode import LOG2_E, add_splits, attend_block, finish, padded, split_count
from .spans import seen_by_one, share_of


def append_and_attend(
    qkv_BKMH: Float[Array, "B K M H"],
    cos_BC: Float[Array, "B C"],
    sin_BC: Float[Array, "B C"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    sinks_KG: Float[Array, "K G"],
    q_pos_B: Int[Array, " B"],
    k_pos_BS: Int[Array, "B S"],
    slot_B: Int[Array, " B"],
    *,
    window: int | None = None,
    keys: int = 64,
    splits: int | None = None,
    warps: int = 4,
    stages: int = 3,
    interpret: bool = False,
) -> tuple[Float[Array, "B K G H"], Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Tiles as in `decode.attention`."""
    B, K, M, H = qkv_BKMH.shape
    G, S = M - 2, k_BKSH.shape[2]
    if splits is None:
        splits = split_count(B * K, pl.cdiv(S, keys))
    seen = seen_by_one(q_pos_B, k_pos_BS, window=window)
    whole = jax.ShapeDtypeStruct((B, K, G, H), qkv_BKMH.dtype)
    parts = (
        jax.ShapeDtypeStruct((B, K, splits, G, H), jnp.float32),
        jax.ShapeDtypeStruct((B, K, splits, G), jnp.float32),
        jax.ShapeDtypeStruct((B, K, splits, G), jnp.float32),
    )
    k_BKSH, v_BKSH, *outs = pl.pallas_call(
        functools.partial(_kernel, window=window, keys=keys, splits=splits),
        grid=(splits, K, B),
        out_shape=(
            jax.ShapeDtypeStruct(k_BKSH.shape, k_BKSH.dtype),
            jax.ShapeDtypeStruct(v_BKSH.shape, v_BKSH.dtype),
            *((whole,) if splits == 1 else parts),
        ),
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=f"attention_step_{splits}",
    )(k_BKSH, v_BKSH, qkv_BKMH, cos_BC, sin_BC, sinks_KG, q_pos_B, k_pos_BS, slot_B, *seen)
    out_BKGH = outs[0] if splits == 1 else add_splits(outs, sinks_KG, whole, interpret=interpret)
    return out_BKGH, k_BKSH, v_BKSH


def _kernel(
    k_ref,
    v_ref,
    qkv_ref,
    cos_ref,
    sin_ref,
    sinks_ref,
    q_pos_ref,
    k_pos_ref,
    slot_ref,
    first_ref,
    last_ref,
    k_out_ref,
    v_out_ref,
    *out_refs,
    window,
    keys,
    splits,
):
    split = pl.program_id(0)
    k, b = pl.program_id(1), pl.program_id(2)
    _, _, M, H = qkv_ref.shape
    G, S = M - 2, k_ref.shape[2]
    g, h = jnp.arange(padded(G)), jnp.arange(padded(H))
    h_ok = h < H
    gh_ok = (g < G)[:, None] & h_ok[None, :]

    # Channel h turns with the one half a head away: x cos - partner sin; + in the upper half.
    lower = h < H // 2
    partner = jnp.where(lower, h + H // 2, h - H // 2)
    angle = jnp.where(lower, h, partner)
    cos = plt.load(cos_ref.at[b, angle], mask=h_ok, other=0)
    sin = plt.load(sin_ref.at[b, angle], mask=h_ok, other=0)
    sin = jnp.where(lower, -sin, sin)

    def turned(row, mask, cos, sin):
        own = plt.load(qkv_ref.at[b, k, row, h], mask=mask, other=0).astype(jnp.float32)
        other = plt.load(qkv_ref.at[b, k, row, partner], mask=mask, other=0).astype(jnp.float32)
        return (own * cos + other * sin).astype(qkv_ref.dtype)

    own = plt.load(qkv_ref.at[b, k, g[:, None], h[None, :]], mask=gh_ok, other=0)
    other = plt.load(qkv_ref.at[b, k, g[:, None], partner[None, :]], mask=gh_ok, other=0)
    q = own.astype(jnp.float32) * cos[None, :] + other.astype(jnp.float32) * sin[None, :]
    q = q.astype(qkv_ref.dtype)
    new_k = turned(G, h_ok, cos, sin)
    new_v = plt.load(qkv_ref.at[b, k, G + 1, h], mask=h_ok, other=0)

    q_pos, slot = q_pos_ref[b], slot_ref[b]
    begin, end = share_of(first_ref[b], last_ref[b], keys, split, splits)

    def step(block, carry):
        slots = block * keys + jnp.arange(keys)
        k_pos = k_pos_ref[b, jnp.minimum(slots, S - 1)]
        seen = (slots < S) & (slots != slot) & (k_pos >= 0) & (k_pos <= q_pos)
        if window is not None:
            seen &= q_pos - k_pos < window
        return attend_block(q, k_ref, v_ref, (b, k), slots, seen, carry, H)

    # The new token begins the softmax, in the first split: score, weight 1, value.
    here = (split == 0) & (q_pos >= 0)
    score = jnp.sum(q.astype(jnp.float32) * new_k.astype(jnp.float32)[None, :], axis=1)
    top = jnp.where(here, score * (H**-0.5 * LOG2_E), jnp.full_like(score, -jnp.inf))
    total = jnp.where(here, jnp.ones_like(score), jnp.zeros_like(score))
    value = jnp.where(here, new_v.astype(jnp.float32), jnp.zeros(h.size, jnp.float32))
    acc = value[None, :] + jnp.zeros((g.size, h.size), jnp.float32)
    carry = jax.lax.fori_loop(begin, end, step, (top, total, acc))
    finish(carry, sinks_ref, out_refs, (b, k), split, splits, G, H)

    write = h_ok & (split == 0) & (slot < S)
    slot = jnp.minimum(slot, S - 1)
    plt.store(k_out_ref.at[b, k, slot, h], new_k.astype(k_out_ref.dtype), mask=write)
    plt.store(v_out_ref.at[b, k, slot, h], new_v.astype(v_out_ref.dtype), mask=write)
