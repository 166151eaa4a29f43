"""An MXFP4 matrix as the registers of Hopper's tensor cores want it: no thread needs another's.

`wgmma` can read its left operand, 64 rows by 16 columns, from registers, in a fixed order: thread
t = 32 w + 4 g + c of a warpgroup (warp w, eight rows g, four threads c a row) holds rows 16 w + g
and 16 w + g + 8, columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9. A matrix of N = 64 T rows and
K = 64 S columns becomes

    lanes  uint16 [T, S, 4, 256]   of w, then g, c, i, h, v: four weights each
    scales uint32 [T, S, 32]       of w, then g: the scale bytes of two rows and two blocks

so a step of 64 columns of a tile is 2048 + 128 bytes, each contiguous, for one bulk copy; a
thread's lanes are one 16-byte load, its scales one word.

Rows of a tile are dealt in pairs, so that one thread has both of them in its accumulators:

    row 16 w + g + 8 r of the fragment is row 64 t + 16 w + 2 g + r of the matrix

Of gate_up, whose rows are g0 u0 g1 u1 ..., that is gate and up of one hidden value; of down, two
values next to each other in memory. Bits of a lane are those of `mxfp4.lanes`, and its places
p = 2 b + r are row r of the pair and block b of the two, so that every place has one scale a row:

    place p of lane (w, g, c, i, h, v):
        row 64 t + 16 w + 2 g + r, column 64 s + 32 b + 16 i + 8 h + 2 c + v
    scale byte p of word (w, g): row 64 t + 16 w + 2 g + r, block 2 s + b

Two lanes v = 0, 1 make a word; a mask and a shift of it for each place are four of the registers
that `wgmma` wants. The Triton kernels take a lane as two rows of two blocks, see `packed` of
expert_matmul.
"""

import jax.numpy as jnp
from jaxtyping import Array, UInt8, UInt16, UInt32

from .codec import BLOCK, decode
from .lanes import BITS

ROWS = 64  # of a tile: what one wgmma of one warpgroup covers
PAIRS = ROWS // 2
PER_PAIR = 32  # lanes of a pair of rows in a step
DEPTH = 64  # columns of a step: a 128-byte row of activations


def to_fragments(
    blocks: UInt8[Array, "*batch N G 16"], scales: UInt8[Array, "*batch N G"]
) -> tuple[UInt16[Array, "*batch T S 4 256"], UInt32[Array, "*batch T S 32"]]:
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
    #                                   0      1  2  3   4     5  6  7  8  9
    codes = codes.reshape(*batch, tiles, 4, 8, 2, steps, 2, 2, 2, 4, 2)  # t w g r s b i h c v
    codes = _permuted(codes, lead, (0, 4, 1, 2, 8, 6, 7, 9, 5, 3))  # t s w g c i h v b r
    codes = codes.reshape(*codes.shape[:-2], 4)  # ... p
    lanes = jnp.zeros(codes.shape[:-1], jnp.uint16)
    for place, bits in enumerate(BITS):
        for source, target in enumerate(bits):
            lanes |= ((codes[..., place] >> source) & 1).astype(jnp.uint16) << target
    bytes_ = scales.astype(jnp.uint32).reshape(*batch, tiles, PAIRS, 2, steps, 2)  # t wg r s b
    bytes_ = _permuted(bytes_, lead, (0, 3, 1, 4, 2)).reshape(*batch, tiles, steps, PAIRS, 4)
    words = bytes_[..., 0]
    for byte in (1, 2, 3):
        words |= bytes_[..., byte] << (8 * byte)
    return lanes.reshape(*batch, tiles, steps, 4, 256), words


def from_fragments(
    lanes: UInt16[Array, "*batch T S 4 256"], scales: UInt32[Array, "*batch T S 32"]
) -> tuple[UInt8[Array, "*batch N G 16"], UInt8[Array, "*batch N G"]]:
    """The checkpoint's bytes back: `from_fragments(*to_fragments(b, s))` is (b, s)."""
    *batch, tiles, steps, _ = scales.shape
    lead = len(batch)
    lanes = lanes.reshape(*batch, tiles, steps, 4, 8, 4, 2, 2, 2)  # t s w g c i h v
    places = []
    for bits in BITS:
        code = jnp.zeros(lanes.shape, jnp.uint16)
        for target, source in enumerate(bits):
            code |= ((lanes >> source) & 1) << target
        places.append(code.astype(jnp.uint8))
    codes = jnp.stack(places, axis=-1).reshape(*lanes.shape, 2, 2)  # t s w g c i h v b r
    codes = _permuted(codes, lead, (0, 2, 3, 9, 1, 8, 5, 6, 4, 7))  # t w g r s b i h c v
    rows, groups = tiles * ROWS, steps * DEPTH // BLOCK
    codes = codes.reshape(*batch, rows, groups, BLOCK // 2, 2)
    blocks = codes[..., 0] | (codes[..., 1] << 4)
    bytes_ = jnp.stack([(scales >> (8 * byte)) & 255 for byte in range(4)], axis=-1)
    bytes_ = bytes_.reshape(*batch, tiles, steps, PAIRS, 2, 2)  # t s wg b r
    bytes_ = _permuted(bytes_, lead, (0, 2, 4, 1, 3)).reshape(*batch, rows, groups)
    return blocks, bytes_.astype(jnp.uint8)


def decode_tile(lanes: UInt16[Array, "4 256"], scales: UInt32[Array, " 32"]) -> Array:
    """bfloat16 [64, 64] of one tile's step, in the fragment's order of rows.

    The definition of what the kernel's instructions do to a word; kernels interpreted on a CPU
    call it in their place.
    """
    blocks, bytes_ = from_fragments(lanes[None, None], scales[None, None])
    values = decode(blocks, bytes_, jnp.bfloat16)
    return jnp.swapaxes(values.reshape(4, 8, 2, DEPTH), 1, 2).reshape(ROWS, DEPTH)


def _permuted(x: Array, lead: int, axes: tuple[int, ...]) -> Array:
    return x.transpose(*range(lead), *(lead + axis for axis in axes))
