"""The Triton kernels on an NVIDIA GPU, against float64: pytest -m gpu."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import (
    ALPHA,
    BIG,
    LIMIT,
    every_code_and_scale,
    in_float64,
    random_experts,
    random_rows,
    relative_error,
)
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from gptoss_jax.kernels import explore, shapes
from gptoss_jax.kernels.expert_matmul import expert_matmul, mixture, triton
from gptoss_jax.kernels.mxfp4.in_kernel import scale_of, scale_of_word, weight_of
from gptoss_jax.kernels.routing import make_tiles, top_k
from gptoss_jax.kernels.routing.in_kernel import make_tiles as make_tiles_in_kernel
from gptoss_jax.kernels.routing.tiles import bound

pytestmark = pytest.mark.gpu
BFLOAT16 = 3e-3


@jax.jit
def compute(x, ids, weights, experts):
    return expert_matmul(
        x,
        ids,
        weights,
        experts,
        limit=LIMIT,
        alpha=ALPHA,
        backend="triton",
        out_dtype=jnp.float32,
    )


@pytest.mark.parametrize("wide", [False, True])
def test_the_asm_decodes_every_code_and_scale(wide):
    lane, pair, want = every_code_and_scale(wide)
    rows = 256
    lane, pair = (jnp.pad(a, ((0, rows - len(a)), (0, 0))) for a in (lane, pair))

    def body(lane_ref, pair_ref, out_ref):
        for plane in (0, 1):
            factor = scale_of(pair_ref[...], plane, wide=wide, interpret=False)
            for place in range(4):
                got = weight_of(lane_ref[...], factor, place, wide=wide, interpret=False)
                out_ref[plane, place] = got

    out = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((2, 4, rows, 16), jnp.bfloat16),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )(lane, pair)
    got = np.asarray(out).view(np.uint16)[:, :, : 255 if wide else 129]
    np.testing.assert_array_equal(got, np.array(want).view(np.uint16))


@pytest.mark.parametrize("wide", [False, True])
def test_the_asm_reads_the_scales_of_words(wide):
    """Every byte in every place, neighbours in a register belonging to different rows or to one."""
    most = 256 if wide else 129
    rows = 256
    bytes_ = jnp.arange(rows, dtype=jnp.uint32) % most

    def body(word_ref, out_ref):
        for place in range(4):
            word = jnp.broadcast_to(word_ref[...], (rows, 32))
            out_ref[place] = scale_of_word(word, place, wide=wide, interpret=False)

    word = (bytes_ | (bytes_ * 3 % most) << 8 | (bytes_ * 5 % most) << 16 | bytes_ << 24)[:, None]
    out = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((4, rows, 32), jnp.bfloat16),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )(word)
    for place in range(4):
        want = scale_of_word(word, place, wide=wide, interpret=True)
        np.testing.assert_array_equal(
            np.asarray(out[place]).view(np.uint16),
            np.broadcast_to(np.asarray(want).view(np.uint16), (rows, 32)),
        )


SIZES = [
    ("triton", 5, 160, 96),
    ("triton", 32, 192, 320),
    ("triton", 128, 96, 160),
    ("mosaic", 5, 192, 320),
    ("mosaic", 128, 320, 64),
]


@pytest.mark.parametrize("layout, experts_, embed, ffn", SIZES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 190])
def test_kernels_equal_float64(layout, experts_, embed, ffn, tokens):
    experts = random_experts(tokens, experts=experts_, embed=embed, ffn=ffn, low=110, high=128)
    x, ids, weights = random_rows(tokens + 1, tokens, embed=embed, experts=experts_)
    got = compute(x, ids, weights, experts.to_layout(layout))
    assert relative_error(got, in_float64(x, ids, weights, experts)) < BFLOAT16


@pytest.mark.parametrize("layout", ["triton", "mosaic"])
@pytest.mark.parametrize("tokens", [1, 9, 40, 300])
def test_at_the_real_widths(tokens, layout):
    experts = random_experts(tokens, experts=6, embed=2880, ffn=2880, low=117, high=123)
    x, ids, weights = random_rows(tokens, tokens, embed=2880, experts=6)
    packed = experts.to_layout(layout)
    got = np.asarray(compute(x, ids, weights, packed))
    few = np.array([0, tokens // 2, tokens - 1])
    want = in_float64(x[few], ids[few], weights[few], experts)
    assert relative_error(got[few], want) < BFLOAT16
    again = np.asarray(compute(x, ids, weights, packed))
    np.testing.assert_array_equal(again, got)


def test_every_pattern_of_empty_experts():
    experts = random_experts(1)
    lanes = experts.to_layout("triton")
    x, _, weights = random_rows(2, 37)
    for pattern in range(1, 32):
        present = [e for e in range(5) if pattern >> e & 1]
        ids = jnp.asarray(np.resize(present, (37, 4)), jnp.int32)
        got = compute(x, ids, weights, lanes)
        assert relative_error(got, in_float64(x, ids, weights, experts)) < BFLOAT16, present


def test_ids_that_are_not_here_and_nan():
    experts = random_experts(3)
    lanes = experts.to_layout("triton")
    for tokens in (1, 50):
        x, ids, weights = random_rows(4, tokens)
        nowhere = jnp.array([[-1, 5, BIG, -BIG]] * tokens, jnp.int32)
        out = compute(x, nowhere, weights.at[0].set(jnp.nan), lanes)
        assert (np.asarray(out) == 0).all()
    ids = ids.at[2].set(jnp.arange(4))
    clean = np.asarray(compute(x, ids, weights, lanes))
    got = np.asarray(compute(x.at[2].set(jnp.nan), ids, weights, lanes))
    assert np.isnan(got[2]).all()
    np.testing.assert_array_equal(np.delete(got, 2, axis=0), np.delete(clean, 2, axis=0))


@jax.jit
def mixed(x, logits, live, experts, residual):
    how = dict(chosen=4, limit=LIMIT, alpha=ALPHA, backend="triton")
    return mixture(x, logits, live, experts, residual, **how)


@pytest.mark.parametrize("experts_", [5, 32, 128])
@pytest.mark.parametrize("tokens", [1, 2, 9, 100, 300])
def test_the_mixture_equals_float64(experts_, tokens):
    """Choice, experts and residual; padding, ties, and a row whose logits hold a NaN."""
    experts = random_experts(tokens, experts=experts_, embed=192, ffn=160)
    x, _, _ = random_rows(tokens, tokens, embed=192)
    keys = jax.random.split(jax.random.key(tokens), 2)
    logits = jnp.round(2 * jax.random.normal(keys[0], (tokens, experts_)))
    residual = jax.random.normal(keys[1], x.shape)
    live = jnp.arange(tokens) % 5 != 3
    lanes = experts.to_layout("triton")
    got = np.asarray(mixed(x, logits, live, lanes, residual))
    ids, weights = top_k(logits, 4, backend="xla")
    ids = jnp.where(live[:, None], ids, -1)
    want = np.asarray(residual) + in_float64(x, ids, weights, experts)
    assert relative_error(got, want) < BFLOAT16
    np.testing.assert_array_equal(got[~np.asarray(live)], residual[~np.asarray(live)])
    np.testing.assert_array_equal(mixed(x, logits, live, lanes, residual), got)
    spoilt = np.asarray(mixed(x, logits.at[-1, 2].set(jnp.nan), live, lanes, residual))
    assert np.isnan(spoilt[-1]).all() or not live[-1]
    np.testing.assert_array_equal(spoilt[:-1], got[:-1])


@pytest.mark.parametrize("layout", ["triton", "mosaic"])
@pytest.mark.parametrize("tokens", [1, 32])
def test_every_plan_that_exploring_may_choose(tokens, layout):
    """At the real widths, where the parts of K have the tails that they have in the model."""
    problem = shapes.experts("20b", tokens)
    experts = random_experts(tokens, experts=6, embed=2880, ffn=2880, low=117, high=123)
    x, ids, weights = random_rows(tokens, tokens, embed=2880, experts=6)
    lanes = experts.to_layout(layout)
    want = in_float64(x[-1:], ids[-1:], weights[-1:], experts)
    for plan in explore.candidates(problem, jax.devices()[0].device_kind, layout):
        how = dict(limit=LIMIT, alpha=ALPHA, out_dtype=jnp.dtype(jnp.float32), plan=plan)
        run = jax.jit(functools.partial(triton.expert_matmul, **how))
        assert relative_error(run(x, ids, weights, lanes)[-1:], want) < BFLOAT16, plan


@pytest.mark.parametrize("tokens", [1, 4, 8, 200])
def test_a_rows_bits_do_not_depend_on_the_others(tokens):
    experts = random_experts(5).to_layout("triton")
    x, ids, weights = random_rows(6, tokens)
    got = np.asarray(compute(x, ids, weights, experts))
    order = np.random.default_rng(0).permutation(tokens)
    moved = compute(x[order], ids[order], weights[order], experts)
    np.testing.assert_array_equal(np.asarray(moved), got[order])
    other = compute(x.at[1:].set(0.5), ids.at[1:].set(3), weights, experts)
    np.testing.assert_array_equal(np.asarray(other)[0], got[0])


@pytest.mark.parametrize("tokens", [1, 30])
def test_wide_scales(tokens):
    experts = random_experts(7, low=125, high=135)
    x, ids, weights = random_rows(8, tokens)
    got = compute(x, ids, weights, experts.to_layout("triton_wide"))
    assert relative_error(got, in_float64(x, ids, weights, experts)) < BFLOAT16


@pytest.mark.parametrize("tokens, experts", [(1, 32), (5, 6), (40, 128), (1000, 12)])
def test_routing_in_kernels(tokens, experts):
    logits = jax.random.normal(jax.random.key(tokens), (tokens, experts)).at[0, 1].set(jnp.nan)
    ids, weights = top_k(logits, 4, backend="triton")
    ids2, weights2 = top_k(logits, 4, backend="xla")
    np.testing.assert_array_equal(ids[1:], ids2[1:])
    np.testing.assert_allclose(weights, weights2, rtol=1e-5)
    ids = jnp.where(ids == 3, jnp.array([-1, BIG, experts, 3], jnp.int32), ids)
    tiles = make_tiles(ids, experts, 16)
    count = bound(ids.size, experts, 16)
    run = functools.partial(make_tiles_in_kernel, interpret=False)
    expert_T, _, row_S, slot_M = run(ids.reshape(-1), experts, 16, count)
    np.testing.assert_array_equal(expert_T, tiles.expert_T)
    np.testing.assert_array_equal(slot_M.reshape(ids.shape), tiles.slot_NX)
    used = np.asarray(tiles.row_TR).reshape(-1) >= 0
    got = np.asarray(row_S)[: count * 16]
    np.testing.assert_array_equal(got[used], np.asarray(tiles.row_TR).reshape(-1)[used])
