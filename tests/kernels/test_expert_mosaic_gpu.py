"""The Mosaic kernel on a Hopper, against float64: pytest -m gpu."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import ALPHA, BIG, LIMIT, in_float64, random_experts, random_rows, relative_error

from gptoss_jax.kernels.expert_matmul import expert_matmul, mixture, mosaic

pytestmark = pytest.mark.gpu
BFLOAT16 = 4e-3
# Of each size the plan in use and the next; `bench_mosaic` checks the others where it times them.
PLANS = dict.fromkeys(
    plan for tokens in (128, 256, 512, 2048, 8192) for plan in mosaic.candidates(tokens, 4, 32)[:2]
)


@pytest.fixture(autouse=True)
def hopper():
    try:
        mosaic.require()
    except NotImplementedError as e:
        pytest.skip(str(e))


@functools.partial(jax.jit, static_argnames="layout")
def fragmented(experts, layout="mosaic"):
    return experts.to_layout(layout)


@functools.partial(jax.jit, static_argnames=("plan", "limit"))
def compute(x, ids, weights, experts, *, plan=None, limit=LIMIT):
    return mosaic.expert_matmul(
        x,
        ids,
        weights,
        experts,
        limit=limit,
        alpha=ALPHA,
        out_dtype=jnp.dtype(jnp.float32),
        plan=plan,
    )


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan.widths)))
def test_every_candidate_equals_float64_and_itself(plan):
    experts = random_experts(1, experts=5, embed=448, ffn=320, low=110, high=128)
    packed = fragmented(experts)
    x, ids, weights = random_rows(2, 211, embed=448)
    got = np.asarray(compute(x, ids, weights, packed, plan=plan))
    assert relative_error(got, in_float64(x, ids, weights, experts)) < BFLOAT16
    for _ in range(50):
        again = np.asarray(compute(x, ids, weights, packed, plan=plan))
        np.testing.assert_array_equal(again, got)


@pytest.mark.parametrize("count, embed, ffn", [(32, 192, 320), (128, 128, 64)])
@pytest.mark.parametrize("tokens", [1, 7, 190])
def test_sizes(count, embed, ffn, tokens):
    experts = random_experts(tokens, experts=count, embed=embed, ffn=ffn, low=110, high=128)
    x, ids, weights = random_rows(tokens + 1, tokens, embed=embed, experts=count)
    got = compute(x, ids, weights, fragmented(experts))
    assert relative_error(got, in_float64(x, ids, weights, experts)) < BFLOAT16


@pytest.mark.parametrize("tokens", [5, 700])
def test_at_the_real_widths(tokens):
    experts = random_experts(tokens, experts=6, embed=2880, ffn=2880, low=117, high=123)
    x, ids, weights = random_rows(tokens, tokens, embed=2880, experts=6)
    got = np.asarray(compute(x, ids, weights, fragmented(experts)))
    few = np.array([0, tokens // 2, tokens - 1])
    want = in_float64(x[few], ids[few], weights[few], experts)
    assert relative_error(got[few], want) < BFLOAT16


@pytest.mark.parametrize("wide", [False, True])
def test_every_code_and_scale_comes_out_of_down(wide):
    """Zero gates and ups of 1: h is 0.5 x silu-like and the same everywhere; down shows each value.

    gate_up is zero with biases of 1, so h is one known number c; row d of down has one weight that
    is not zero, and the result is c times it. Codes and scale bytes run over the rows.
    """
    low, high = (129, 250) if wide else (60, 129)
    bytes_ = np.arange(low, high)
    rows = 64 * -(-len(bytes_) * 15 // 64)
    experts = random_experts(3, experts=1, embed=rows, ffn=64)
    down_blocks = np.zeros((1, rows, 2, 16), np.uint8)
    down_scales = np.full((1, rows, 2), low, np.uint8)
    want = np.zeros(rows)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values += [-v for v in values]
    for d in range(rows):
        byte, code = bytes_[d // 15 % len(bytes_)], d % 15 + 1
        column = d % 64
        down_blocks[0, d, column // 32, column % 32 // 2] = code << (4 * (column % 2))
        down_scales[0, d, column // 32] = byte
        want[d] = values[code] * 2.0 ** (int(byte) - 127)
    leaves = dict(
        gate_up_blocks=jnp.zeros_like(experts.gate_up_blocks),
        gate_up_bias=jnp.ones_like(experts.gate_up_bias),
        down_blocks=jnp.asarray(down_blocks),
        down_scales=jnp.asarray(down_scales),
        down_bias=jnp.zeros_like(experts.down_bias),
    )
    experts = dataclasses.replace(experts, **leaves)
    experts = fragmented(experts, "mosaic_wide" if wide else "mosaic")
    x = jnp.ones((3, rows), jnp.bfloat16)
    ids, weights = jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1), jnp.float32)
    plan = mosaic.candidates(64, 4, 32)[0]
    plan = dataclasses.replace(plan, partial="float32")
    got = np.asarray(compute(x, ids, weights, experts, plan=plan)).astype(np.float64)
    c = float(jnp.bfloat16(2 / (1 + np.exp(-ALPHA))))
    np.testing.assert_allclose(got, np.broadcast_to(c * want, got.shape), rtol=1e-6)


def test_every_pattern_of_empty_experts():
    experts = random_experts(1, embed=192, ffn=128)
    packed = fragmented(experts)
    x, _, weights = random_rows(2, 37, embed=192)
    for pattern in range(1, 32):
        present = [e for e in range(5) if pattern >> e & 1]
        ids = jnp.asarray(np.resize(present, (37, 4)), jnp.int32)
        got = compute(x, ids, weights, packed)
        assert relative_error(got, in_float64(x, ids, weights, experts)) < BFLOAT16, present


def test_ids_that_are_not_here():
    packed = fragmented(random_experts(3, embed=192, ffn=128))
    x, _, weights = random_rows(4, 50, embed=192)
    nowhere = jnp.array([[-1, 5, BIG, -BIG]] * 50, jnp.int32)
    assert (np.asarray(compute(x, nowhere, weights.at[0].set(jnp.nan), packed)) == 0).all()


@pytest.mark.parametrize("tokens", [3, 211])
@pytest.mark.parametrize("limit", [LIMIT, None])
def test_a_nan_reaches_its_row_and_no_other(tokens, limit):
    # One value that is not a number, of rows whose tiles hold others too; the clamp keeps it.
    packed = fragmented(random_experts(3, embed=192, ffn=128))
    x, _, weights = random_rows(4, tokens, embed=192)
    ids = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (tokens, 4))
    run = functools.partial(compute, ids=ids, weights=weights, experts=packed, limit=limit)
    clean = np.asarray(run(x))
    assert np.isfinite(clean).all()
    for row, column in ((0, 191), (tokens - 1, 0), (tokens // 2, 70)):
        got = np.asarray(run(x.at[row, column].set(jnp.nan)))
        assert np.isnan(got[row]).all()
        others = np.arange(tokens) != row
        np.testing.assert_array_equal(got[others], clean[others])


def test_a_rows_bits_do_not_depend_on_the_others():
    packed = fragmented(random_experts(5, embed=192, ffn=128))
    x, ids, weights = random_rows(6, 200, embed=192)
    got = np.asarray(compute(x, ids, weights, packed))
    order = np.random.default_rng(0).permutation(200)
    moved = np.asarray(compute(x[order], ids[order], weights[order], packed))
    np.testing.assert_array_equal(moved, got[order])
    other = compute(x.at[1:].set(0.5), ids.at[1:].set(3), weights, packed)
    np.testing.assert_array_equal(np.asarray(other)[0], got[0])


def test_wide_scales_and_no_limit():
    experts = random_experts(7, embed=192, ffn=128, low=125, high=135)
    packed = fragmented(experts, "mosaic_wide")
    x, ids, weights = random_rows(8, 30, embed=192)
    got = compute(x, ids, weights, packed)
    assert relative_error(got, in_float64(x, ids, weights, experts)) < BFLOAT16
    experts = random_experts(9, embed=192, ffn=128, low=118, high=121)
    got = compute(x, ids, weights, fragmented(experts), limit=None)
    assert relative_error(got, in_float64(x, ids, weights, experts, None)) < BFLOAT16


@pytest.mark.parametrize("tokens", [1, 30, 200])
def test_both_doors(tokens):
    experts = random_experts(11, embed=192, ffn=128)
    packed = fragmented(experts)
    x, ids, weights = random_rows(12, tokens, embed=192)
    how = dict(limit=LIMIT, alpha=ALPHA)
    want = in_float64(x, ids, weights, experts)
    for backend in ("mosaic", None):  # None takes the form that the layout is for
        got = jax.jit(functools.partial(expert_matmul, backend=backend, **how))(
            x, ids, weights, packed
        )
        assert relative_error(got, want) < BFLOAT16
    logits = jax.random.normal(jax.random.key(tokens), (tokens, 5))
    live = jnp.arange(tokens) % 3 < 2
    residual = x[:, ::-1]
    both = [
        jax.jit(functools.partial(mixture, chosen=4, backend=backend, **how))(
            x, logits, live, e, residual
        )
        for backend, e in (("mosaic", packed), ("xla", experts))
    ]
    assert relative_error(both[0], np.asarray(both[1]).astype(np.float64)) < BFLOAT16
