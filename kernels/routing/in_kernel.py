"""Routing as two small Pallas kernels: a handful of XLA's would cost 2 us each, every layer."""

import warnings

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def _call(body, *, grid, out_shape, warps, interpret):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return pl.pallas_call(
            body,
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
        grid=(pl.cdiv(tokens, rows),),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, k), jnp.int32),
            jax.ShapeDtypeStruct((tokens, k), jnp.float32),
        ),
        warps=1 if rows == 1 else 4,
        interpret=interpret,
    )(logits_NE)


def make_tiles(
    ids_M: Array, experts: int, tile_rows: int, count: int, *, interpret: bool
) -> tuple[Array, Array, Array, Array]:
    """As routing.make_tiles in one launch: expert_T, size_T (rows used), row_S, slot_M.

    Each program places a few rows: a row's rank is the number of earlier rows with its id, which is
    M comparisons a row, spread over all programs: 8 us at M = 8192, where sorting costs more
    launches than that. row_S past a tile's size is not written, and it
    has some spare places at its end.
    """
    total = ids_M.shape[0]
    rows = 32 if total <= 2048 else 128
    chunk = min(256, max(32, pl.next_power_of_2(total)))
    width = pl.next_power_of_2(experts)
    span = 256  # tiles described at a time

    def body(ids_ref, expert_ref, size_ref, row_ref, slot_ref):
        block = pl.program_id(0)
        row_R = block * rows + jnp.arange(rows)
        real_R = row_R < total
        id_R = plt.load(ids_ref.at[row_R], mask=real_R, other=-1)
        expert_E = jnp.arange(width)

        def scan(i, carry):
            count_E, rank_R = carry
            other_C = i * chunk + jnp.arange(chunk)
            id_C = plt.load(ids_ref.at[other_C], mask=other_C < total, other=-1)
            count_E += jnp.sum((id_C[:, None] == expert_E[None, :]).astype(jnp.int32), axis=0)
            same_RC = (id_C[None, :] == id_R[:, None]) & (other_C[None, :] < row_R[:, None])
            return count_E, rank_R + jnp.sum(same_RC.astype(jnp.int32), axis=1)

        zero = jnp.zeros((width,), jnp.int32), jnp.zeros((rows,), jnp.int32)
        count_E, rank_R = jax.lax.fori_loop(0, pl.cdiv(total, chunk), scan, zero)
        # Ids outside [0, experts) are compared away here; the counts of padding experts are zeroed.
        count_E = jnp.where(expert_E < experts, count_E, 0)
        here_R = real_R & (id_R >= 0) & (id_R < experts)
        tiles_E = (count_E + (tile_rows - 1)) // tile_rows
        first_E = jnp.cumsum(tiles_E) - tiles_E
        mine_RE = id_R[:, None] == expert_E[None, :]
        first_R = jnp.sum(jnp.where(mine_RE, first_E[None, :], 0), axis=1)
        slot_R = first_R * tile_rows + rank_R
        plt.store(slot_ref.at[row_R], jnp.where(here_R, slot_R, -1), mask=real_R)
        # Interpreted, a masked store writes the old value back: each such row gets a spare place.
        spare_R = count * tile_rows + jnp.arange(rows)
        place_R = jnp.where(here_R, slot_R, spare_R)
        plt.store(row_ref.at[place_R], row_R.astype(jnp.int32), mask=here_R)

        @pl.when(block == 0)
        def _():
            for start in range(0, count, span):
                tile_T = start + jnp.arange(span)
                after_TE = tile_T[:, None] - first_E[None, :]  # place among the expert's tiles
                here_TE = (after_TE >= 0) & (after_TE < tiles_E[None, :])
                expert_T = jnp.sum(jnp.where(here_TE, expert_E[None, :] + 1, 0), axis=1) - 1
                left_TE = count_E[None, :] - after_TE * tile_rows
                size_T = jnp.sum(jnp.where(here_TE, jnp.minimum(left_TE, tile_rows), 0), axis=1)
                plt.store(expert_ref.at[tile_T], expert_T.astype(jnp.int32), mask=tile_T < count)
                plt.store(size_ref.at[tile_T], size_T.astype(jnp.int32), mask=tile_T < count)

    struct = jax.ShapeDtypeStruct
    return _call(
        body,
        grid=(pl.cdiv(total, rows),),
        out_shape=(
            struct((count,), jnp.int32),
            struct((count,), jnp.int32),
            struct((count * tile_rows + rows,), jnp.int32),
            struct((total,), jnp.int32),
        ),
        warps=4,
        interpret=interpret,
    )(ids_M)
