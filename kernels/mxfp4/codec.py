"""Decode and encode MXFP4 with integers, so that every backend gives the same bits.

Floating-point decoding would be shorter and wrong: XLA's CPU backend flushes subnormals to zero,
and the scale bytes 0 and 1 make subnormal values (0.5 * 2**-127 is 2.9e-39); `exp2` is not exact at
127 either.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN_SCALE = 255

# The seven places where |x| / scale passes to the next code, as (power of two, quarters of it above
# one, whether the place itself rounds up). Ties go to the even code: 0.25 down, 0.75 up, 1.25 down.
THRESHOLDS = (
    (-2, 0, False),
    (-1, 2, True),
    (0, 1, False),
    (0, 3, True),
    (1, 1, False),
    (1, 3, True),
    (2, 1, False),
)


def _decode_bits(codes: Array, scales: Array) -> Array:
    """bfloat16 bits, as uint16, of nibbles times 2 ** (scale - 127); both int32, broadcastable."""
    magnitude = codes & 7
    # code >= 2 is (1 + m/2) * 2**(e - 1) with e = code >> 1, m = code & 1; code 1 is 2**-1.
    half = jnp.where(magnitude >= 2, magnitude & 1, 0)
    exponent = scales + jnp.where(magnitude >= 2, (magnitude >> 1) - 1, -1)  # biased; -1 .. 257
    normal = (exponent << 7) | (half << 6)
    subnormal = ((1 << 7) | (half << 6)) >> jnp.clip(1 - exponent, 0, 2)
    bits = jnp.where(exponent >= 1, normal, subnormal)
    bits = jnp.where(exponent >= 255, 0x7F80, bits)  # infinity
    bits = jnp.where(magnitude == 0, 0, bits)
    bits = jnp.where(scales == NAN_SCALE, 0x7FC0, bits)
    return (bits | ((codes & 8) << 12)).astype(jnp.uint16)


def decode(
    blocks: UInt8[Array | np.ndarray, "*batch G 16"],
    scales: UInt8[Array | np.ndarray, "*batch G"],
    dtype: DTypeLike = jnp.bfloat16,
) -> Float[Array, "*batch K"]:
    """The values, K = 32 G of them, exact in bfloat16 and float32 for every code and scale byte.

    Scale byte 255 is NaN for the whole block, as the OCP format says (OpenAI's torch loader reads
    it as 2**128). 6 * 2**126 and 6 * 2**127 are infinite in both types.

    Raises:
        ValueError: for another dtype, or where the shapes do not belong together.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ValueError(f"MXFP4 decodes exactly to bfloat16 or float32, not to {dtype}.")
    blocks, scales = jnp.asarray(blocks), jnp.asarray(scales)
    if blocks.shape != (*scales.shape, BLOCK // 2):
        raise ValueError(
            f"blocks must be scales' shape + (16,); got {blocks.shape} and {scales.shape}."
        )
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).astype(jnp.int32)  # [..., G, 16, 2]
    bits = _decode_bits(codes, scales.astype(jnp.int32)[..., None, None])
    bits = bits.reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)
    if dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def encode(
    values: Float[Array | np.ndarray, "*batch K"],
) -> tuple[UInt8[Array, "*batch G 16"], UInt8[Array, "*batch G"]]:
    """Quantise with the OCP rule: scale 2 ** (floor(log2(largest magnitude)) - 2), nearest code.

    Ties go to the even code, magnitudes above 6 scales become 6 (so 6.5 and 7 do), the sign of zero
    is kept. The scale byte is at least 0; a block of zeros gets byte 0. A block with an infinity or
    a NaN gets byte 255 and decodes to NaN. `decode(*encode(v)) == v` for every v that `decode` can
    give, NaN and infinity apart.

    Done on the bits of the float32 values: equal on every backend, subnormals included.

    Raises:
        ValueError: where K is not a multiple of 32.
    """
    values = jnp.asarray(values)
    if values.shape[-1] % BLOCK:
        raise ValueError(f"MXFP4 blocks hold 32 values; the last axis of {values.shape} does not.")
    if values.dtype == jnp.bfloat16:  # by bits: a conversion may flush subnormals
        bits = jax.lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.uint32) << 16
    else:
        bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    bits = bits.reshape(*values.shape[:-1], values.shape[-1] // BLOCK, BLOCK)
    magnitude = (bits & 0x7FFFFFFF).astype(jnp.int32)  # ordered as the floats are
    largest = magnitude.max(axis=-1, keepdims=True) >> 23
    scale = jnp.maximum(largest - 2, 0)
    code = jnp.zeros_like(magnitude)
    for power, quarters, rounds_up in THRESHOLDS:
        exponent = scale + power
        significand = (1 << 23) | (quarters << 21)
        threshold = jnp.where(
            exponent >= 1,
            (exponent << 23) | (quarters << 21),
            significand >> jnp.clip(1 - exponent, 0, 3),
        )
        code += (magnitude >= threshold if rounds_up else magnitude > threshold).astype(jnp.int32)
    code |= (bits >> 31).astype(jnp.int32) << 3
    broken = largest == 255
    code, scale = jnp.where(broken, 0, code), jnp.where(broken, NAN_SCALE, scale)
    code = code.astype(jnp.uint8).reshape(*code.shape[:-1], BLOCK // 2, 2)
    return code[..., 0] | (code[..., 1] << 4), scale[..., 0].astype(jnp.uint8)
