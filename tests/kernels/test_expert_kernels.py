"""The Triton kernels without a GPU: interpreted against float64, and lowered at the real shapes."""

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

from gptoss_jax.kernels import device, shapes
from gptoss_jax.kernels.expert_matmul import ExpertWeights, expert_matmul, triton
from gptoss_jax.kernels.expert_matmul.grouped import Shape, to_order
from gptoss_jax.kernels.expert_matmul.triton import Plan, choose_plan
from gptoss_jax.kernels.mxfp4.in_kernel import scale_of, weight_of
from gptoss_jax.kernels.routing import top_k

# Small steps, so that the interpreter's program is small: 16 dots, not 128.
STEP = Shape(groups=4, lanes=8)
HALF = Shape(groups=2, lanes=8)
TILES = Plan(rows=16, direct=False, gate_up=STEP, down=STEP, order="chunked")
JOINED = Plan(rows=16, direct=False, gate_up=HALF, down=HALF, order="joined")
RIGHT = Shape(groups=2, lanes=8, left=False, cols=32, split=2)
DIRECT = Plan(
    rows=8, direct=True, gate_up=Shape(groups=2, lanes=8, left=False, cols=32), down=RIGHT
)
BFLOAT16 = 2e-3


@functools.partial(jax.jit, static_argnames="plan")
def interpreted(x, ids, weights, experts, *, plan):
    return triton.expert_matmul(
        x,
        ids,
        weights,
        experts,
        limit=LIMIT,
        alpha=ALPHA,
        out_dtype=jnp.dtype(jnp.float32),
        plan=plan,
        interpret=True,
    )


@pytest.fixture(scope="module")
def experts():
    # D = 160 and F = 96: 5 and 3 blocks, so every step of K and every tile of columns has a tail.
    return random_experts(20)


@pytest.mark.parametrize("plan", [TILES, JOINED, DIRECT])
def test_kernels_equal_float64(experts, plan):
    x, ids, weights = random_rows(21, 7)
    got = interpreted(x, ids, weights, experts.to_layout("triton"), plan=plan)
    assert got.shape == x.shape
    assert relative_error(got, in_float64(x, ids, weights, experts)) < BFLOAT16


def test_ids_that_are_not_here_and_rows_that_are_nan(experts):
    x, ids, weights = random_rows(22, 7)
    lanes = experts.to_layout("triton")
    nowhere = jnp.array([[-1, 5, BIG, -BIG]] * 7, jnp.int32)
    out = interpreted(x, nowhere, weights.at[0].set(jnp.nan), lanes, plan=TILES)
    assert (np.asarray(out) == 0).all()
    ids = ids.at[2].set(jnp.arange(4))
    clean = np.asarray(interpreted(x, ids, weights, lanes, plan=TILES))
    got = np.asarray(interpreted(x.at[2].set(jnp.nan), ids, weights, lanes, plan=TILES))
    assert np.isnan(got[2]).all()
    np.testing.assert_array_equal(np.delete(got, 2, axis=0), np.delete(clean, 2, axis=0))


def test_every_pattern_of_empty_experts_and_one_expert_for_all(experts):
    x, _, weights = random_rows(23, 7)
    lanes = experts.to_layout("triton")
    for pattern in (1, 2, 4, 8, 16, 5, 10, 21, 27, 31):
        present = [e for e in range(5) if pattern >> e & 1]
        ids = jnp.asarray(np.resize(present, (7, 4)), jnp.int32)
        got = interpreted(x, ids, weights, lanes, plan=TILES)
        assert relative_error(got, in_float64(x, ids, weights, experts)) < BFLOAT16, present


def test_a_rows_bits_do_not_depend_on_the_others(experts):
    x, ids, weights = random_rows(24, 7)
    lanes = experts.to_layout("triton")
    got = np.asarray(interpreted(x, ids, weights, lanes, plan=TILES))
    order = np.array([5, 2, 0, 3, 6, 1, 4])
    moved = interpreted(x[order], ids[order], weights[order], lanes, plan=TILES)
    np.testing.assert_array_equal(np.asarray(moved), got[order])
    other = interpreted(x.at[1:].set(0.5), ids.at[1:].set(3), weights, lanes, plan=TILES)
    np.testing.assert_array_equal(np.asarray(other)[0], got[0])


def test_wide_scales_take_the_exact_path():
    experts = random_experts(25, low=129, high=134)
    x, ids, weights = random_rows(26, 7)
    got = interpreted(x, ids, weights, experts.to_layout("triton_wide"), plan=TILES)
    assert relative_error(got, in_float64(x, ids, weights, experts)) < BFLOAT16


@pytest.mark.parametrize("wide", [False, True])
def test_lanes_decode_in_a_kernel_to_the_bits_of_decode(wide):
    lane, pair, want = every_code_and_scale(wide)
    for plane in (0, 1):
        factor = scale_of(pair, plane, wide=wide, interpret=True)
        for place in range(4):
            got = weight_of(lane, factor, place, wide=wide, interpret=True)
            # This backend flushes subnormals, so values that are and, wide, the factor of byte 0,
            # which only the first and the last row have. The GPU test makes no exception.
            rows = slice(1, -1) if wide else slice(None)
            bits = np.asarray(got).view(np.uint16)[rows]
            right = want[plane][place].view(np.uint16)[rows]
            normal = (right & 0x7F80) != 0
            np.testing.assert_array_equal(bits[normal], right[normal])


def test_orders_are_permutations():
    x = jnp.arange(2 * 160, dtype=jnp.float32).reshape(2, 160)
    chunked = to_order(x, "chunked")
    assert chunked.shape == (2, 256)
    np.testing.assert_array_equal(to_order(chunked, "chunked")[:, :160], x)
    assert chunked[0, 32 * 2 + 8 * 3 + 5] == 32 * 3 + 8 * 2 + 5
    joined = to_order(x, "joined")
    assert joined[0, 32 * 3 + 4 * 5 + 2] == 32 * 3 + 8 * 2 + 5
    np.testing.assert_array_equal(np.sort(joined), x)


def test_other_activations_are_refused(experts):
    x, ids, weights = random_rows(27, 2, dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="float32"):
        interpreted(x, ids, weights, experts.to_layout("triton"), plan=TILES)


def layer(x, logits, experts):
    ids, weights = top_k(logits, 4)
    return expert_matmul(x, ids, weights, experts, limit=LIMIT, alpha=ALPHA, backend="triton")


def abstract(problem: shapes.Experts):
    struct = jax.ShapeDtypeStruct
    e, d, f = problem.experts, problem.embed, problem.ffn
    experts = ExpertWeights(
        layout="triton",
        gate_up_blocks=struct((e, 2, d // 32, 8, f), jnp.uint16),
        gate_up_scales=struct((e, d // 32, f), jnp.uint16),
        gate_up_bias=struct((e, 2 * f), jnp.bfloat16),
        down_blocks=struct((e, 2, f // 32, 8, d // 2), jnp.uint16),
        down_scales=struct((e, f // 32, d // 2), jnp.uint16),
        down_bias=struct((e, d), jnp.bfloat16),
    )
    x = struct((problem.tokens, d), jnp.bfloat16)
    return x, struct((problem.tokens, e), jnp.float32), experts


@pytest.mark.parametrize("model, tokens", [("20b", 1), ("20b", 32), ("120b", 8), ("120b", 2048)])
def test_kernels_lower_for_cuda_at_the_real_shapes(model, tokens):
    with device.ahead_of_time():
        traced = jax.jit(layer).trace(*abstract(shapes.experts(model, tokens)))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for name in ("routing_top_k", "experts_gate_up", "experts_down", "experts_combine"):
        assert name in text
    assert text.count("__gpu$xla.gpu.triton") == {1: 4, 8: 5, 32: 5, 2048: 6}[tokens]


def shared_bytes(shape: Shape, rows: int) -> int:
    """Of the pipeline: each stage holds x, both planes' lanes and the scales of one step."""
    depth = shape.groups * 32
    x = rows * depth * 2
    lanes = 2 * shape.cols * (depth // 4) * 2
    scales = shape.cols * shape.groups * shape.lanes * 2
    return shape.stages * (x + lanes + scales)


def test_every_plan_fits_into_shared_memory():
    for problem in shapes.EXPERTS:
        # What one program may have: 227 KB on Hopper, 99 KB on a desktop card.
        for kind, most in (("NVIDIA H200", 232448), ("NVIDIA GeForce RTX 4090", 101376)):
            plan = choose_plan(
                problem.tokens,
                problem.chosen,
                problem.experts,
                problem.embed,
                problem.ffn,
                kind,
            )
            for shape in (plan.gate_up, plan.down):
                assert shared_bytes(shape, plan.rows) <= most, (problem.name, kind, shape)
                assert shape.left is False or shape.cols >= 16 * shape.warps
