"""Experts on any device: the definition against float64, the XLA forms against the definition."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import ALPHA, BIG, LIMIT, in_float64, random_experts, random_rows, relative_error

from gptoss_jax.kernels import device
from gptoss_jax.kernels.expert_matmul import (
    AXES,
    ExpertWeights,
    _checked,
    expert_matmul,
    layout_for,
    mixture,
    mosaic,
    swiglu,
)

# float32 sums of 160 and 96 terms; bfloat16 differs from float64 where a hidden value rounds over.
FLOAT32, BFLOAT16 = 2e-6, 2e-3


@functools.partial(jax.jit, static_argnames=("backend", "limit"))
def compute(x, ids, weights, experts, *, backend, limit=LIMIT):
    return expert_matmul(
        x, ids, weights, experts, limit=limit, alpha=ALPHA, backend=backend, out_dtype=jnp.float32
    )


@pytest.fixture(scope="module")
def experts():
    return random_experts()


@pytest.mark.parametrize(
    "gate, up, want",
    [
        (0, 0, 0),
        (1, 0, 0.845795766),
        (1, -1, 0),
        (1, 1, 1.69159153),
        (-1, 1, -0.308408468),
        (8, 0, 6.99995313),
        (7, 0, 6.99995313),
        (100, 100, 55.999625),
        (2, 8, 15.485269),
        (2, -8, -11.6139517),
        (-8, 1, -1.95328577e-5),  # a gate clamped below too would give -9.4e-5
        (-7, 1, -9.37433934e-5),
        (0.5, -9, -2.10233062),
    ],
)
def test_swiglu_golden(gate, up, want):
    got = swiglu(jnp.float32(gate), jnp.float32(up), limit=7.0, alpha=1.702)
    np.testing.assert_allclose(got, want, rtol=2e-5)


@pytest.mark.parametrize("limit", [7.0, None])
def test_swiglu_keeps_a_nan(limit):
    nan = jnp.float32(jnp.nan)
    for gate, up in ((nan, 1.0), (1.0, nan), (nan, nan)):
        assert np.isnan(swiglu(jnp.float32(gate), jnp.float32(up), limit=limit))


def test_swiglu_clamps_by_selection():
    """Pallas-Triton's minimum, maximum and clamp give the other operand for a NaN; XLA's do not,
    so that only the operations themselves show it here."""
    jaxpr = jax.make_jaxpr(functools.partial(swiglu, limit=7.0))(jnp.float32(1), jnp.float32(1))
    used = set(re.findall(r"= (\w+)", str(jaxpr)))
    assert "select_n" in str(jaxpr) and not used & {"min", "max", "clamp"}


def test_swiglu_without_a_limit_and_with_a_useless_one():
    assert float(swiglu(jnp.float32(100), jnp.float32(100), limit=None)) == pytest.approx(10100)
    with pytest.raises(ValueError, match="got 0"):
        swiglu(jnp.float32(1), jnp.float32(1), limit=0.0)


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, FLOAT32), (jnp.bfloat16, BFLOAT16)])
def test_reference_is_float64(experts, dtype, bound):
    x, ids, weights = random_rows(1, 9, dtype=dtype)
    want = in_float64(x, ids, weights, experts)
    assert relative_error(compute(x, ids, weights, experts, backend="reference"), want) < bound


def test_no_limit_does_not_clamp(experts):
    x, ids, weights = random_rows(2, 3, dtype=jnp.float32)
    want = in_float64(x, ids, weights, experts, limit=None)
    got = compute(x, ids, weights, experts, backend="xla", limit=None)
    assert relative_error(got, want) < FLOAT32
    assert relative_error(got, in_float64(x, ids, weights, experts)) > 0.03


@pytest.mark.parametrize("layout", ["checkpoint", "dense", "triton"])
@pytest.mark.parametrize("tokens", [1, 23])
def test_xla_equals_the_reference(experts, layout, tokens):
    # Dense: 23 tokens go through every expert, 1 through tiles.
    x, ids, weights = random_rows(tokens, tokens, dtype=jnp.float32)
    turned = experts.dense(jnp.float32) if layout == "dense" else experts.to_layout(layout)
    want = compute(x, ids, weights, experts, backend="reference")
    assert (
        relative_error(compute(x, ids, weights, turned, backend="xla"), np.asarray(want)) < FLOAT32
    )


def test_ids_that_are_not_here_add_nothing(experts):
    x, ids, weights = random_rows(3, 5, dtype=jnp.float32)
    for form in (experts, experts.dense(jnp.float32)):
        for backend in ("reference", "xla"):
            nowhere = jnp.array([[-1, 5, BIG, -BIG]] * 5, jnp.int32)
            out = compute(x, nowhere, weights.at[0].set(jnp.nan), form, backend=backend)
            assert (np.asarray(out) == 0).all()


def test_an_unchosen_expert_may_hold_nan(experts):
    x, ids, weights = random_rows(4, 23, dtype=jnp.float32)
    ids = jnp.where(ids == 2, 1, ids)
    want = compute(x, ids, weights, experts, backend="reference")
    spoilt = experts.gate_up_scales.at[2].set(255), experts.down_bias.at[2].set(jnp.nan)
    spoilt = dataclasses.replace(experts, gate_up_scales=spoilt[0], down_bias=spoilt[1])
    for form in (spoilt, spoilt.dense(jnp.float32)):
        for backend in ("reference", "xla"):
            got = compute(x, ids, weights, form, backend=backend)
            assert relative_error(got, np.asarray(want)) < FLOAT32


def test_a_nan_row_stays_one_row(experts):
    x, ids, weights = random_rows(5, 6, dtype=jnp.float32)
    ids = ids.at[2].set(jnp.arange(4))
    got = np.asarray(compute(x.at[2].set(jnp.nan), ids, weights, experts, backend="xla"))
    assert np.isnan(got[2]).all() and np.isfinite(np.delete(got, 2, axis=0)).all()


def test_every_pattern_of_empty_experts(experts):
    x, _, weights = random_rows(6, 7, dtype=jnp.float32)
    for pattern in range(1, 32):
        present = [e for e in range(5) if pattern >> e & 1]
        ids = jnp.asarray(np.resize(present, (7, 4)), jnp.int32)
        want = compute(x, ids, weights, experts, backend="reference")
        got = compute(x, ids, weights, experts, backend="xla")
        assert relative_error(got, np.asarray(want)) < FLOAT32, present


def test_a_rows_bits_do_not_depend_on_the_others(experts):
    x, ids, weights = random_rows(7, 8)
    got = np.asarray(compute(x, ids, weights, experts, backend="xla"))
    order = np.array([5, 2, 7, 0, 3, 6, 1, 4])
    moved = compute(x[order], ids[order], weights[order], experts, backend="xla")
    np.testing.assert_array_equal(np.asarray(moved), got[order])


def test_each_bias_counts_and_down_bias_is_weighted(experts):
    x, ids, weights = random_rows(8, 4, dtype=jnp.float32)
    ids = jnp.asarray([[0, 1, 2, 3]] * 4, jnp.int32)
    nothing = dataclasses.replace(
        experts, down_blocks=jnp.zeros_like(experts.down_blocks), down_bias=experts.down_bias
    )
    got = compute(x, ids, weights, nothing, backend="xla")
    want = np.asarray(weights) @ np.asarray(experts.down_bias[:4]).astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    base = compute(x, ids, weights, experts, backend="xla")
    for name in ("gate_up_bias", "down_bias"):
        without = dataclasses.replace(experts, **{name: jnp.zeros_like(getattr(experts, name))})
        assert not np.allclose(compute(x, ids, weights, without, backend="xla"), base)


def test_gradients_of_the_dense_forms_agree(experts):
    # float32 biases too: a gradient has its leaf's type, and bfloat16 would hide 1e-3.
    dense = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), experts.dense(jnp.float32))
    x, ids, weights = random_rows(9, 23, dtype=jnp.float32)

    def loss(backend, x, weights, dense):
        return jnp.sum(jnp.sin(compute(x, ids, weights, dense, backend=backend)))

    grads = {
        backend: jax.jit(jax.grad(functools.partial(loss, backend), argnums=(0, 1, 2)))(
            x, weights, dense
        )
        for backend in ("reference", "xla", "ragged")
    }
    for backend in ("xla", "ragged"):
        for got, want in zip(
            jax.tree.leaves(grads[backend]), jax.tree.leaves(grads["reference"]), strict=True
        ):
            assert relative_error(got, np.asarray(want)) < 1e-4


def test_ragged_equals_the_reference(experts):
    x, ids, weights = random_rows(10, 11, dtype=jnp.float32)
    dense = experts.dense(jnp.float32)
    want = compute(x, ids, weights, dense, backend="reference")
    assert (
        relative_error(compute(x, ids, weights, dense, backend="ragged"), np.asarray(want))
        < FLOAT32
    )


def test_layouts_turn_into_each_other_bit_for_bit():
    experts = random_experts(3, embed=64, low=0, high=255)
    for layout in ("triton_wide", "checkpoint"):
        turned = jax.jit(lambda e, to=layout: e.to_layout(to))(experts)
        turned.check()
        assert turned.leaves().keys() == AXES[layout].keys()
        for name, axes in AXES[layout].items():
            assert getattr(turned, name).ndim == len(axes)
        back = turned.to_checkpoint()
        for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(experts), strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="128"):
        experts.to_layout("triton")
    with pytest.raises(ValueError, match="packed"):
        experts.to_layout("dense")


def test_a_cut_of_the_checkpoint_turns_into_a_cut_of_the_lanes():
    experts = random_experts(4)
    whole = experts.to_layout("triton")

    def cut(weights, sizes):
        leaves = {}
        for name, leaf in weights.leaves().items():
            index = tuple(slice(None, sizes.get(axis)) for axis in AXES[weights.layout][name])
            leaves[name] = leaf[index]
        leaves["gate_up_bias"] = weights.gate_up_bias[:, :64]
        return ExpertWeights(layout=weights.layout, **leaves)

    # The first 32 of 96 ffn values: 64 rows of gate and up, one block of down's input.
    small = cut(experts, {"gate_up": 64, "ffn": 1}).to_layout("triton")
    lanes = cut(whole, {"gate_up": 32, "ffn": 1})
    for name in ("gate_up_blocks", "gate_up_scales", "down_blocks", "down_scales"):
        np.testing.assert_array_equal(getattr(small, name), getattr(lanes, name))


def test_the_mixture_is_choice_experts_and_residual(experts):
    x, _, _ = random_rows(12, 9)
    rng = np.random.default_rng(12)
    logits = jnp.asarray(rng.integers(-2, 3, (9, 5)), jnp.float32)  # ties
    residual = jnp.asarray(rng.normal(size=x.shape), jnp.bfloat16)
    live = jnp.arange(9) % 4 != 2
    how = dict(chosen=3, limit=LIMIT, alpha=ALPHA)
    got = np.asarray(mixture(x, logits, live, experts, residual, **how, backend="xla"))
    ids = jnp.argsort(-logits, axis=1, stable=True)[:, :3].astype(jnp.int32)
    weights = jax.nn.softmax(jnp.take_along_axis(logits, ids, axis=1), axis=1)
    ids = jnp.where(live[:, None], ids, -1)
    want = np.asarray(residual).astype(np.float64) + in_float64(x, ids, weights, experts)
    assert got.dtype == jnp.bfloat16
    # Rounded once: half of the last of 8 bits, and a hidden value that rounds the other way.
    off = np.abs(got.astype(np.float64) - want)
    assert (off <= 2**-9 * np.abs(want) + 2e-3 * np.abs(want - np.asarray(residual)).max()).all()
    np.testing.assert_array_equal(got[2], np.asarray(residual)[2])
    for chosen, row in ((0, logits), (6, logits), (3, logits[:, :4])):
        with pytest.raises(ValueError, match="5 experts"):
            mixture(x, row, live, experts, residual, **how | dict(chosen=chosen))


def test_what_runs_is_chosen_by_the_rows_that_an_expert_is_to_have():
    """8 of 32 experts see all of 32 rows: that is 4 rows an expert, not 16."""
    x, _, _ = random_rows(12, 32, dtype=jnp.bfloat16)
    packed = random_experts(12, experts=8)
    with device.ahead_of_time():
        lanes = packed.to_layout("triton")
        assert _checked(x, 4, lanes, None, 8) == _checked(x, 4, lanes, None, 32) == "triton"
        fragments = random_experts(12, experts=8, embed=192, ffn=64).to_layout("mosaic")
        x = jnp.zeros((32, 192), jnp.bfloat16)
        assert _checked(x, 4, fragments, None, 32) == "triton"
        assert not mosaic.pays(32, 4, 32) and mosaic.pays(32, 4, 8)
        if mosaic.runs_here():
            assert _checked(x, 4, fragments, None, 8) == "mosaic"
            assert layout_for() == "mosaic" and layout_for(cut=True) == "triton"
            assert layout_for(None, packed) == "triton"  # 160 columns are no whole tiles
    assert _checked(x.astype(jnp.float32), 4, fragments, None, 8) == "xla"


def test_refusals(experts):
    x, ids, weights = random_rows(11, 2)
    call = functools.partial(expert_matmul, limit=LIMIT, alpha=ALPHA)
    with pytest.raises(ValueError, match="width 64"):
        call(x[:, :64], ids, weights, experts)
    with pytest.raises(ValueError, match="dense"):
        call(x, ids, weights, experts, backend="ragged")
    with pytest.raises(ValueError, match="down_scales"):
        call(x, ids, weights, dataclasses.replace(experts, down_scales=None))
    if jax.default_backend() != "gpu":
        assert layout_for() == "checkpoint"
        with pytest.raises(NotImplementedError, match="osaic"):
            layout_for("mosaic")
        with pytest.raises(NotImplementedError, match="NVIDIA"):
            call(x, ids, weights, experts.to_layout("triton"), backend="triton")
