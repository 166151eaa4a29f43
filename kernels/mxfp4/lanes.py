"""The GPU kernels' layout of an MXFP4 matrix: 16-bit lanes, rows in pairs, rows contiguous.

A matrix of N = 2 R rows and K = 32 G columns becomes

    lanes  uint16 [2, G, 8, R]     four weights each, of one row and one block
    scales uint16 [G, R]           the scale bytes of two rows

Rows are split into two planes: plane 0 holds the rows 0 .. R-1 of the order that the caller gives,
plane 1 the others; row r of both shares a scale lane (low byte plane 0, high byte plane 1). For
gate_up the planes are gate and up, so that one program holds both and can gate.

    lane j of block g holds the columns 32 g + j, + 8, + 16, + 24 at places 0, 1, 2, 3

so a tile of lanes at one place meets runs of 8 consecutive columns of the activations (16 bytes).

Inside a lane the bits of a nibble s e1 e0 m sit where a mask and a shift make a bfloat16 of them,
sign at bit 15 and the rest at bits 8..6, worth value * 2**-126:

    bit    15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0
    place  0s  3s  3e1 1s  3e0 3m  2s 0e1 0e0  0m 1e1 1e0  1m 2e1 2e0  2m

    place 0: lane & 0x81C0      place 1: lane << 3 & 0x81C0      place 2: lane << 6 & 0x81C0
    place 3: (lane << 1 & 0x8000) | (lane >> 5 & 0x0100) | (lane >> 4 & 0x00C0)

Three translates of the pattern fit into 16 bits, a fourth does not: hence place 3.
"""

import jax.numpy as jnp
from jaxtyping import Array, UInt8, UInt16

from .codec import BLOCK

LANES = BLOCK // 4  # of a block
PLACES = 4
# Bit of the lane for each bit of the nibble, lowest first (m, e0, e1, s), by place.
BITS = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 11, 13, 14))
# The fast kernels fold 2**126 into a bfloat16 scale, then 2 ** (byte - 1): finite up to 128.
FAST_SCALE = 128


def has_wide_scales(scales: UInt8[Array, "*batch G"]) -> bool:
    """Whether a byte is too large for the fast kernels. Reads the values: call it at load."""
    return bool((jnp.asarray(scales) > FAST_SCALE).any())


def to_lanes(
    blocks: UInt8[Array, "*batch N G 16"], scales: UInt8[Array, "*batch N G"]
) -> tuple[UInt16[Array, "*batch 2 G 8 R"], UInt16[Array, "*batch G R"]]:
    """From the checkpoint's bytes; `from_lanes` is the exact inverse.

    Raises:
        ValueError: where the number of rows is odd.
    """
    *batch, rows, groups = scales.shape
    if rows % 2:
        raise ValueError(f"lanes pair rows, so their number is even; got {rows}.")
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).astype(jnp.uint16)
    codes = codes.reshape(*batch, 2, rows // 2, groups, PLACES, LANES)
    lanes = jnp.zeros(codes.shape[:-2] + (LANES,), jnp.uint16)
    for place, bits in enumerate(BITS):
        for source, target in enumerate(bits):
            lanes |= ((codes[..., place, :] >> source) & 1) << target
    pairs = scales.reshape(*batch, 2, rows // 2, groups).astype(jnp.uint16)
    pairs = pairs[..., 0, :, :] | (pairs[..., 1, :, :] << 8)
    return jnp.moveaxis(lanes, -3, -1), jnp.swapaxes(pairs, -1, -2)


def from_lanes(
    lanes: UInt16[Array, "*batch 2 G 8 R"], scales: UInt16[Array, "*batch G R"]
) -> tuple[UInt8[Array, "*batch N G 16"], UInt8[Array, "*batch N G"]]:
    """The checkpoint's bytes back: `from_lanes(*to_lanes(b, s))` is (b, s)."""
    *batch, _, groups, _, half = lanes.shape
    lanes = jnp.moveaxis(lanes, -1, -3)  # [*batch, 2, R, G, 8]
    places = []
    for bits in BITS:
        code = jnp.zeros(lanes.shape, jnp.uint16)
        for target, source in enumerate(bits):
            code |= ((lanes >> source) & 1) << target
        places.append(code)
    codes = jnp.stack(places, axis=-2).reshape(*batch, 2 * half, groups, BLOCK // 2, 2)
    blocks = codes[..., 0] | (codes[..., 1] << 4)
    pairs = jnp.swapaxes(scales, -1, -2)
    bytes_ = jnp.stack([pairs & 255, pairs >> 8], axis=-3).reshape(*batch, 2 * half, groups)
    return blocks.astype(jnp.uint8), bytes_.astype(jnp.uint8)
