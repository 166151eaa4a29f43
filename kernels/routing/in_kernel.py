"""Routing as small Pallas kernels: a handful of XLA's would cost 2 us each, every layer.

Up to 128 tokens `route` does all of it in one launch; above, `top_k` and the two of `make_tiles`.
For a token or two there is no schedule, and `pick` ranks the logits inside the kernel that needs
the answer.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from .tiles import bound


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


def _largest(logit_RE, inside_E, k: int):
    """Ids of the k largest in each row as k arrays [R], and their softmax, as routing.top_k."""
    rows, width = logit_RE.shape
    expert_E = jnp.arange(width)
    nan_RE = logit_RE != logit_RE
    broken_R = jnp.max(nan_RE.astype(jnp.int32), axis=1) > 0
    logit_RE = jnp.where(nan_RE, -jnp.inf, logit_RE)
    left_RE = jnp.broadcast_to(inside_E[None, :], (rows, width))
    chosen, terms, total_R = [], [], jnp.zeros((rows,), jnp.float32)
    for _ in range(k):
        most_R = jnp.max(jnp.where(left_RE, logit_RE, -jnp.inf), axis=1)
        among_RE = left_RE & (logit_RE == most_R[:, None])
        id_R = jnp.min(jnp.where(among_RE, expert_E[None, :], width), axis=1)
        left_RE = left_RE & (expert_E[None, :] != id_R[:, None])
        first_R = most_R if not terms else first_R
        terms.append(jnp.exp(most_R - first_R))
        chosen.append(id_R.astype(jnp.int32))
        total_R = total_R + terms[-1]
    weights = [jnp.where(broken_R, jnp.nan, term_R / total_R) for term_R in terms]
    return chosen, weights


def _load_logits(logits_ref, token_R, real_R, width):
    expert_E = jnp.arange(width)
    inside_E = expert_E < logits_ref.shape[1]
    real_RE = real_R[:, None] & inside_E[None, :]
    at = logits_ref.at[token_R[:, None], expert_E[None, :]]
    return plt.load(at, mask=real_RE, other=0.0), inside_E


def top_k(
    logits_NE: Array, k: int, live_N: Array | None = None, *, interpret: bool
) -> tuple[Array, Array]:
    """As routing.top_k: k rounds of a maximum, each taking the lowest index that has it.

    live_N: int32; where it is 0 every id is -1.
    """
    tokens, experts = logits_NE.shape
    width = pl.next_power_of_2(experts)
    rows = 1 if tokens < 256 else 16

    def body(logits_ref, *refs):
        *live_ref, ids_ref, weights_ref = refs
        block = pl.program_id(0)
        token_R = block * rows + jnp.arange(rows)
        real_R = token_R < tokens
        chosen, weights = _largest(*_load_logits(logits_ref, token_R, real_R, width), k)
        for x in range(k):
            id_R = chosen[x]
            if live_ref:
                live_R = plt.load(live_ref[0].at[token_R], mask=real_R, other=0)
                id_R = jnp.where(live_R != 0, id_R, -1)
            plt.store(ids_ref.at[token_R, x], id_R, mask=real_R)
            plt.store(weights_ref.at[token_R, x], weights[x], mask=real_R)

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
    )(logits_NE, *(() if live_N is None else (live_N,)))


def pick(logits_ref, token, choice, chosen: int):
    """(id, logit) of one of a token's `chosen` choices, inside a kernel; a NaN among its logits:
    logit NaN.

    Of few experts, a rank is how many are larger, or equal with a lower index: two reductions,
    where rounds of a maximum wait for each other. That is E * E comparisons, 8 a thread for 32
    experts and 4 warps. For 128 they took 128 registers, and gate_up 33 us in place of 20: rounds.
    """
    experts = logits_ref.shape[1]
    width = pl.next_power_of_2(experts)
    expert_E = jnp.arange(width)
    inside_E = expert_E < experts
    given_E = plt.load(logits_ref.at[token, expert_E], mask=inside_E, other=-jnp.inf)
    broken = jnp.max((given_E != given_E).astype(jnp.int32)) > 0
    logit_E = jnp.where(given_E != given_E, -jnp.inf, given_E)
    if width > 64:
        left_E, expert, logit = inside_E, jnp.int32(0), jnp.float32(0)
        for round_ in range(chosen):
            most = jnp.max(jnp.where(left_E, logit_E, -jnp.inf))
            id_ = jnp.min(jnp.where(left_E & (logit_E == most), expert_E, width)).astype(jnp.int32)
            left_E = left_E & (expert_E != id_)
            expert = jnp.where(choice == round_, id_, expert)
            logit = jnp.where(choice == round_, most, logit)
        return expert, jnp.where(broken, jnp.nan, logit)
    mine, other = logit_E[:, None], logit_E[None, :]
    # The places past the last expert are -inf too, but never lower in index: they outrank nobody.
    ahead_EE = (other > mine) | ((other == mine) & (expert_E[None, :] < expert_E[:, None]))
    rank_E = jnp.sum(ahead_EE.astype(jnp.int32), axis=1)
    here_E = (rank_E == choice) & inside_E
    expert = jnp.sum(jnp.where(here_E, expert_E, 0)).astype(jnp.int32)
    logit = jnp.max(jnp.where(here_E, logit_E, -jnp.inf))
    return expert, jnp.where(broken, jnp.nan, logit)


MOST_ROUTED = 8192  # logits that one program of `route` holds


def route(
    logits_NE: Array, k: int, live_N: Array | None, tile_rows: int, count: int, *, interpret: bool
) -> tuple[Array, ...]:
    """(weights_NX, expert_T, size_T, row_S, slot_M): top_k and make_tiles by one program.

    For logits of up to 128 tokens, 8192 in all. A token chooses an expert once at most, so the
    rank of row (n, x) among the rows of its expert is the number of earlier tokens that chose it.
    """
    tokens, experts = logits_NE.shape
    width, rows = pl.next_power_of_2(experts), max(16, pl.next_power_of_2(tokens))
    span = min(64, max(16, pl.next_power_of_2(count)))  # tiles described at a time

    def body(logits_ref, *refs):
        *live_ref, weights_ref, expert_ref, size_ref, row_ref, slot_ref = refs
        only = pl.program_id(0)
        token_N, expert_E = only * rows + jnp.arange(rows), jnp.arange(width)
        live_N = real_N = token_N < tokens
        if live_ref:
            live_N = plt.load(live_ref[0].at[token_N], mask=real_N, other=0) != 0
        chosen, weights = _largest(*_load_logits(logits_ref, token_N, real_N, width), k)
        is_NE = [(id_N[:, None] == expert_E[None, :]) & live_N[:, None] for id_N in chosen]
        any_NE = functools.reduce(jnp.logical_or, is_NE).astype(jnp.int32)
        before_NE = jnp.cumsum(any_NE, axis=0) - any_NE
        count_E = jnp.sum(any_NE, axis=0)
        tiles_E = (count_E + (tile_rows - 1)) // tile_rows
        first_E = jnp.cumsum(tiles_E) - tiles_E
        place_NE = first_E[None, :] * tile_rows + before_NE
        for x in range(k):
            slot_N = jnp.sum(jnp.where(is_NE[x], place_NE, 0), axis=1)
            row_N = token_N * k + x
            slot = jnp.where(live_N, slot_N, -1).astype(jnp.int32)
            plt.store(slot_ref.at[row_N], slot, mask=real_N)
            plt.store(weights_ref.at[token_N, x], weights[x], mask=real_N)
            # Interpreted, a masked store writes the old value back: spare places keep rows apart.
            place_N = jnp.where(live_N, slot_N, count * tile_rows + token_N)
            plt.store(row_ref.at[place_N], row_N.astype(jnp.int32), mask=live_N)
        for start in range(0, count, span):
            _describe(
                start + jnp.arange(span), expert_ref, size_ref, count_E, tiles_E, first_E, tile_rows
            )

    struct = jax.ShapeDtypeStruct
    return _call(
        body,
        name="routing_route",
        grid=(1,),
        out_shape=(
            struct((tokens, k), jnp.float32),
            struct((count,), jnp.int32),
            struct((count,), jnp.int32),
            struct((count * tile_rows + rows,), jnp.int32),
            struct((tokens * k,), jnp.int32),
        ),
        warps=8 if rows * width > 2048 else 4,
        interpret=interpret,
    )(logits_NE, *(() if live_N is None else (live_N,)))


def _describe(tile_T, expert_ref, size_ref, count_E, tiles_E, first_E, tile_rows):
    """Stores the expert and the number of rows of each of these tiles; expert -1: none."""
    expert_E = jnp.arange(count_E.size)
    after_TE = tile_T[:, None] - first_E[None, :]  # place among the expert's tiles
    here_TE = (after_TE >= 0) & (after_TE < tiles_E[None, :])
    expert_T = jnp.sum(jnp.where(here_TE, expert_E[None, :] + 1, 0), axis=1) - 1
    left_TE = count_E[None, :] - after_TE * tile_rows
    size_T = jnp.sum(jnp.where(here_TE, jnp.minimum(left_TE, tile_rows), 0), axis=1)
    inside_T = tile_T < expert_ref.shape[0]
    plt.store(expert_ref.at[tile_T], expert_T.astype(jnp.int32), mask=inside_T)
    plt.store(size_ref.at[tile_T], size_T.astype(jnp.int32), mask=inside_T)


def _describe_parts(part_P, refs, tiles_E, first_E, tile_rows, most):
    """Stores expert, first tile and slots of each of these parts of up to `most` tiles."""
    expert_ref, start_ref, size_ref = refs
    expert_E = jnp.arange(tiles_E.size)
    parts_E = (tiles_E + (most - 1)) // most
    # Tiles of a part. It is `most` or less, so that the last part has some left.
    share_E = jax.lax.div(tiles_E + parts_E - 1, jnp.maximum(parts_E, 1))
    before_E = jnp.cumsum(parts_E) - parts_E
    after_PE = part_P[:, None] - before_E[None, :]  # place among the expert's parts
    here_PE = (after_PE >= 0) & (after_PE < parts_E[None, :])
    done_PE = after_PE * share_E[None, :]
    size_PE = jnp.minimum(share_E[None, :], tiles_E[None, :] - done_PE) * tile_rows
    inside_P = part_P < expert_ref.shape[0]
    for ref, value_PE, none in (
        (expert_ref, expert_E[None, :] + 1, -1),
        (start_ref, first_E[None, :] + done_PE, 0),
        (size_ref, size_PE, 0),
    ):
        value_P = jnp.sum(jnp.where(here_PE, value_PE, 0), axis=1) + none
        plt.store(ref.at[part_P], value_P.astype(jnp.int32), mask=inside_P)


ROWS = 128  # of a block of the schedule


def make_tiles(
    ids_M: Array,
    experts: int,
    tile_rows: int,
    count: int,
    *,
    widest: int | None = None,
    interpret: bool,
) -> tuple[Array, ...]:
    """As routing.make_tiles: expert_T, size_T (rows used), row_S, slot_M. One launch, or two.

    A block of 128 rows counts its experts and ranks each row among the block's rows of the same
    expert, by comparing all pairs; then every block sums the counts of the blocks before it. Up to
    128 rows one block does both. row_S past a tile's size is not written, and it has spare places
    at its end.

    widest: a multiple of tile_rows; the tiles of each expert are then also joined to the fewest
    parts of at most that many slots, and those as equal as whole tiles allow. Three more arrays
    come at the end: expert_P (-1 past the last part), start_P in tiles and size_P in slots. With
    widest = 2 tile_rows:

        expert_T  0 0 0 2 -1      expert_P 0 0 2 -1    start_P 0 2 3 0    size_P / tile_rows 2 1 1 0
    """
    assert widest is None or widest % tile_rows == 0, (widest, tile_rows)
    total = ids_M.shape[0]
    width = pl.next_power_of_2(experts)
    blocks = pl.cdiv(total, ROWS)
    rows = ROWS if blocks > 1 else max(16, pl.next_power_of_2(total))
    parts = 0 if widest is None else bound(total, experts, widest)
    struct = jax.ShapeDtypeStruct

    def span(block, many):
        """Which of `many` tiles or parts a block describes."""
        each = max(16, pl.next_power_of_2(pl.cdiv(many, blocks)))
        return block * each + jnp.arange(each)

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
        given = 3 if blocks > 1 else 1
        *earlier, ids_ref = refs[:given]
        expert_ref, size_ref, row_ref, slot_ref, *part_refs = refs[given:]
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
        tile_T = span(block, count)
        _describe(tile_T, expert_ref, size_ref, count_E, tiles_E, first_E, tile_rows)
        if part_refs:
            most = widest // tile_rows
            _describe_parts(span(block, parts), part_refs, tiles_E, first_E, tile_rows, most)

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
            *[struct((parts,), jnp.int32)] * (3 if parts else 0),
        ),
    )(*earlier, ids_M)
