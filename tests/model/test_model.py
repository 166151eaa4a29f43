"""The model against itself by other ways: chunks, single tokens, padding, jit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import TINY

import gptoss_jax as gj
from gptoss_jax import cache as caches
from gptoss_jax.kernels import mxfp4
from gptoss_jax.kernels.expert_matmul import ExpertWeights
from gptoss_jax.model import counted

T = 24  # past the window (5) and past several turns of the ring


def randomised(config=TINY, seed=0, **how):
    """A model whose biases, sinks and norms are not at their initial zeros and ones."""
    model = gj.GptOss(config, rngs=nnx.Rngs(seed), **how)
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    draw = np.random.default_rng(seed).standard_normal
    leaves = [
        leaf if leaf.dtype == jnp.uint8 else leaf + jnp.asarray(0.3 * draw(leaf.shape), leaf.dtype)
        for leaf in leaves
    ]
    return nnx.merge(graph, jax.tree.unflatten(tree, leaves))


@pytest.fixture(scope="module")
def model():
    return randomised()


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(1).integers(0, TINY.vocab, (2, T)), jnp.int32)


@pytest.fixture(scope="module")
def whole(model, tokens):
    return np.asarray(model(tokens))


@pytest.fixture(scope="module")
def step(model):
    graph, state = nnx.split(model)

    @jax.jit
    def run(cache, tokens, positions):
        merged = nnx.merge(graph, state)
        x, cache = merged.hidden(tokens, positions, cache)
        return merged.logits(x), cache

    return run


def close(got, want, **more):
    # float32 sums in another order: measured 1.0e-4 of the deviation on a CPU, 1.2e-4 on an H200.
    np.testing.assert_allclose(got, want, atol=3e-4 * float(np.std(want)), rtol=0, **more)


@pytest.mark.parametrize("chunks", [[24], [8, 8, 8], [8, *[1] * 8, 8], [1] * 24])
def test_every_cut_of_the_prompt_gives_the_full_forward(step, tokens, whole, chunks):
    cache, start = caches.make(TINY, 2, 32, jnp.float32), 0
    for size in chunks:
        positions = jnp.broadcast_to(jnp.arange(start, start + size), (2, size))
        logits, cache = step(cache, tokens[:, start : start + size], positions)
        close(logits, whole[:, start : start + size])
        start += size
    assert cache.length_B.tolist() == [T, T]


def test_ring_holds_the_last_window_positions_at_every_length(step, tokens):
    cache = caches.make(TINY, 2, 32, jnp.float32)
    for at in range(T):
        _, cache = step(cache, tokens[:, at : at + 1], jnp.full((2, 1), at))
        seen = [p for p in range(at + 1) if at - p < TINY.window]
        assert sorted(cache.ring_pos_BW[0].tolist()) == [-1] * (TINY.window - len(seen)) + seen
        assert cache.full_pos_BS[0].tolist() == [*range(at + 1), *[-1] * (31 - at)]


def test_ring_picture():
    """Positions 0..5 in one chunk into a ring of four: slots 0 and 1 go to the later ones."""
    slots = caches.ring_slots(jnp.array([[0, 1, 2, 3, 4, 5, -1]]), 4)
    assert slots.tolist() == [[4, 4, 2, 3, 0, 1, 4]]
    ring = caches.store_positions(jnp.full((1, 4), -1), jnp.arange(7)[None], slots)
    assert ring.tolist() == [[4, 5, 2, 3]]


def test_nothing_is_written_over_where_the_cache_ends():
    """Positions beyond the last slot are dropped, not clamped onto it or wrapped to the first."""
    before = jnp.arange(1 * 2 * 6 * 1, dtype=jnp.float32).reshape(1, 2, 6, 1)
    new = jnp.full((1, 3, 2, 1), -1.0)
    positions = jnp.array([[5, 6, 11]])
    slots = caches.full_slots(positions, 6)
    after = caches.store(before, new, slots)
    assert (after[:, :, :5] == before[:, :, :5]).all() and (after[:, :, 5] == -1).all()
    held = caches.store_positions(jnp.arange(6)[None] - 1, positions, slots)
    assert held.tolist() == [[-1, 0, 1, 2, 3, 5]]


def test_rows_of_different_lengths_do_not_meet(step, tokens, whole):
    """Row 1 is three tokens behind, padded on the right, and both go on together."""
    cache = caches.make(TINY, 2, 32, jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
    positions = positions.at[1, 5:].set(-1)
    logits, cache = step(cache, tokens[:, :8], positions)
    close(logits[0], whole[0, :8])
    close(logits[1, :5], whole[1, :5])
    assert np.isfinite(logits).all()
    assert cache.length_B.tolist() == [8, 5]
    for more in range(12):
        at = jnp.array([[8 + more], [5 + more]])
        logits, cache = step(cache, jnp.take_along_axis(tokens, at, axis=1), at)
        close(logits[0, 0], whole[0, 8 + more])
        close(logits[1, 0], whole[1, 5 + more])


def test_a_resting_row_writes_nothing(step, tokens):
    cache = caches.make(TINY, 2, 32, jnp.float32)
    _, cache = step(cache, tokens[:, :8], counted(tokens[:, :8]))
    _, after = step(cache, tokens[:, :1], jnp.array([[8], [-1]]))
    for before, now in zip(cache.k + cache.v, after.k + after.v, strict=True):
        assert (before[1] == now[1]).all() and (before[0] != now[0]).any()
    assert after.length_B.tolist() == [9, 8]


def test_what_unwritten_slots_hold_does_not_matter(step, tokens, whole):
    cache = caches.make(TINY, 2, 32, jnp.float32)
    poisoned = cache.__class__(
        tuple(jnp.full_like(k, jnp.nan) for k in cache.k),
        tuple(jnp.full_like(v, jnp.nan) for v in cache.v),
        cache.full_pos_BS,
        cache.ring_pos_BW,
        cache.length_B,
    )
    logits, poisoned = step(poisoned, tokens[:, :8], counted(tokens[:, :8]))
    close(logits, whole[:, :8])
    logits, _ = step(poisoned, tokens[:, 8:9], jnp.full((2, 1), 8))
    close(logits[:, 0], whole[:, 8])


def test_sliding_layers_see_exactly_window_positions():
    """With one sliding layer, changing token 3 changes rows 3..7 and no other."""
    one = dataclasses.replace(TINY, layers=1, sliding=None)
    model = randomised(one)
    tokens = np.arange(20)[None] % TINY.vocab
    changed = tokens.copy()
    changed[0, 3] = 50
    moved = np.abs(np.asarray(model(tokens) - model(changed)))[0].max(axis=-1) > 0
    assert np.flatnonzero(moved).tolist() == [3, 4, 5, 6, 7]


def test_inside_jit_and_under_bfloat16(model, tokens, whole):
    close(jax.jit(lambda m, t: m(t))(model, tokens), whole)
    assert model(np.asarray(tokens)).dtype == jnp.float32
    half = randomised(dtype=jnp.bfloat16)
    assert half.dtype == jnp.bfloat16 and half(tokens).dtype == jnp.float32
    for leaf in jax.tree.leaves(nnx.split(half)[1]):
        assert leaf.dtype in (jnp.bfloat16, jnp.float32)


def test_packed_is_dense_with_the_same_values(tokens):
    packed = randomised(experts="packed")
    want = packed(tokens)
    for block in packed.blocks:
        w = block.moe.experts.weights()
        block.moe.experts.replace(
            ExpertWeights(
                layout="dense",
                gate_up=mxfp4.decode(w.gate_up_blocks, w.gate_up_scales, jnp.float32),
                gate_up_bias=w.gate_up_bias,
                down=mxfp4.decode(w.down_blocks, w.down_scales, jnp.float32),
                down_bias=w.down_bias,
            )
        )
    close(packed(tokens), want)


def test_trace_agrees_with_the_logits(model, tokens, whole):
    trace = model.trace(tokens)
    close(trace["logits"], whole)
    assert len(trace["after"]) == TINY.layers
    chosen = trace["router_ids"][1]
    best = np.argsort(-trace["router_logits"][1], axis=-1, kind="stable")[..., :4]
    assert (chosen == best).all()


@pytest.mark.parametrize(
    "tokens, says",
    [
        ([1, 2], "shape"),
        ([[0.5]], "whole numbers"),
        ([[]], "shape"),
        ([[1], [1, 2]], "rows differ"),
        ([[True]], "whole numbers"),
        (np.zeros((0, 3), int), "shape"),
        ([[1, 53]], r"0\.\.52.*1\.\.53"),
        ([[-1, 2]], r"0\.\.52.*-1\.\.2"),
    ],
)
def test_bad_tokens_are_refused(model, tokens, says):
    with pytest.raises(ValueError, match=says):
        model(tokens)


def test_cache_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match="131072"):
        caches.make(TINY, 1, 131_073)


def test_remat_changes_nothing(tokens):
    graph, state = nnx.split(randomised(dataclasses.replace(TINY, layers=1, sliding=None)))

    def loss(state, remat):
        x, _ = nnx.merge(graph, state).hidden(tokens, counted(tokens), remat=remat)
        return jnp.mean(x**2)

    plain, again = (jax.jit(jax.grad(loss), static_argnums=1)(state, r) for r in (False, True))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3 * float(jnp.abs(a).max()), rtol=0)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(again)[:6])
