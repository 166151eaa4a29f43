"""Routing as two small Pallas kernels: a handful of XLA's would cost 2 us each, every layer."""

import functools
import warnings

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def _call(body, *, name, grid, out_shape, warps, interpret):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return pl.pallas_call(
            body,
            name=name,
            grid=grid,
            out_shape=out_shape,
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=warps, num_stages=2),
        )


def top_k(logits_NE: Array, k: int, *, interpret: bool) -> tuple[Array, Array]:
    """As routing.top_k: k rounds of a maximum, each taking the lowest index that has it."""
    tokens, experts = logits_NE.shape
    width = pl.next_power_of_2(experts)
    rows = 1 if tokens < 256 else 16

    def body(logits_ref, ids_ref, weights_ref):
        token_R = pl.program_id(0) * rows + jnp.arange(rows)
        expert_E = jnp.arange(width)
        real_R = token_R < tokens
        real_RE = real_R[:, None] & (expert_E < experts)[None, :]
        logit_RE = plt.load(
            logits_ref.at[token_R[:, None], expert_E[None, :]], mask=real_RE, other=0.0
        )
        nan_RE = logit_RE != logit_RE
        broken_R = jnp.max(nan_RE.astype(jnp.int32), axis=1) > 0
        logit_RE = jnp.where(nan_RE, -jnp.inf, logit_RE)
        left_RE = jnp.broadcast_to((expert_E < experts)[None, :], (rows, width))
        chosen, terms, total_R = [], [], jnp.zeros((rows,), jnp.float32)
        for _ in range(k):
            most_R = jnp.max(jnp.where(left_RE, logit_RE, -jnp.inf), axis=1)
            among_RE = left_RE & (logit_RE == most_R[:, None])
            id_R = jnp.min(jnp.where(among_RE, expert_E[None, :], width), axis=1)
            left_RE = left_RE & (expert_E[None, :] != id_R[:, None])
            first_R = most_R if not terms else first_R
            terms.append(jnp.exp(most_R - first_R))
            chosen.append(id_R)
            total_R = total_R + terms[-1]
        for x in range(k):
            weight_R = jnp.where(broken_R, jnp.nan, terms[x] / total_R)
            plt.store(ids_ref.at[token_R, x], chosen[x].astype(jnp.int32), mask=real_R)
            plt.store(weights_ref.at[token_R, x], weight_R, mask=real_R)

    return _call(
        body,
        name="routing_top_k",
        grid=(pl.cdiv(tokens, rows),),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, k), jnp.int32),
            jax.ShapeDtypeStruct((tokens, k), jnp.float32),
        ),
        warps=1 if rows == 1 else 4,
        interpret=interpret,
    )(logits_NE)


ROWS = 128  # of a block of the schedule


def make_tiles(
    ids_M: Array, experts: int, tile_rows: int, count: int, *, interpret: bool
) -> tuple[Array, Array, Array, Array]:
    """As routing.make_tiles: expert_T, size_T (rows used), row_S, slot_M. One launch, or two.

    A block of 128 rows counts its experts and ranks each row among the block's rows of the same
    expert, by comparing all pairs; then every block sums the counts of the blocks before it. Up to
    128 rows one block does both. row_S past a tile's size is not written, and it has spare places
    at its end.
    """
    total = ids_M.shape[0]
    width = pl.next_power_of_2(experts)
    blocks = pl.cdiv(total, ROWS)
    rows = ROWS if blocks > 1 else max(16, pl.next_power_of_2(total))
    span = max(16, pl.next_power_of_2(pl.cdiv(count, blocks)))  # tiles described by a block
    struct = jax.ShapeDtypeStruct

    def rank(ids_ref, block):
        """Ids of a block's rows, their ranks in it, and its counts; -1 past the end."""
        row_R = block * rows + jnp.arange(rows)
        id_R = plt.load(ids_ref.at[row_R], mask=row_R < total, other=-1)
        earlier_RR = jnp.arange(rows)[None, :] < jnp.arange(rows)[:, None]
        same_RR = (id_R[None, :] == id_R[:, None]) & earlier_RR
        equal_RE = id_R[:, None] == jnp.arange(width)[None, :]
        return (
            row_R,
            id_R,
            jnp.sum(same_RR.astype(jnp.int32), axis=1),
            jnp.sum(equal_RE.astype(jnp.int32), axis=0),
        )

    def count_body(ids_ref, rank_ref, count_ref):
        block = pl.program_id(0)
        row_R, _, rank_R, count_E = rank(ids_ref, block)
        plt.store(rank_ref.at[row_R], rank_R)
        plt.store(count_ref.at[block, jnp.arange(width)], count_E)

    def place_body(*refs):
        *earlier, ids_ref, expert_ref, size_ref, row_ref, slot_ref = refs
        block = pl.program_id(0)
        expert_E = jnp.arange(width)
        if earlier:
            rank_ref, count_ref = earlier
            row_R = block * rows + jnp.arange(rows)
            id_R = plt.load(ids_ref.at[row_R], mask=row_R < total, other=-1)
            chunk = min(64, pl.next_power_of_2(blocks))

            def add(i, carry):
                total_E, before_E = carry
                other_C = i * chunk + jnp.arange(chunk)
                counts_CE = plt.load(
                    count_ref.at[other_C[:, None], expert_E[None, :]],
                    mask=jnp.broadcast_to((other_C < blocks)[:, None], (chunk, width)),
                    other=0,
                )
                mine_CE = jnp.where((other_C < block)[:, None], counts_CE, 0)
                return total_E + jnp.sum(counts_CE, axis=0), before_E + jnp.sum(mine_CE, axis=0)

            zero = jnp.zeros((width,), jnp.int32)
            count_E, before_E = jax.lax.fori_loop(0, pl.cdiv(blocks, chunk), add, (zero, zero))
            rank_R = plt.load(rank_ref.at[row_R])
        else:
            row_R, id_R, rank_R, count_E = rank(ids_ref, block)
            before_E = jnp.zeros_like(count_E)
        # Ids outside [0, experts) are compared away; the places of no expert count nothing.
        count_E = jnp.where(expert_E < experts, count_E, 0)
        here_R = (row_R < total) & (id_R >= 0) & (id_R < experts)
        tiles_E = (count_E + (tile_rows - 1)) // tile_rows
        first_E = jnp.cumsum(tiles_E) - tiles_E
        mine_RE = id_R[:, None] == expert_E[None, :]
        start_E = first_E * tile_rows + before_E
        slot_R = jnp.sum(jnp.where(mine_RE, start_E[None, :], 0), axis=1) + rank_R
        plt.store(slot_ref.at[row_R], jnp.where(here_R, slot_R, -1), mask=row_R < total)
        # Interpreted, a masked store writes the old value back: each such row gets a spare place.
        place_R = jnp.where(here_R, slot_R, count * tile_rows + jnp.arange(rows))
        plt.store(row_ref.at[place_R], row_R.astype(jnp.int32), mask=here_R)
        tile_T = block * span + jnp.arange(span)
        after_TE = tile_T[:, None] - first_E[None, :]  # place among the expert's tiles
        here_TE = (after_TE >= 0) & (after_TE < tiles_E[None, :])
        expert_T = jnp.sum(jnp.where(here_TE, expert_E[None, :] + 1, 0), axis=1) - 1
        left_TE = count_E[None, :] - after_TE * tile_rows
        size_T = jnp.sum(jnp.where(here_TE, jnp.minimum(left_TE, tile_rows), 0), axis=1)
        plt.store(expert_ref.at[tile_T], expert_T.astype(jnp.int32), mask=tile_T < count)
        plt.store(size_ref.at[tile_T], size_T.astype(jnp.int32), mask=tile_T < count)

    call = functools.partial(_call, grid=(blocks,), warps=4, interpret=interpret)
    earlier = ()
    if blocks > 1:
        shapes = struct((blocks * rows,), jnp.int32), struct((blocks, width), jnp.int32)
        earlier = call(count_body, name="routing_count", out_shape=shapes)(ids_M)
    return call(
        place_body,
        name="routing_place",
        out_shape=(
            struct((count,), jnp.int32),
            struct((count,), jnp.int32),
            struct((count * tile_rows + rows,), jnp.int32),
            struct((total,), jnp.int32),
        ),
    )(*earlier, ids_M)
