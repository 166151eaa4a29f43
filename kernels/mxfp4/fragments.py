"""An MXFP4 matrix as the registers of Hopper's tensor cores want it: no lane reads another's word.

`wgmma` can read its left operand, 64 rows by 16 columns, from registers, in a fixed order: thread
t = 32 w + 4 g + c of a warpgroup (warp w, eight rows g, four threads c a row) holds rows 16 w + g
and 16 w + g + 8, columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9. A matrix of N = 64 T rows and
K = 64 S columns becomes

    words  uint32 [T, S, 4, 128]   in order: 4 words a thread, one for 16 columns: one 16-byte load
    scales uint32 [T, S, 32]       a word for each g of each w: 2 rows, 2 blocks of 32 columns

so a step of 64 columns of a tile is 2048 + 128 bytes, each contiguous, for one bulk copy.

Rows of a tile are dealt in pairs, so that one thread has both of them in its accumulators:

    row 16 w + g + 8 r of the fragment is row 64 t + 16 w + 2 g + r of the matrix

Of gate_up, whose rows are g0 u0 g1 u1 ..., that is gate and up of one hidden value; of down, two
values next to each other in memory. A word's two halves hold columns 2 c and 2 c + 1; its place
p = 2 h + r is fragment row half r and column half h, bits as in `lanes`:

    place p of word i, half v: row 64 t + 16 w + 2 g + r, column 64 s + 16 i + 8 h + 2 c + v
    scale byte 2 r + b of word (w, g): row 64 t + 16 w + 2 g + r, block 2 s + b

Four masks and shifts of a word are then the four registers that `wgmma` wants, in its order.
"""

import jax.numpy as jnp
from jaxtyping import Array, UInt8, UInt32

from .codec import BLOCK, decode
from .lanes import BITS

ROWS = 64  # of a tile: what one wgmma of one warpgroup covers
DEPTH = 64  # columns of a step: a 128-byte row of activations


def to_fragments(
    blocks: UInt8[Array, "*batch N G 16"], scales: UInt8[Array, "*batch N G"]
) -> tuple[UInt32[Array, "*batch T S 4 128"], UInt32[Array, "*batch T S 32"]]:
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
    # Bytes until they lie where they should: a fourth of the memory that words would take.
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1)
    #                                   0      1  2  3   4     5  6  7  8
    codes = codes.reshape(*batch, tiles, 4, 8, 2, steps, 4, 2, 4, 2)  # t w g r s i h c v
    codes = _permuted(codes, lead, (0, 4, 1, 2, 7, 5, 6, 3, 8))  # t s w g c i h r v
    codes = codes.reshape(*codes.shape[:-3], 4, 2)  # ... p v
    words = jnp.zeros(codes.shape[:-2], jnp.uint32)
    for place, bits in enumerate(BITS):
        for half in (0, 1):
            for source, target in enumerate(bits):
                bit = ((codes[..., place, half] >> source) & 1).astype(jnp.uint32)
                words |= bit << (target + 16 * half)
    bytes_ = scales.astype(jnp.uint32).reshape(*batch, tiles, 4, 8, 2, steps, 2)  # t w g r s b
    bytes_ = _permuted(bytes_, lead, (0, 4, 1, 2, 3, 5)).reshape(*batch, tiles, steps, 32, 4)
    pairs = bytes_[..., 0]
    for byte in (1, 2, 3):
        pairs |= bytes_[..., byte] << (8 * byte)
    return words.reshape(*batch, tiles, steps, 4, 128), pairs


def from_fragments(
    words: UInt32[Array, "*batch T S 4 128"], scales: UInt32[Array, "*batch T S 32"]
) -> tuple[UInt8[Array, "*batch N G 16"], UInt8[Array, "*batch N G"]]:
    """The checkpoint's bytes back: `from_fragments(*to_fragments(b, s))` is (b, s)."""
    *batch, tiles, steps, _ = scales.shape
    lead = len(batch)
    words = words.reshape(*batch, tiles, steps, 4, 8, 4, 4)  # t s w g c i
    places = []
    for bits in BITS:
        halves = []
        for half in (0, 1):
            code = jnp.zeros(words.shape, jnp.uint32)
            for target, source in enumerate(bits):
                code |= ((words >> (source + 16 * half)) & 1) << target
            halves.append(code.astype(jnp.uint8))
        places.append(jnp.stack(halves, axis=-1))
    codes = jnp.stack(places, axis=-2).reshape(*words.shape, 2, 2, 2)  # t s w g c i h r v
    codes = _permuted(codes, lead, (0, 2, 3, 7, 1, 5, 6, 4, 8))  # t w g r s i h c v
    rows, groups = tiles * ROWS, steps * DEPTH // BLOCK
    codes = codes.reshape(*batch, rows, groups, BLOCK // 2, 2)
    blocks = codes[..., 0] | (codes[..., 1] << 4)
    bytes_ = jnp.stack([(scales >> (8 * byte)) & 255 for byte in range(4)], axis=-1)
    bytes_ = bytes_.reshape(*batch, tiles, steps, 4, 8, 2, 2)  # t s w g r b
    bytes_ = _permuted(bytes_, lead, (0, 2, 3, 4, 1, 5)).reshape(*batch, rows, groups)
    return blocks, bytes_.astype(jnp.uint8)


def decode_tile(words: UInt32[Array, "4 128"], scales: UInt32[Array, " 32"]) -> Array:
    """bfloat16 [64, 64] of one tile's step, in the fragment's order of rows.

    The definition of what the kernel's instructions do to a word; kernels interpreted on a CPU
    call it in their place.
    """
    blocks, bytes_ = from_fragments(words[None, None], scales[None, None])
    values = decode(blocks, bytes_, jnp.bfloat16)
    return jnp.swapaxes(values.reshape(4, 8, 2, DEPTH), 1, 2).reshape(ROWS, DEPTH)


def _permuted(x: Array, lead: int, axes: tuple[int, ...]) -> Array:
    return x.transpose(*range(lead), *(lead + axis for axis in axes))
