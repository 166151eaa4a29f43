"""One new token per sequence: Pallas-Triton attention bound by reading the cache once.

    program (b, k, split):  rows = the G query heads of kv head k, padded to 16 (a tensor-core tile)
        for its share of the span's blocks of `keys` slots:
            scores [rows, keys] = q . K^T ; online softmax ; acc [rows, H] += p . V
    program (b, k) of a second kernel adds the splits up, in order, and the sink: once, at the end.

With one split the first kernel ends itself and there is no second. Everything is read where it
lies: K and V are [B, K, S, H], and a block of slots of one head is contiguous.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .spans import seen_by_one, share_of

LOG2_E = math.log2(math.e)
# Programs wanted at once: about 3 for each of an H200's 132 SMs keep enough bytes in flight.
PROGRAMS = 396


def attention(
    q_BTKGH: Float[Array, "B 1 K G H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    sinks_KG: Float[Array, "K G"],
    q_pos_BT: Int[Array, "B 1"],
    k_pos_BS: Int[Array, "B S"],
    *,
    window: int | None = None,
    keys: int = 64,
    splits: int | None = None,
    warps: int = 4,
    stages: int = 3,
    interpret: bool = False,
) -> Float[Array, "B 1 K G H"]:
    """`keys` slots a step (a power of two, at least 16), in `splits` shares (None: by shape)."""
    B, _, K, G, H = q_BTKGH.shape
    S = k_BKSH.shape[2]
    if splits is None:
        splits = split_count(B * K, pl.cdiv(S, keys))
    seen = seen_by_one(q_pos_BT[:, 0], k_pos_BS, window=window)

    kernel = functools.partial(_partial_kernel, window=window, keys=keys, splits=splits)
    whole = jax.ShapeDtypeStruct((B, K, G, H), q_BTKGH.dtype)
    parts = (
        jax.ShapeDtypeStruct((B, K, splits, G, H), jnp.float32),
        jax.ShapeDtypeStruct((B, K, splits, G), jnp.float32),
        jax.ShapeDtypeStruct((B, K, splits, G), jnp.float32),
    )
    outs = pl.pallas_call(
        kernel,
        grid=(splits, K, B),
        out_shape=whole if splits == 1 else parts,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=f"attention_decode_{splits}",
    )(q_BTKGH[:, 0], k_BKSH, v_BKSH, sinks_KG, q_pos_BT[:, 0], k_pos_BS, *seen)
    if splits > 1:
        outs = add_splits(outs, sinks_KG, whole, interpret=interpret)
    return outs[:, None]


def split_count(heads: int, blocks: int) -> int:
    """Shares of the slots: a power of two, no more than blocks, for about PROGRAMS programs.

    One for up to four blocks (a ring has two): adding up would be a launch of its own.
    """
    wanted = min(PROGRAMS // heads, blocks) if blocks > 4 else 1
    return 1 << (max(wanted, 1).bit_length() - 1)


def padded(size: int) -> int:
    """The power of two that Triton's blocks need, at least the 16 of a tensor-core tile."""
    return max(16, pl.next_power_of_2(size))


def _partial_kernel(
    q_ref,
    k_ref,
    v_ref,
    sinks_ref,
    q_pos_ref,
    k_pos_ref,
    first_ref,
    last_ref,
    *out_refs,
    window,
    keys,
    splits,
):
    split = pl.program_id(0)
    k, b = pl.program_id(1), pl.program_id(2)
    _, _, G, H = q_ref.shape
    S = k_ref.shape[2]
    g, h = jnp.arange(padded(G)), jnp.arange(padded(H))
    gh_ok = (g < G)[:, None] & (h < H)[None, :]
    q = plt.load(q_ref.at[b, k, g[:, None], h[None, :]], mask=gh_ok, other=0)
    q_pos = q_pos_ref[b]
    begin, end = share_of(first_ref[b], last_ref[b], keys, split, splits)

    def step(block, carry):
        slots = block * keys + jnp.arange(keys)
        k_pos = k_pos_ref[b, jnp.minimum(slots, S - 1)]
        seen = (slots < S) & (k_pos >= 0) & (k_pos <= q_pos)
        if window is not None:
            seen &= q_pos - k_pos < window
        return attend_block(q, k_ref, v_ref, (b, k), slots, seen, carry, H)

    top = jnp.full((g.size,), -jnp.inf, jnp.float32)
    total = jnp.zeros((g.size,), jnp.float32)
    acc = jnp.zeros((g.size, h.size), jnp.float32)
    carry = jax.lax.fori_loop(begin, end, step, (top, total, acc))
    finish(carry, sinks_ref, out_refs, (b, k), split, splits, G, H)


def attend_block(q, k_ref, v_ref, bk, slots, seen, carry, H):
    """One block of slots more in the softmax so far: (top [rows], total [rows], acc [rows, H])."""
    top, total, acc = carry
    h = jnp.arange(padded(H))
    at = (*bk, jnp.minimum(slots, k_ref.shape[2] - 1)[:, None], h[None, :])
    ok, zero = None, None
    if H != h.size:
        ok, zero = jnp.broadcast_to((h < H)[None, :], (slots.size, h.size)), 0
    dot = functools.partial(
        jax.lax.dot_general,
        preferred_element_type=jnp.float32,
        precision="highest" if q.dtype == jnp.float32 else None,
    )
    k_block = plt.load(k_ref.at[at], mask=ok, other=zero)
    v_block = plt.load(v_ref.at[at], mask=ok, other=zero)
    # What an unseen slot holds may be NaN, which a weight of zero would not silence.
    v_block = jnp.where(seen[:, None], v_block, jnp.zeros_like(v_block))
    scores = dot(q, k_block, (((1,), (1,)), ((), ()))) * (H**-0.5 * LOG2_E)
    scores = jnp.where(seen[None, :], scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # nothing seen yet
    old, p = jnp.exp2(top - shift), jnp.exp2(scores - shift[:, None])
    acc = acc * old[:, None] + dot(p.astype(v_block.dtype), v_block, (((1,), (0,)), ((), ())))
    return new_top, total * old + jnp.sum(p, axis=1), acc


def finish(carry, sinks_ref, out_refs, bk, split, splits, G, H):
    """Writes a split's state; the result itself, with the sink, where there is one split."""
    top, total, acc = carry
    g, h = jnp.arange(padded(G)), jnp.arange(padded(H))
    gh = (g[:, None], h[None, :])
    gh_ok = (g < G)[:, None] & (h < H)[None, :]
    if splits > 1:
        acc_ref, top_ref, total_ref = out_refs
        plt.store(acc_ref.at[(*bk, split, *gh)], acc, mask=gh_ok)
        plt.store(top_ref.at[(*bk, split, g)], top, mask=g < G)
        plt.store(total_ref.at[(*bk, split, g)], total, mask=g < G)
        return
    sinks = plt.load(sinks_ref.at[bk[1], g], mask=g < G, other=0).astype(jnp.float32) * LOG2_E
    final = jnp.maximum(top, sinks)
    final = jnp.where(final == -jnp.inf, 0.0, final)
    scale = jnp.exp2(top - final)
    total = total * scale + jnp.exp2(sinks - final)
    out = acc * (scale / jnp.where(total == 0, 1.0, total))[:, None]
    (out_ref,) = out_refs
    plt.store(out_ref.at[(*bk, *gh)], out.astype(out_ref.dtype), mask=gh_ok)


def add_splits(parts, sinks_KG, whole: jax.ShapeDtypeStruct, *, interpret: bool = False):
    """The splits' states added up in their order, and the sink: once, at the end."""
    B, K, G, _ = whole.shape
    return pl.pallas_call(
        functools.partial(_sum_kernel, splits=parts[0].shape[2]),
        grid=(G, K, B),
        out_shape=whole,
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="attention_decode_sum",
    )(*parts, sinks_KG)


def _sum_kernel(acc_ref, top_ref, total_ref, sinks_ref, out_ref, *, splits):
    g = pl.program_id(0)
    k, b = pl.program_id(1), pl.program_id(2)
    H = acc_ref.shape[-1]
    n, h = jnp.arange(splits), jnp.arange(padded(H))
    h_ok = h < H
    tops, totals = top_ref[b, k, n, g], total_ref[b, k, n, g]
    sink = sinks_ref[k, g].astype(jnp.float32) * LOG2_E
    final = jnp.maximum(jnp.max(tops, axis=0), sink)
    final = jnp.where(final == -jnp.inf, 0.0, final)
    scales = jnp.exp2(tops - final)
    total = jnp.sum(totals * scales, axis=0) + jnp.exp2(sink - final)
    accs = plt.load(
        acc_ref.at[b, k, n[:, None], g, h[None, :]],
        mask=jnp.broadcast_to(h_ok[None, :], (splits, h.size)),
        other=0,
    )
    out = jnp.sum(accs * scales[:, None], axis=0) / jnp.where(total == 0, 1.0, total)
    plt.store(out_ref.at[b, k, g, h], out.astype(out_ref.dtype), mask=h_ok)
