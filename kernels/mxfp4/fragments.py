"""An MXFP4 matrix as the registers of Hopper's tensor cores want it: no thread needs another's.

`wgmma` can read its left operand, 64 rows by 16 columns, from registers, in a fixed order: thread
t = 32 w + 4 g + c of a warpgroup (warp w, eight rows g, four threads c a row) holds rows 16 w + g
and 16 w + g + 8, columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9. A matrix of N = 64 T rows and
K = 64 S columns becomes

    lanes  uint16 [T, S, 4, 256]   of w, then g, c, i, v: four weights each
    scales uint16 [T, S, 64]       of w, then g, b: the scale bytes of two rows

so a step of 64 columns of a tile is 2048 + 128 bytes, each contiguous, for one bulk copy; a thread's
lanes are one 16-byte load, its scales one word.

Rows of a tile are dealt in pairs, so that one thread has both of them in its accumulators:

    row 16 w + g + 8 r of the fragment is row 64 t + 16 w + 2 g + r of the matrix

Of gate_up, whose rows are g0 u0 g1 u1 ..., that is gate and up of one hidden value; of down, two
values next to each other in memory. Bits of a lane are those of `mxfp4.lanes`, and its places
p = 2 h + r are row r of the pair and column half h:

    place p of lane (w, g, c, i, v): row 64 t + 16 w + 2 g + r, column 64 s + 16 i + 8 h + 2 c + v
    scale byte r of lane (w, g, b): row 64 t + 16 w + 2 g + r, block 2 s + b

Two lanes v = 0, 1 make a word; four masks and shifts of it are the four registers that `wgmma`
wants, in its order. The Triton kernels take a lane as two rows of two columns (expert_matmul.packed).
"""

import jax.numpy as jnp
from jaxtyping import Array, UInt8, UInt16

from .codec import BLOCK, decode
from .lanes import BITS

ROWS = 64  # of a tile: what one wgmma of one warpgroup covers
DEPTH = 64  # columns of a step: a 128-byte row of activations


def to_fragments(
    blocks: UInt8[Array, "*batch N G 16"], scales: UInt8[Array, "*batch N G"]
) -> tuple[UInt16[Array, "*batch T S 4 256"], UInt16[Array, "*batch T S 64"]]:
    """From the checkpoint's bytes; `from_fragments` is the exact inverse.

    Raises:
        ValueError: where N or K = 32 G is no multiple of 64.
    """
    *batch, rows, groups = scales.shape
    if rows % ROWS or groups % (DEPTH // BLOCK):
        raise ValueError(
            f"fragments are {ROWS} rows by {DEPTH} columns; got {rows} by {groups * BLOCK}."
        )
    lead = len(batch)
    tiles, steps = rows // ROWS, groups * BLOCK // DEPTH
    # Bytes until they lie where they should: half of the memory that lanes would take.
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1)
    #                                   0      1  2  3   4     5  6  7  8
    codes = codes.reshape(*batch, tiles, 4, 8, 2, steps, 4, 2, 4, 2)  # t w g r s i h c v
    codes = _permuted(codes, lead, (0, 4, 1, 2, 7, 5, 8, 6, 3))  # t s w g c i v h r
    codes = codes.reshape(*codes.shape[:-2], 4)  # ... p
    lanes = jnp.zeros(codes.shape[:-1], jnp.uint16)
    for place, bits in enumerate(BITS):
        for source, target in enumerate(bits):
            lanes |= ((codes[..., place] >> source) & 1).astype(jnp.uint16) << target
    pairs = scales.astype(jnp.uint16).reshape(*batch, tiles, 4, 8, 2, steps, 2)  # t w g r s b
    pairs = _permuted(pairs, lead, (0, 4, 1, 2, 5, 3)).reshape(*batch, tiles, steps, 64, 2)
    pairs = pairs[..., 0] | (pairs[..., 1] << 8)
    return lanes.reshape(*batch, tiles, steps, 4, 256), pairs


def from_fragments(
    lanes: UInt16[Array, "*batch T S 4 256"], scales: UInt16[Array, "*batch T S 64"]
) -> tuple[UInt8[Array, "*batch N G 16"], UInt8[Array, "*batch N G"]]:
    """The checkpoint's bytes back: `from_fragments(*to_fragments(b, s))` is (b, s)."""
    *batch, tiles, steps, _ = scales.shape
    lead = len(batch)
    lanes = lanes.reshape(*batch, tiles, steps, 4, 8, 4, 4, 2)  # t s w g c i v
    places = []
    for bits in BITS:
        code = jnp.zeros(lanes.shape, jnp.uint16)
        for target, source in enumerate(bits):
            code |= ((lanes >> source) & 1) << target
        places.append(code.astype(jnp.uint8))
    codes = jnp.stack(places, axis=-1).reshape(*lanes.shape, 2, 2)  # t s w g c i v h r
    codes = _permuted(codes, lead, (0, 2, 3, 8, 1, 5, 7, 4, 6))  # t w g r s i h c v
    rows, groups = tiles * ROWS, steps * DEPTH // BLOCK
    codes = codes.reshape(*batch, rows, groups, BLOCK // 2, 2)
    blocks = codes[..., 0] | (codes[..., 1] << 4)
    bytes_ = jnp.stack([scales & 255, scales >> 8], axis=-1).astype(jnp.uint8)
    bytes_ = bytes_.reshape(*batch, tiles, steps, 4, 8, 2, 2)  # t s w g b r
    bytes_ = _permuted(bytes_, lead, (0, 2, 3, 5, 1, 4)).reshape(*batch, rows, groups)
    return blocks, bytes_


def decode_tile(lanes: UInt16[Array, "4 256"], scales: UInt16[Array, " 64"]) -> Array:
    """bfloat16 [64, 64] of one tile's step, in the fragment's order of rows.

    The definition of what the kernel's instructions do to a word; kernels interpreted on a CPU
    call it in their place.
    """
    blocks, bytes_ = from_fragments(lanes[None, None], scales[None, None])
    values = decode(blocks, bytes_, jnp.bfloat16)
    return jnp.swapaxes(values.reshape(4, 8, 2, DEPTH), 1, 2).reshape(ROWS, DEPTH)


def _permuted(x: Array, lead: int, axes: tuple[int, ...]) -> Array:
    return x.transpose(*range(lead), *(lead + axis for axis in axes))
