"""The Triton kernels without a GPU: interpreted against float64, and lowered at the real shapes."""

import dataclasses
import functools
import re

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
from gptoss_jax.kernels.expert_matmul import ExpertWeights, mixture, triton
from gptoss_jax.kernels.expert_matmul.grouped import Shape
from gptoss_jax.kernels.expert_matmul.packed import place_of, to_order
from gptoss_jax.kernels.expert_matmul.triton import Plan, choose_plan
from gptoss_jax.kernels.explore import candidates
from gptoss_jax.kernels.mxfp4.in_kernel import scale_of, scale_of_word, weight_of
from gptoss_jax.kernels.routing import top_k

# Small steps, so that the interpreter's program is small: 16 dots, not 128.
STEP = Shape(groups=4, lanes=8)
HALF = Shape(groups=2, lanes=8)
TILES = Plan(rows=16, direct=False, gate_up=STEP, down=STEP, order="chunked")
JOINED = Plan(rows=16, direct=False, gate_up=HALF, down=HALF, order="joined")
# D = 160 is 5 blocks: both parts of K have a tail in the second, and cols of 16 leave one of rows.
PIECE = Shape(groups=1, lanes=8, cols=32, parts=2)
ROW = Plan(rows=8, direct=True, gate_up=PIECE, down=dataclasses.replace(PIECE, warps=8))
# Of fragments D = 192 and F = 128 are 3 and 2 steps of 64: tails again, of K and of pairs of rows.
WHOLE = Plan(rows=16, direct=False, gate_up=STEP, down=STEP, order="fragment")
PAIR = Shape(groups=2, cols=32, parts=2)
FEW = Plan(
    rows=8, direct=True, gate_up=PAIR, down=dataclasses.replace(PAIR, warps=8), order="fragment"
)
PLAIN = dataclasses.replace(FEW, order="natural", gate_up=dataclasses.replace(PAIR, groups=4))
BOTH = [("triton", TILES), ("triton", ROW), ("mosaic", WHOLE), ("mosaic", FEW)]
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


@functools.partial(jax.jit, static_argnames="plan")
def mixed(x, logits, live, experts, residual, *, plan):
    how = dict(chosen=4, limit=LIMIT, alpha=ALPHA, plan=plan, interpret=True)
    return triton.mixture(x, logits, live, experts, residual, **how)


WIDTHS = {"triton": dict(embed=160, ffn=96), "mosaic": dict(embed=192, ffn=128)}


@pytest.fixture(scope="module")
def of_layout():
    # D = 160 and F = 96: 5 and 3 blocks, so every step of K and every tile of columns has a tail.
    return {layout: random_experts(20, **widths) for layout, widths in WIDTHS.items()}


@pytest.fixture
def experts(of_layout):
    return of_layout["triton"]


def some_rows(seed, layout, tokens=7):
    return random_rows(seed, tokens, embed=WIDTHS[layout]["embed"])


@pytest.mark.parametrize("layout, plan", [*BOTH, ("triton", JOINED), ("mosaic", PLAIN)])
def test_kernels_equal_float64(of_layout, layout, plan):
    experts = of_layout[layout]
    x, ids, weights = some_rows(21, layout)
    got = interpreted(x, ids, weights, experts.to_layout(layout), plan=plan)
    assert got.shape == x.shape
    assert relative_error(got, in_float64(x, ids, weights, experts)) < BFLOAT16


@pytest.mark.parametrize("layout, plan", BOTH)
def test_the_mixture_equals_float64(of_layout, layout, plan):
    """Choice, experts and residual; a row of padding, one of ties, one whose logits hold a NaN."""
    rng = np.random.default_rng(28)
    x, _, _ = some_rows(28, layout)
    lanes = of_layout[layout].to_layout(layout)
    logits = jnp.asarray(rng.normal(size=(7, 5)), jnp.float32).at[5].set(0.5)
    residual = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    live = jnp.arange(7) != 3
    clean = np.asarray(mixed(x, logits, live, lanes, residual, plan=plan))
    ids, weights = top_k(logits, 4)
    assert ids[5].tolist() == [0, 1, 2, 3]
    want = np.asarray(residual) + in_float64(
        x, jnp.where(live[:, None], ids, -1), weights, of_layout[layout]
    )
    assert relative_error(clean, want) < BFLOAT16
    np.testing.assert_array_equal(clean[3], residual[3])
    # Padding may hold anything; a NaN in the logits or in x stays in its row.
    spoilt = logits.at[1, 2].set(jnp.nan).at[3].set(jnp.nan)
    got = np.asarray(mixed(x.at[6].set(jnp.nan), spoilt, live, lanes, residual, plan=plan))
    assert np.isnan(got[[1, 6]]).all()
    np.testing.assert_array_equal(got[[0, 2, 3, 4, 5]], clean[[0, 2, 3, 4, 5]])


CANDIDATES = {plan for n in (1, 32) for plan in candidates(shapes.experts("20b", n), "NVIDIA H200")}


@pytest.mark.slow
@pytest.mark.parametrize("plan", sorted(CANDIDATES, key=repr), ids=range(len(CANDIDATES)))
def test_candidates_equal_float64(experts, plan):
    x, ids, weights = random_rows(29, 3)
    got = interpreted(x, ids, weights, experts.to_layout("triton"), plan=plan)
    assert relative_error(got, in_float64(x, ids, weights, experts)) < BFLOAT16


@pytest.mark.parametrize("layout, plan", BOTH)
def test_ids_that_are_not_here_and_rows_that_are_nan(of_layout, layout, plan):
    x, ids, weights = some_rows(22, layout)
    lanes = of_layout[layout].to_layout(layout)
    nowhere = jnp.array([[-1, 5, BIG, -BIG]] * 7, jnp.int32)
    out = interpreted(x, nowhere, weights.at[0].set(jnp.nan), lanes, plan=plan)
    assert (np.asarray(out) == 0).all()
    ids = ids.at[2].set(jnp.arange(4))
    clean = np.asarray(interpreted(x, ids, weights, lanes, plan=plan))
    got = np.asarray(interpreted(x.at[2].set(jnp.nan), ids, weights, lanes, plan=plan))
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


@pytest.mark.parametrize("layout, plan", BOTH)
def test_a_rows_bits_do_not_depend_on_the_others(of_layout, layout, plan):
    x, ids, weights = some_rows(24, layout)
    lanes = of_layout[layout].to_layout(layout)
    got = np.asarray(interpreted(x, ids, weights, lanes, plan=plan))
    order = np.array([5, 2, 0, 3, 6, 1, 4])
    moved = interpreted(x[order], ids[order], weights[order], lanes, plan=plan)
    np.testing.assert_array_equal(np.asarray(moved), got[order])
    other = interpreted(x.at[1:].set(0.5), ids.at[1:].set(3), weights, lanes, plan=plan)
    np.testing.assert_array_equal(np.asarray(other)[0], got[0])


@pytest.mark.parametrize("layout, plan", [("triton", ROW), ("mosaic", FEW)])
def test_wide_scales_take_the_exact_path(layout, plan):
    experts = random_experts(25, low=129, high=134, **WIDTHS[layout])
    x, ids, weights = some_rows(26, layout)
    got = interpreted(x, ids, weights, experts.to_layout(f"{layout}_wide"), plan=plan)
    assert relative_error(got, in_float64(x, ids, weights, experts)) < BFLOAT16


@pytest.mark.parametrize("wide", [False, True])
def test_words_hold_the_scales_of_four_places(wide):
    """The same factors as from lanes of two, for every byte in every place."""
    most = 256 if wide else 129
    bytes_ = np.arange(most)
    for place in range(4):
        other = (bytes_ * 7 + 3) % most  # in the other places
        word = bytes_ << 8 * place
        word |= sum(other << 8 * p for p in range(4) if p != place)
        how = dict(wide=wide, interpret=True)
        got = scale_of_word(jnp.asarray(word, jnp.uint32), place, **how)
        want = scale_of(jnp.asarray(bytes_, jnp.uint16), 0, **how)
        np.testing.assert_array_equal(
            np.asarray(got).view(np.uint16), np.asarray(want).view(np.uint16)
        )


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
    fragment = to_order(x[:, :128], "fragment")
    assert fragment[0, 32 * 3 + 8 * 2 + 4 * 1 + 2 * 0 + 1] == 32 * 3 + 16 * 1 + 8 * 0 + 2 * 2 + 1
    np.testing.assert_array_equal(np.sort(fragment), x[:, :128])
    for order, there in (("chunked", chunked), ("joined", joined), ("fragment", fragment)):
        columns = jnp.arange(128)
        np.testing.assert_array_equal(there[:, place_of(columns, order)], x[:, columns])


def test_other_activations_are_refused(experts):
    x, ids, weights = random_rows(27, 2, dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="float32"):
        interpreted(x, ids, weights, experts.to_layout("triton"), plan=TILES)


def layer(x, logits, live, experts, backend):
    how = dict(chosen=4, limit=LIMIT, alpha=ALPHA, backend=backend)
    return mixture(x, logits, live, experts, x, **how)


def abstract(problem: shapes.Experts, layout: str):
    struct = jax.ShapeDtypeStruct
    e, d, f = problem.experts, problem.embed, problem.ffn
    stored = ExpertWeights(
        layout="checkpoint",
        gate_up_blocks=struct((e, 2 * f, d // 32, 16), jnp.uint8),
        gate_up_scales=struct((e, 2 * f, d // 32), jnp.uint8),
        gate_up_bias=struct((e, 2 * f), jnp.bfloat16),
        down_blocks=struct((e, d, f // 32, 16), jnp.uint8),
        down_scales=struct((e, d, f // 32), jnp.uint8),
        down_bias=struct((e, d), jnp.bfloat16),
    )
    experts = jax.eval_shape(lambda experts: experts.to_layout(layout), stored)
    x = struct((problem.tokens, d), jnp.bfloat16)
    logits, live = struct((problem.tokens, e), jnp.float32), struct((problem.tokens,), jnp.bool_)
    return x, logits, live, experts


def lowered(model: str, tokens: int, layout: str, backend: str | None) -> str:
    with device.ahead_of_time():
        given = abstract(shapes.experts(model, tokens), layout)
        traced = jax.jit(layer, static_argnums=4).trace(*given, backend)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


TRITON = r"@__gpu\$xla.gpu.triton.*?name = \"(\w+)\""


@pytest.mark.parametrize("layout", ["triton", "mosaic"])
@pytest.mark.parametrize("model, tokens", [("20b", 1), ("20b", 32), ("120b", 8), ("120b", 2048)])
def test_kernels_lower_for_cuda_at_the_real_shapes(model, tokens, layout):
    text = lowered(model, tokens, layout, "triton")
    assert re.findall(TRITON, text) == LAUNCHES[tokens]


LAUNCHES = {
    1: ["experts_gate_up_row", "experts_down_row"],
    8: ["routing_route", "experts_gate_up", "experts_down", "experts_combine"],
    32: ["routing_route", "experts_gate_up", "experts_down", "experts_combine"],
    2048: ["routing_top_k", "routing_count", "routing_place"]
    + ["experts_gate_up", "experts_down", "experts_combine"],
}


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs jax 0.11's Mosaic GPU")
def test_many_rows_take_the_mosaic_kernels_of_the_same_layout():
    few = lowered("20b", 8, "mosaic", None)
    assert re.findall(TRITON, few) == LAUNCHES[8]
    assert "mosaic_gpu" not in few
    many = lowered("20b", 2048, "mosaic", None)
    assert re.findall(TRITON, many) == LAUNCHES[2048][:3] + ["experts_sort", "experts_combine"]
    assert len(re.findall("@mosaic_gpu_v2", many)) == 2


def shared_bytes(shape: Shape, rows: int, layout: str) -> int:
    """Of the pipeline: each stage holds x, both planes' lanes and the scales of one step."""
    depth = shape.groups * 32
    cols = shape.cols * shape.parts
    x = rows * depth * 2
    lanes = 2 * cols * (depth // 4) * 2
    # A scale for each lane; of fragments a word for each pair of rows and two blocks.
    scales = cols * shape.groups * 2 * (shape.lanes if layout == "triton" else 1)
    return shape.stages * (x + lanes + scales)


@pytest.mark.parametrize("layout", ["triton", "mosaic"])
def test_every_plan_fits_into_shared_memory(layout):
    for problem in shapes.EXPERTS:
        # What one program may have: 227 KB on Hopper, 99 KB on a desktop card.
        for kind, most in (("NVIDIA H200", 232448), ("NVIDIA GeForce RTX 4090", 101376)):
            sizes = (problem.tokens, problem.chosen, problem.experts, problem.embed, problem.ffn)
            plan = choose_plan(*sizes, kind, layout)
            for shape, choices in ((plan.gate_up, 1), (plan.down, 4 if plan.direct else 1)):
                whole = dataclasses.replace(shape, cols=shape.cols * choices)
                assert shared_bytes(whole, plan.rows, layout) <= most, (problem.name, kind, shape)
                assert whole.cols * whole.parts >= 16 * shape.warps
