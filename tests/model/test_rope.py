"""Golden values: YaRN of gpt-oss worked out in float64 from the paper's formulas."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY

from gptoss_jax import rope
from gptoss_jax.config import Config

REAL = Config.gpt_oss_20b()


@pytest.mark.parametrize(
    "channel, frequency",
    [
        (0, 1.0),
        (1, 0.6890443059),
        (8, 5.081327482e-2),
        (9, 3.170569618e-2),
        (10, 1.933500113e-2),
        (12, 6.794959490e-3),
        (13, 3.860359317e-3),
        (16, 4.564839192e-4),
        (17, 1.293187012e-4),  # 2.2795e-4 where the correction range is rounded
        (18, 3.830881237e-5),
        (24, 4.099978482e-6),
        (31, 3.023511428e-7),
    ],
)
def test_frequencies(channel, frequency):
    assert rope.inverse_frequencies(REAL)[channel] == pytest.approx(frequency, rel=1e-9)


def test_concentration():
    assert rope.concentration(REAL) == pytest.approx(1.3465735902799727, rel=1e-15)
    plain = dataclasses.replace(REAL, rope_factor=1.0)
    assert rope.concentration(plain) == 1.0
    np.testing.assert_allclose(
        rope.inverse_frequencies(plain), 150_000 ** (-np.arange(32) / 32), rtol=1e-12
    )


def test_truncation_is_honoured():
    rounded = dataclasses.replace(REAL, rope_truncate=True)
    assert rope.inverse_frequencies(rounded)[17] == pytest.approx(2.2795e-4, rel=1e-4)


@pytest.mark.parametrize("context, fast, ends", [(128, 32.0, (0, 8.09)), (2**40, 1e8, (20.05, 63))])
def test_the_correction_range_stays_within_the_head(context, fast, ends):
    """As in transformers: from channel 0, up to H - 1 (not H/2 - 1)."""
    config = dataclasses.replace(REAL, rope_original_context=context, rope_beta_fast=fast)
    channels = np.arange(32)
    low, high = (
        32 * math.log(context / (turns * 2 * math.pi)) / math.log(150_000) for turns in (fast, 1.0)
    )
    assert low < 0 or high > 63
    low, high = max(low, 0), min(high, 63)
    assert (low, high) == pytest.approx(ends, abs=0.05)
    ramp = np.clip((channels - low) / (high - low), 0, 1)
    plain = 150_000 ** (-channels / 32)
    want = plain * (1 - ramp) + plain / 32 * ramp
    np.testing.assert_allclose(rope.inverse_frequencies(config), want, rtol=1e-12)


def test_halves_turn_together_and_every_position_turns_once():
    config = dataclasses.replace(TINY, rope_factor=1.0)
    x = jnp.zeros((1, 3, 2, 10)).at[..., 0].set(1.0)
    out = rope.rotate(x, *rope.table(config, jnp.array([[0, 1, 2]])))
    want = np.zeros((3, 10))
    want[:, 0], want[:, 5] = np.cos([0, 1, 2]), np.sin([0, 1, 2])  # channel 0 turns with H/2
    np.testing.assert_allclose(out[0, :, 1], want, atol=1e-6)


def test_bfloat16_is_turned_in_float32_and_rounded_once():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 3, 2, 10)), jnp.bfloat16)
    turn = rope.table(TINY, jnp.array([[0, 7, 300]]))
    out = rope.rotate(x, *turn)
    assert out.dtype == jnp.bfloat16
    want = rope.rotate(x.astype(jnp.float32), *turn)
    np.testing.assert_array_equal(out, want.astype(jnp.bfloat16))


def test_length_grows_by_the_concentration_everywhere():
    positions = jnp.array([[0, 1, 4095, 4096, 4097, 131_071]])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 3, 64)), jnp.float32)
    out = rope.rotate(x, *rope.table(REAL, positions))
    ratio = jnp.linalg.norm(out, axis=-1) / jnp.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(ratio, 1.3465735902799727, rtol=1e-5)


def test_positions_are_not_rounded():
    """bfloat16 would make 257 of 256 and 1001 of 1000."""
    cos, sin = rope.table(REAL, jnp.array([[257, 1001, 131_071]]))
    angle = np.array([257, 1001, 131_071])[:, None] * rope.inverse_frequencies(REAL)
    # float32 angles: half an ulp of 131071 is 4e-3.
    np.testing.assert_allclose(cos[0], np.cos(angle) * rope.concentration(REAL), atol=6e-3)
    np.testing.assert_allclose(sin[0, :2], np.sin(angle[:2]) * rope.concentration(REAL), atol=1e-4)
    assert math.isclose(float(cos[0, 0, 0]), math.cos(257) * 1.34657359, abs_tol=1e-5)
