"""Choice of experts, and the schedule of tiles: pictures, ids that are not here, permutations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from gptoss_jax.kernels import routing
from gptoss_jax.kernels.routing import in_kernel

BIG = 2**31 - 1


def interpreted(logits, k):
    return in_kernel.top_k(logits, k, interpret=True)


def picked(logits, k):
    """By rank, one choice at a time, as gate_up does for a few tokens; softmax as its reader."""
    shape = logits.shape[0], k

    def body(logits_ref, ids_ref, logit_ref):
        n, x = pl.program_id(0), pl.program_id(1)
        ids_ref[n, x], logit_ref[n, x] = in_kernel.pick(logits_ref, n, x, k)

    ids, logit = pl.pallas_call(
        body,
        grid=shape,
        out_shape=[jax.ShapeDtypeStruct(shape, d) for d in (jnp.int32, jnp.float32)],
        interpret=True,
    )(logits)
    return ids, jax.nn.softmax(logit, axis=-1)


FORMS = [routing.top_k, interpreted, picked]


@pytest.mark.parametrize("top_k", FORMS)
def test_top_k_golden(top_k):
    ids, weights = top_k(jnp.array([[2, 1, 0.5, 0, -1, -3]], jnp.float32), 4)
    assert ids.tolist() == [[0, 1, 2, 3]]
    np.testing.assert_allclose(
        weights[0], [0.57925853, 0.2130973, 0.12925005, 0.07839412], rtol=1e-6
    )


@pytest.mark.parametrize("top_k", FORMS)
def test_top_k_ties_zeros_shifts_and_nan(top_k):
    logits = jnp.array(
        [
            [1, 1, 1, 1, 1, 1],
            [-0.0, 0, -0.0, 0, -5, -5],
            [0, jnp.nan, 1, 2, 3, 4],
            [512, 511, 510, 509, -64, -64],
            [-50, -52, -51, -53, -60, -49],
            [-jnp.inf, -jnp.inf, -jnp.inf, -jnp.inf, -jnp.inf, 0],
        ],
        jnp.float32,
    )
    ids, weights = map(np.asarray, top_k(logits, 4))
    assert ids[0].tolist() == [0, 1, 2, 3] and ids[1].tolist() == [0, 1, 2, 3]
    assert np.isnan(weights[2]).all() and (ids[2] >= 0).all() and (ids[2] < 6).all()
    np.testing.assert_allclose(weights[3], [0.6439, 0.2369, 0.0871, 0.0321], atol=1e-4)
    assert ids[4].tolist() == [5, 0, 2, 1]  # all negative: no padding lane wins
    np.testing.assert_allclose(weights[5], [1, 0, 0, 0])
    assert np.isfinite(weights[[0, 1, 3, 4, 5]]).all()
    assert ids[5].tolist() == [5, 0, 1, 2]


def test_top_k_forms_agree_and_refuse():
    logits = jax.random.normal(jax.random.key(0), (300, 12))
    ids, weights = routing.top_k(logits, 3)
    ids2, weights2 = interpreted(logits, 3)
    np.testing.assert_array_equal(ids, ids2)
    np.testing.assert_allclose(weights, weights2, rtol=1e-6)
    # Of more than 64 experts `pick` goes in rounds; halves make ties, and one row holds a NaN.
    many = jnp.round(2 * jax.random.normal(jax.random.key(1), (4, 100))) / 2
    many = many.at[1, 7].set(jnp.nan).at[2].set(-jnp.inf)
    ids, weights = routing.top_k(many, 4)
    ids2, weights2 = picked(many, 4)
    rows = np.array([0, 3])
    np.testing.assert_array_equal(ids[rows], ids2[rows])
    np.testing.assert_allclose(weights[rows], weights2[rows], rtol=1e-6)
    assert np.isnan(weights2[1]).all() and ids2[2].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="12 experts"):
        routing.top_k(logits, 13)
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="NVIDIA"):
            routing.top_k(logits, 3, backend="triton")


def drawn(tiles):
    rows = [" ".join("." if r < 0 else str(r) for r in row) for row in np.asarray(tiles.row_TR)]
    return [f"{e:2d}: {r}" for e, r in zip(np.asarray(tiles.expert_T), rows, strict=True)]


def test_tiles_picture():
    # Rows 0..5 are (token 0: experts 2, 0), (token 1: 2, 9), (token 2: 0, 2); expert 9 is not here.
    ids = jnp.array([[2, 0], [2, 9], [0, 2]], jnp.int32)
    tiles = routing.make_tiles(ids, 3, 2)
    assert drawn(tiles) == [
        " 0: 1 4",
        " 2: 0 2",
        " 2: 5 .",
        "-1: . .",
    ]
    assert tiles.slot_NX.tolist() == [[2, 0], [3, -1], [1, 4]]


def check(ids, experts, tile_rows, expert_T, size_T, row_TR, slot_NX):
    """Every property of a schedule, from the definition."""
    flat = np.asarray(ids).reshape(-1)
    slot = np.asarray(slot_NX).reshape(-1)
    row_TR = np.asarray(row_TR)
    used = np.arange(tile_rows) < np.asarray(size_T)[:, None]
    here = (flat >= 0) & (flat < experts)
    assert sorted(row_TR[used].tolist()) == np.flatnonzero(here).tolist()
    assert (slot[~here] == -1).all()
    assert (row_TR.reshape(-1)[slot[here]] == np.flatnonzero(here)).all()
    tile_of = slot[here] // tile_rows
    assert (np.asarray(expert_T)[tile_of] == flat[here]).all()
    assert (np.asarray(size_T)[np.asarray(expert_T) == -1] == 0).all()


@pytest.mark.parametrize(
    "tokens, chosen, experts, tile_rows", [(9, 4, 6, 4), (70, 4, 6, 16), (1, 3, 5, 16)]
)
def test_schedules_hold_for_any_ids(tokens, chosen, experts, tile_rows):
    rng = np.random.default_rng(tokens)
    ids = rng.choice([-1, BIG, experts, -BIG, *range(experts)], (tokens, chosen))
    ids = jnp.asarray(ids, jnp.int32)
    tiles = routing.make_tiles(ids, experts, tile_rows)
    size_T = (np.asarray(tiles.row_TR) >= 0).sum(axis=1)
    check(ids, experts, tile_rows, tiles.expert_T, size_T, tiles.row_TR, tiles.slot_NX)
    count = routing.bound(ids.size, experts, tile_rows)
    expert_T, size_T, row_S, slot_M = in_kernel.make_tiles(
        ids.reshape(-1), experts, tile_rows, count, interpret=True
    )
    row_TR = np.asarray(row_S)[: count * tile_rows].reshape(count, tile_rows)
    check(ids, experts, tile_rows, expert_T, size_T, row_TR, slot_M)
    np.testing.assert_array_equal(slot_M.reshape(ids.shape), tiles.slot_NX)
    np.testing.assert_array_equal(expert_T, tiles.expert_T)


@pytest.mark.parametrize("tokens, experts, tile_rows", [(9, 6, 4), (40, 12, 8), (1, 5, 16)])
def test_one_launch_routes_as_three(tokens, experts, tile_rows):
    rng = np.random.default_rng(tokens)
    logits = jnp.asarray(rng.integers(-2, 3, (tokens, experts)), jnp.float32)  # many ties
    live = jnp.asarray(rng.random(tokens) < 0.8, jnp.int32)
    count = routing.bound(tokens * 4, experts, tile_rows)
    weights, expert_T, size_T, row_S, slot_M = in_kernel.route(
        logits, 4, live, tile_rows, count, interpret=True
    )
    ids, weights2 = in_kernel.top_k(logits, 4, live, interpret=True)
    want, _ = routing.top_k(logits, 4)
    np.testing.assert_array_equal(ids, np.where(np.asarray(live)[:, None], want, -1))
    np.testing.assert_array_equal(weights, weights2)
    row_TR = np.asarray(row_S)[: count * tile_rows].reshape(count, tile_rows)
    check(ids, experts, tile_rows, expert_T, size_T, row_TR, slot_M)
    tiles = routing.make_tiles(ids, experts, tile_rows)
    np.testing.assert_array_equal(slot_M.reshape(ids.shape), tiles.slot_NX)
    np.testing.assert_array_equal(expert_T, tiles.expert_T)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def with_parts(ids_M, experts, tile_rows, widest):
    count = routing.bound(ids_M.size, experts, tile_rows)
    how = dict(widest=widest, interpret=True)
    return in_kernel.make_tiles(ids_M, experts, tile_rows, count, **how)


def test_parts_picture():
    # 5, 0 and 1 rows in tiles of 2 are 3, 0 and 1 tiles; in parts of at most 2 tiles 2 + 1 and 1.
    ids = jnp.array([0, 2, 0, 0, 3, 0, 0], jnp.int32)
    expert_T, size_T, _, _, *parts = with_parts(ids, 3, 2, 4)
    assert expert_T.tolist() == [0, 0, 0, 2, -1] and size_T.tolist() == [2, 2, 1, 1, 0]
    expert_P, start_P, size_P = (a.tolist() for a in parts)
    assert (expert_P, start_P, size_P) == ([0, 0, 2, -1], [0, 2, 3, 0], [4, 2, 2, 0])


def parts_of(expert_T, experts, most):
    """(expert, first tile, tiles) of each part, from the definition."""
    found = []
    for e in range(experts):
        tiles = np.flatnonzero(np.asarray(expert_T) == e)
        if tiles.size:
            each = -(-tiles.size // -(-tiles.size // most))
            found += [(e, tiles[i], len(tiles[i : i + each])) for i in range(0, tiles.size, each)]
    return found


# One block, a whole one, seven.
@pytest.mark.parametrize("tokens, widest", [(3, 16), (32, 8), (200, 24), (200, 192)])
def test_parts_cover_every_tile_once_and_are_equal(tokens, widest):
    rng = np.random.default_rng(tokens)
    ids = rng.choice([-1, 0, 1, 1, 1, 4, 5, BIG, -BIG, 6], tokens * 4)
    ids = jnp.asarray(ids, jnp.int32)
    expert_T, size_T, row_S, slot_M, *parts = with_parts(ids, 6, 8, widest)
    count = expert_T.size
    check(ids, 6, 8, expert_T, size_T, row_S[: count * 8].reshape(count, 8), slot_M)
    want = parts_of(expert_T, 6, widest // 8)
    used = len(want)
    assert used <= parts[0].size == routing.bound(ids.size, 6, widest)
    expert_P, start_P, size_P = map(np.asarray, parts)
    got = list(zip(expert_P, start_P, size_P // 8, strict=True))
    assert got[:used] == want and set(got[used:]) <= {(-1, 0, 0)}
    assert (size_P % 8 == 0).all() and (size_P <= widest).all()
    covered = [(t + i, e) for e, t, n in want for i in range(n)]
    assert covered == [(t, e) for t, e in enumerate(np.asarray(expert_T)) if e >= 0]
    for e in range(6):
        sizes = size_P[expert_P == e]
        assert len(sizes) == 0 or sizes.min() + 8 * len(sizes) > sizes.max()


def test_the_bound_is_enough_for_every_pattern_of_empty_experts():
    for pattern in range(1, 32):
        present = [e for e in range(5) if pattern >> e & 1]
        ids = jnp.asarray(np.resize(present, (13, 2)), jnp.int32)
        tiles = routing.make_tiles(ids, 5, 4)
        size_T = (np.asarray(tiles.row_TR) >= 0).sum(axis=1)
        check(ids, 5, 4, tiles.expert_T, size_T, tiles.row_TR, tiles.slot_NX)


def test_combine_adds_in_order_and_skips():
    rows = jnp.arange(8, dtype=jnp.float32).reshape(4, 2)
    slots = jnp.array([[3, 0], [-1, 2], [-1, -1]], jnp.int32)
    weights = jnp.array([[0.5, 2.0], [jnp.nan, 1.0], [jnp.nan, jnp.nan]], jnp.float32)
    out = routing.combine(rows, slots, weights)
    np.testing.assert_array_equal(out, [[3.0, 5.5], [4.0, 5.0], [0.0, 0.0]])
