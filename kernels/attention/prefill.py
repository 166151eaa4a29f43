"""Many new tokens per sequence: Pallas-Triton attention bound by the tensor cores.

    program (tile, k, b):  rows = `queries` new tokens x G heads, one tile of the left operand
        for each block of `keys` slots in the tile's span:
            scores [rows, keys] = q . K^T ; mask ; online softmax ; acc [rows, H] += p . V
        the sink once, at the end

The G heads of a key/value head share its K and V, so a tile needs few distinct tokens (16 x 8 for
gpt-oss), and a sliding layer's span is hardly longer than its window: 128 + 16 positions.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .spans import spans

LOG2_E = math.log2(math.e)
NEVER = 2**31 - 1  # position of an empty slot: after every query


def attention(
    q_BTKGH: Float[Array, "B T K G H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    sinks_KG: Float[Array, "K G"],
    q_pos_BT: Int[Array, "B T"],
    k_pos_BS: Int[Array, "B S"],
    *,
    window: int | None = None,
    queries: int | None = None,
    keys: int = 64,
    warps: int = 4,
    stages: int = 3,
    interpret: bool = False,
) -> Float[Array, "B T K G H"]:
    """`queries` tokens a tile (None: about 128 rows), `keys` slots a step; powers of two."""
    B, T, K, G, H = q_BTKGH.shape
    heads = pl.next_power_of_2(G)
    if queries is None:
        queries = max(1, min(128 // heads, pl.next_power_of_2(T)))
    queries = max(queries, pl.cdiv(16, heads))
    span_BX2 = spans(q_pos_BT, k_pos_BS, window=window, queries=queries, keys=keys)
    return pl.pallas_call(
        functools.partial(_kernel, window=window, queries=queries, keys=keys),
        grid=(pl.cdiv(T, queries), K, B),
        out_shape=jax.ShapeDtypeStruct(q_BTKGH.shape, q_BTKGH.dtype),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="attention_prefill",
    )(q_BTKGH, *sound(k_BKSH, v_BKSH), sinks_KG, q_pos_BT, k_pos_BS, span_BX2)


def sound(
    k_BKSH: Float[Array, "B K S H"], v_BKSH: Float[Array, "B K S H"]
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """K and V such that a value that is not finite reaches only the queries that see it.

    A tile multiplies V by weights of zero where a query does not look, and 0 * NaN is NaN. So
    such a value becomes zero, and its key NaN: then the scores of those who see it are NaN, and
    the mask puts those of the others aside. One pass over K and V: 8 us a layer at 8k slots.
    """
    finite_BKSH = jnp.isfinite(v_BKSH)
    finite_BKS1 = jnp.all(finite_BKSH, axis=-1, keepdims=True)
    nan, zero = jnp.full_like(k_BKSH, jnp.nan), jnp.zeros_like(v_BKSH)
    return jnp.where(finite_BKS1, k_BKSH, nan), jnp.where(finite_BKSH, v_BKSH, zero)


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    sinks_ref,
    q_pos_ref,
    k_pos_ref,
    span_ref,
    out_ref,
    *,
    window,
    queries,
    keys,
):
    # The last tiles have the most to do under a causal mask: they start first.
    tile = pl.num_programs(0) - 1 - pl.program_id(0)
    k, b = pl.program_id(1), pl.program_id(2)
    _, T, _, G, H = q_ref.shape
    S = k_ref.shape[2]
    heads = pl.next_power_of_2(G)
    row = jnp.arange(queries * heads)
    t = tile * queries + row // heads
    g = row % heads
    h = jnp.arange(max(16, pl.next_power_of_2(H)))
    row_ok = (t < T) & (g < G)
    ok = row_ok[:, None] & (h < H)[None, :]
    at = (b, t[:, None], k, g[:, None], h[None, :])
    h_ok = None if H == h.size else jnp.broadcast_to((h < H)[None, :], (keys, h.size))
    h_zero = None if H == h.size else 0
    dot = functools.partial(
        jax.lax.dot_general,
        preferred_element_type=jnp.float32,
        precision="highest" if q_ref.dtype == jnp.float32 else None,
    )

    q = plt.load(q_ref.at[at], mask=ok, other=0)
    q_pos = plt.load(q_pos_ref.at[b, t], mask=row_ok, other=-1)[:, None]

    def step(block, carry):
        top, total, acc = carry
        slots = block * keys + jnp.arange(keys)
        inside = slots < S
        slots = jnp.minimum(slots, S - 1)
        k_pos = k_pos_ref[b, slots]
        k_pos = jnp.where(inside & (k_pos >= 0), k_pos, NEVER)[None, :]
        seen = k_pos <= q_pos
        if window is not None:
            seen &= k_pos > q_pos - window
        k_block = plt.load(k_ref.at[b, k, slots[:, None], h[None, :]], mask=h_ok, other=h_zero)
        scores = dot(q, k_block, (((1,), (1,)), ((), ()))) * (H**-0.5 * LOG2_E)
        scores = jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # nothing seen yet
        old, p = jnp.exp2(top - shift), jnp.exp2(scores - shift[:, None])
        v_block = plt.load(v_ref.at[b, k, slots[:, None], h[None, :]], mask=h_ok, other=h_zero)
        acc = acc * old[:, None] + dot(p.astype(v_block.dtype), v_block, (((1,), (0,)), ((), ())))
        return new_top, total * old + jnp.sum(p, axis=1), acc

    top = jnp.full((row.size,), -jnp.inf, jnp.float32)
    total = jnp.zeros((row.size,), jnp.float32)
    acc = jnp.zeros((row.size, h.size), jnp.float32)
    top, total, acc = jax.lax.fori_loop(
        span_ref[b, tile, 0], span_ref[b, tile, 1], step, (top, total, acc)
    )

    sinks = plt.load(sinks_ref.at[k, g], mask=g < G, other=0).astype(jnp.float32) * LOG2_E
    final = jnp.maximum(top, sinks)
    final = jnp.where(final == -jnp.inf, 0.0, final)
    scale = jnp.exp2(top - final)
    total = total * scale + jnp.exp2(sinks - final)
    out = acc * (scale / jnp.where(total == 0, 1.0, total))[:, None]
    plt.store(out_ref.at[at], out.astype(out_ref.dtype), mask=ok)
