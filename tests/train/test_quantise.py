"""Rounding of experts in training: what export will write, with the gradient passed through."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from train_cases import SMALL, network, parameters

from gptoss_jax.kernels.mxfp4 import MAGNITUDES, decode, encode
from gptoss_jax.train.quantise import is_expert_weight, rounded, straight_through

floats = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
rounded_ = jax.jit(rounded)


def by_loops(block):
    """The documented rule on one block of 32, in float64."""
    largest = np.abs(block).max()
    if largest == 0:
        return np.copysign(0.0, block)
    # frexp: largest = m 2**e with m in [0.5, 1); the scale byte cannot go below 2**-127.
    scale = 2.0 ** max(np.frexp(largest)[1] - 1 - 2, -127)
    out = []
    for value in block:
        x = min(abs(value) / scale, 6.0)
        gaps = [abs(x - m) for m in MAGNITUDES]
        near = [i for i, gap in enumerate(gaps) if gap == min(gaps)]
        code = next(i for i in near if len(near) == 1 or i % 2 == 0)
        out.append(np.copysign(MAGNITUDES[code] * scale, value))
    return np.array(out)


@settings(deadline=None, max_examples=60)
@given(st.lists(floats, min_size=32, max_size=32), st.integers(-140, 100))
def test_rounding_follows_the_rule(values, exponent):
    block = np.array(values, np.float32)
    shrunk = np.ldexp(block / np.float32(max(1.0, np.abs(block).max())), exponent).astype(
        np.float32
    )
    for case in (block if np.abs(block).max() < 2.0**125 else shrunk, shrunk):
        same_bits(rounded_(jnp.asarray(case[None])), by_loops(case.astype(float))[None])


def same_bits(got, expected):
    """By bits: the sign of zero counts, and XLA's CPU backend takes subnormals for zero."""
    expected = np.asarray(expected).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), expected.view(np.uint32))


def test_every_tie_and_both_zeros():
    # MX06. Scale 1: magnitudes 0 0.5 1 1.5 2 3 4 6 have codes 0 to 7; ties go to the even code.
    x = np.zeros((1, 32), np.float32)
    x[0, :9] = [4, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0]
    even = np.zeros((1, 32))
    even[0, :9] = [4, 0, 1, 1, 2, 2, 4, 4, 0]
    same_bits(rounded_(jnp.asarray(x)), even)
    same_bits(rounded_(jnp.asarray(-x)), -even)


def test_the_smallest_scales():
    # From 2**-125 down the scale stays at byte 0, 2**-127, and less and less is left of the block.
    exponents = np.arange(-149, -118)
    x = np.zeros((len(exponents), 32), np.float32)
    x[:, 5], x[:, 6] = np.ldexp(1.0, exponents), np.ldexp(-0.75, exponents)
    _, scales = encode(jnp.asarray(x))
    assert scales[:, 0].tolist() == [max(0, e + 125) for e in exponents]
    same_bits(rounded_(jnp.asarray(x)), [by_loops(row) for row in x.astype(float)])


def test_idempotent_on_what_it_gives():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (50, 4, 16), dtype=np.uint8)
    scales = rng.integers(0, 252, (50, 4), dtype=np.uint8)
    values = decode(jnp.asarray(codes), jnp.asarray(scales), jnp.dtype("float32"))
    np.testing.assert_array_equal(np.asarray(rounded_(values)), np.asarray(values))


def test_error_is_at_most_a_third_of_the_block_s_largest_value():
    # Magnitudes lie in [4, 8) scales at the top: 8 saturates to 6 (25 %); below, half of a gap of 2
    # scales, at least a 4th of the largest again.
    x = np.random.default_rng(1).normal(size=(400, 64)).astype(np.float32)
    error = np.abs(np.asarray(rounded_(jnp.asarray(x))) - x).reshape(400, 2, 32)
    assert (error.max(-1) <= 0.25 * np.abs(x).reshape(400, 2, 32).max(-1)).all()


def test_zero_blocks_and_maxima():
    # MX06: the floor rule. amax 7 and 6.5 saturate to 6, nothing divides by zero.
    amax = [7.0, 6.5, 6.0, 5.0, 3.0, 0.75, 0.0]
    x = np.zeros((7, 32), np.float32)
    x[:, 3] = amax
    blocks, scales = encode(jnp.asarray(x))
    assert np.asarray(scales)[:6, 0].tolist() == [127, 127, 127, 127, 126, 124]
    assert not np.asarray(blocks)[6].any()
    # 5 lies between 4 and 6: the tie goes to the even code, 4.
    assert np.asarray(rounded_(jnp.asarray(x)))[:, 3].tolist() == [6, 6, 6, 4, 3, 0.75, 0]


def test_eager_jitted_and_bfloat16_agree():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(8, 96)), jnp.bfloat16)
    wide = rounded(x.astype(jnp.float32))
    np.testing.assert_array_equal(wide, rounded_(x.astype(jnp.float32)))
    np.testing.assert_array_equal(rounded_(x).astype(jnp.float32), wide)  # exact in bfloat16


def test_gradient_passes_straight_through():
    x = jnp.asarray(np.random.default_rng(3).normal(size=(4, 32)), jnp.float32)
    slope = jnp.arange(128.0, dtype=jnp.float32).reshape(4, 32)
    for on in (True, False):
        value, gradient = jax.value_and_grad(lambda w: (slope * straight_through(w, on)).sum())(x)  # noqa: B023
        np.testing.assert_array_equal(gradient, slope)
        seen = rounded(x) if on else x
        np.testing.assert_allclose(value, (slope * seen).sum(), rtol=1e-6)
    # The value is what export writes, to the bit: w + (r - w) would not be.
    np.testing.assert_array_equal(straight_through(x, True), rounded(x))


def test_experts_and_nothing_else_are_rounded():
    params = parameters(SMALL)
    model = network(SMALL, 24).model(params, quantised=jnp.bool_(True))
    expected = {
        name: rounded(x) if name.endswith(("experts.gate_up", "experts.down")) else x
        for name, x in params.items()
    }
    assert sum(map(is_expert_weight, params)) == 2 * SMALL.layers
    got = dict(zip(params, jax.tree.leaves(split(model)), strict=True))
    for name, x in expected.items():
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(x), err_msg=name)


def split(model):
    from flax import nnx

    return nnx.split(model)[1]
