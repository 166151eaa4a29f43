"""Every code and every scale byte, by bits, against a table in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gptoss_jax.kernels import mxfp4

TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SIXTEEN = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8)
EVERY_CODE = np.concatenate([SIXTEEN, SIXTEEN[::-1]])


def by_table(blocks, scales):
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    with np.errstate(over="ignore"):
        values = TABLE[codes] * 2.0 ** (scales.astype(np.float64)[..., None] - 127)
        return values.reshape(*scales.shape[:-1], -1).astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_decode_is_exact_for_every_code_and_scale(dtype):
    # jax's CPU backend flushes float subnormals: scale bytes 0 and 1 are the reason for integers.
    scales = np.arange(255, dtype=np.uint8)[:, None]
    blocks = np.broadcast_to(EVERY_CODE, (255, 1, 16))
    got = np.asarray(jax.jit(lambda b, s: mxfp4.decode(b, s, dtype))(blocks, scales))
    want = by_table(blocks, scales).astype(dtype)
    bits = np.uint16 if dtype == jnp.bfloat16 else np.uint32
    np.testing.assert_array_equal(got.view(bits), want.view(bits))
    np.testing.assert_array_equal(want.astype(np.float32), by_table(blocks, scales))  # exact


def test_decode_golden_values():
    def one(code, scale):
        blocks, scales = np.full((1, 16), code, np.uint8), np.array([scale], np.uint8)
        return float(mxfp4.decode(blocks, scales, jnp.float32)[0])

    assert one(2, 126) == 0.5 and one(2, 134) == 128.0 and one(7, 128) == 12.0
    assert one(2, 254) == 2.0**127 and one(7, 252) == 1.5 * 2.0**127
    assert one(7, 253) == np.inf and one(7, 254) == np.inf
    bits = np.asarray(
        mxfp4.decode(np.full((1, 16), 1, np.uint8), np.zeros(1, np.uint8), jnp.float32)
    )
    assert bits.view(np.uint32)[0] == 1 << 21  # 2**-128, a subnormal


def test_scale_byte_255_is_nan_and_stays_in_its_block():
    blocks = np.zeros((2, 16), np.uint8) + EVERY_CODE
    got = np.asarray(mxfp4.decode(blocks, np.array([255, 127], np.uint8), jnp.float32))
    assert np.isnan(got[:32]).all() and np.isfinite(got[32:]).all()


def test_low_nibble_first_and_negative_zero():
    block = np.concatenate([SIXTEEN, np.zeros(8, np.uint8)])[None]
    got = np.asarray(mxfp4.decode(block, np.array([127], np.uint8), jnp.float32))
    np.testing.assert_array_equal(got[:16], TABLE)
    assert np.signbit(got[8])


def test_decode_refuses_inexact_types_and_wrong_shapes():
    with pytest.raises(ValueError, match="float16"):
        mxfp4.decode(np.zeros((1, 16), np.uint8), np.zeros(1, np.uint8), jnp.float16)
    with pytest.raises((ValueError, TypeError)):
        mxfp4.decode(np.zeros((2, 16), np.uint8), np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match="32"):
        mxfp4.encode(np.zeros(33, np.float32))


def test_encode_scale_is_the_floor_rule():
    values = np.zeros((7, 32), np.float32)
    values[:, 5] = [7, 6.5, 6, 5, 3, 0.75, 0]
    blocks, scales = mxfp4.encode(values)
    np.testing.assert_array_equal(np.asarray(scales)[:, 0], [127, 127, 127, 127, 126, 124, 0])
    decoded = np.asarray(mxfp4.decode(blocks, scales, jnp.float32))
    np.testing.assert_array_equal(decoded[:, 5], [6, 6, 6, 4, 3, 0.75, 0])


def nearest_by_table(values):
    """float64: the documented rule, ties to the even code."""
    blocks = values.astype(np.float64).reshape(-1, 32)
    most = np.abs(blocks).max(axis=1)
    scale = np.maximum(np.floor(np.log2(np.where(most > 0, most, 2.0**-130))) - 2 + 127, 0)
    ratio = np.abs(blocks) / 2.0 ** (scale - 127)[:, None]
    distance = np.abs(ratio[..., None] - TABLE[:8])
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # even codes win ties
    code = order[np.argmin(distance[..., order], axis=-1)] + 8 * np.signbit(blocks)
    return code, scale.astype(np.uint8)


@pytest.mark.parametrize("scale", [1.0, 1e-37, 3e-39, 1e37])
def test_encode_equals_the_rule_in_float64(scale):
    rng = np.random.default_rng(0)
    values = (rng.normal(size=(64, 32)) * scale).astype(np.float32)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 4.0], np.float32)
    values[0, :8], values[1, :8] = ties, -ties
    blocks, scales = jax.jit(mxfp4.encode)(values)
    codes = np.stack([np.asarray(blocks) & 15, np.asarray(blocks) >> 4], axis=-1).reshape(-1, 32)
    want_codes, want_scales = nearest_by_table(values)
    np.testing.assert_array_equal(np.asarray(scales)[:, 0], want_scales)
    np.testing.assert_array_equal(codes, want_codes)


def test_encode_keeps_every_decoded_value():
    scales = np.arange(253, dtype=np.uint8)[:, None]
    values = by_table(np.broadcast_to(EVERY_CODE, (253, 1, 16)), scales)
    again = mxfp4.decode(*mxfp4.encode(values), jnp.float32)
    np.testing.assert_array_equal(np.asarray(again).view(np.uint32), values.view(np.uint32))
    half = values.astype(jnp.bfloat16)  # exact, and its subnormals must survive
    again = mxfp4.decode(*mxfp4.encode(half), jnp.float32)
    np.testing.assert_array_equal(np.asarray(again).view(np.uint32), values.view(np.uint32))


def test_encode_marks_blocks_that_are_not_finite():
    values = np.ones((3, 32), np.float32)
    values[0, 3], values[1, 4] = np.nan, np.inf
    _, scales = mxfp4.encode(values)
    np.testing.assert_array_equal(np.asarray(scales)[:, 0], [255, 255, 125])


def test_lanes_invert_exactly_and_hold_what_they_say():
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (2, 6, 5, 16)).astype(np.uint8)
    scales = rng.integers(0, 256, (2, 6, 5)).astype(np.uint8)
    lanes, pairs = mxfp4.to_lanes(jnp.asarray(blocks), jnp.asarray(scales))
    assert lanes.shape == (2, 2, 5, 8, 3) and pairs.shape == (2, 5, 3)
    back = mxfp4.from_lanes(lanes, pairs)
    np.testing.assert_array_equal(np.asarray(back[0]), blocks)
    np.testing.assert_array_equal(np.asarray(back[1]), scales)
    # Lane j, place p of block g is column 32 g + 8 p + j; place 0 is the lane under the mask.
    lane = int(lanes[1, 1, 4, 3, 2])  # row 1 * 3 + 2, block 4, lane 3
    code = int(blocks[1, 5, 4, 1]) >> 4  # column 3 of the block
    assert (lane & 0x81C0) == ((code >> 3) << 15 | (code & 7) << 6)
    assert int(pairs[1, 4, 2]) == int(scales[1, 2, 4]) | int(scales[1, 5, 4]) << 8


def test_lanes_need_pairs_of_rows():
    with pytest.raises(ValueError, match="even"):
        mxfp4.to_lanes(jnp.zeros((3, 1, 16), jnp.uint8), jnp.zeros((3, 1), jnp.uint8))


def test_wide_scales_are_seen():
    assert not mxfp4.has_wide_scales(jnp.array([[0, 128]], jnp.uint8))
    assert mxfp4.has_wide_scales(jnp.array([[0, 129]], jnp.uint8))
