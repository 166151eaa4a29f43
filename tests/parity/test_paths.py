"""Every way through the model gives the oracle's logits: whole, chunks, single tokens, padding,
packed and dense experts, backends, meshes, compiled and not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from checkpoints import SQUARE_GATE_UP, TINY, decoded, make_weights, write
from flax import nnx

import gptoss_jax as gj
from gptoss_jax import cache as caches

NUMBERS = TINY.replace(layers=2)  # one sliding layer, one full
B, T = 3, 40  # five windows
CHUNK = 11  # more than the window of 8, and no multiple of it


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(7).integers(0, NUMBERS.vocab, (B, T))


@pytest.fixture(scope="module")
def stored():
    return make_weights(NUMBERS, seed=3)


@pytest.fixture(scope="module")
def exact(stored, tokens):
    weights = decoded(stored)
    return np.stack([oracle.logits(NUMBERS, weights, row) for row in tokens])


@pytest.fixture(scope="module")
def folder(tmp_path_factory, stored):
    return functools.cache(
        lambda layout: write(tmp_path_factory.mktemp(layout), NUMBERS, stored, layout)
    )


@pytest.fixture(scope="module")
def model(folder):
    return gj.load(folder("mxfp4"), dtype="float32")


@pytest.fixture(scope="module")
def step(model):
    """(cache, tokens [B, n], positions [B, n]) -> logits, cache; compiled for each n."""
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, cache, tokens_BT, positions_BT):
        model = nnx.merge(graph, state)
        x_BTD, cache = model.hidden(tokens_BT, positions_BT, cache)
        return model.logits(x_BTD), cache

    def call(cache, tokens, positions):
        tokens, positions = (jnp.asarray(x, jnp.int32) for x in (tokens, positions))
        logits, cache = run(state, cache, tokens, positions)
        return np.asarray(logits), cache

    return call


def empty():
    return caches.make(gj.Config(**vars(NUMBERS)), B, 48, jnp.float32)


def test_whole(model, tokens, exact):
    tolerances.assert_logits(model(tokens), exact)


@pytest.mark.parametrize(
    "sizes",
    [[11, 11, 11, 5, 1, 1], [11, *[1] * 29], [5] * 8, [1] * 40, [1, 5, 11, 1, 11, 11]],
    ids=lambda sizes: "-".join(map(str, sizes[:6])),
)
def test_chunks_and_single_tokens(step, tokens, exact, sizes):
    cache, start, got = empty(), 0, []
    for size in sizes:
        positions = np.broadcast_to(np.arange(start, start + size), (B, size))
        logits, cache = step(cache, tokens[:, start : start + size], positions)
        got.append(logits)
        start += size
    assert start == T
    tolerances.assert_logits(np.concatenate(got, axis=1), exact)


def test_rows_of_different_lengths_then_single_tokens(step, tokens, exact):
    """Rows of 3, 11 and 7 tokens in one chunk; padding sees nothing, is stored nowhere."""
    lengths = np.array([3, 11, 7])
    positions = np.arange(CHUNK)[None] * np.ones((B, 1), int)
    positions[positions >= lengths[:, None]] = -1
    logits, cache = step(empty(), tokens[:, :CHUNK], positions)
    assert np.isfinite(logits).all()
    for row, length in enumerate(lengths):
        tolerances.assert_logits(logits[row, :length], exact[row, :length])
    for _ in range(20):
        logits, cache = step(cache, tokens[np.arange(B), lengths][:, None], lengths[:, None])
        tolerances.assert_logits(logits[:, 0], exact[np.arange(B), lengths])
        lengths += 1


@pytest.fixture(scope="module")
def uncached(model):
    graph, _ = nnx.split(model)

    @jax.jit
    def run(state, tokens_BT, positions_BT):
        model = nnx.merge(graph, state)
        return model.logits(model.hidden(tokens_BT, positions_BT)[0])

    return run


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_without_a_cache(model, uncached, tokens, exact, side):
    """Lengths 1, 40 and 13: more padding than the window holds, before and behind."""
    ids, positions = np.zeros((B, T), int), np.full((B, T), -1)
    spans = []
    for row, length in enumerate((1, 40, 13)):
        span = slice(T - length, T) if side == "left" else slice(0, length)
        ids[row, span], positions[row, span] = tokens[row, :length], np.arange(length)
        spans.append((row, span, length))
    ids, positions = (jnp.asarray(x, jnp.int32) for x in (ids, positions))
    logits = np.asarray(uncached(nnx.state(model), ids, positions))
    assert np.isfinite(logits).all(), "padding gives NaN"
    for row, span, length in spans:
        tolerances.assert_logits(logits[row, span], exact[row, :length])


@pytest.mark.parametrize(
    "layout, experts, backend",
    [
        ("mxfp4", "packed", "reference"),
        ("mxfp4", "dense", "xla"),
        ("bf16", None, "reference"),
        ("original", "packed", "xla"),
    ],
)
def test_backends_packed_and_dense(folder, tokens, exact, layout, experts, backend):
    model = gj.load(folder(layout), dtype="float32", experts=experts, backend=backend)
    tolerances.assert_logits(model(tokens), exact)


def test_inside_jit(model, tokens, exact):
    traced = jax.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens, jnp.int32))
    tolerances.assert_logits(traced, exact)


@pytest.mark.parametrize("mesh", [dict(expert=4), dict(data=2, expert=2, tensor=2)], ids=str)
def test_meshes(tmp_path, mesh):
    """F = 64 is two MXFP4 blocks, which tensor=2 can share; 12 experts go into 2 and 4 parts."""
    devices = jax.devices("cpu")  # conftest asks for eight, also where there is a GPU
    numbers = SQUARE_GATE_UP.replace(layers=2)
    stored = make_weights(numbers)
    ids = np.random.default_rng(1).integers(0, numbers.vocab, (2, 20))
    model = gj.load(
        write(tmp_path, numbers, stored),
        dtype="float32",
        mesh=gj.make_mesh(**mesh, devices=devices),
    )
    for row, got in zip(ids, np.asarray(model(ids)), strict=True):
        tolerances.assert_logits(got, oracle.logits(numbers, decoded(stored), row))


def test_an_expert_nobody_chose_may_hold_anything(uncached, stored, model):
    """NaN in its weights: a sum over all experts, weighted zero, would be NaN."""
    ids, positions = np.zeros((B, T), np.int32), np.full((B, T), -1, np.int32)
    ids[0, :3], positions[0, :3] = [5, 6, 7], [0, 1, 2]
    trace = oracle.trace(NUMBERS, decoded(stored), ids[0, :3])
    spoilt = nnx.clone(model)
    for layer, chosen in enumerate(trace.expert_ids):
        idle = sorted(set(range(NUMBERS.experts)) - set(chosen.ravel().tolist()))
        assert idle, "three tokens cannot choose all twelve experts"
        leaf = spoilt.blocks[layer].moe.experts.gate_up_scales
        leaf[...] = leaf[...].at[jnp.array(idle)].set(255)  # the scale that means NaN
    logits = uncached(nnx.state(spoilt), jnp.asarray(ids), jnp.asarray(positions))
    tolerances.assert_logits(logits[0, :3], trace.logits)
    taken = int(trace.expert_ids[0][0, 0])
    leaf = spoilt.blocks[0].moe.experts.gate_up_scales
    leaf[...] = leaf[...].at[taken].set(255)
    logits = uncached(nnx.state(spoilt), jnp.asarray(ids), jnp.asarray(positions))
    assert np.isnan(logits[0, 0]).all(), "the spoilt scale should have reached the logits"
