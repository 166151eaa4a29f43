"""MXFP4, and its only home: blocks of 32 four-bit floats that share one power-of-two scale.

A tensor [..., K] is stored as `blocks` uint8 [..., K/32, 16] and `scales` uint8 [..., K/32]. Byte j
of a block holds element 2j in its low nibble and 2j+1 in its high one; a nibble is
sign << 3 | index into MAGNITUDES:

    decode(blocks, scales)[..., 32 i + j] == value(nibble j of block i) * 2**(scales[..., i] - 127)

`lanes` and `fragments` hold the layouts of the Triton and the Mosaic kernels, with exact inverses;
`in_kernel` decodes lanes.
"""

from .codec import BLOCK, MAGNITUDES, decode, encode
from .lanes import from_lanes, has_wide_scales, to_lanes

__all__ = [
    "BLOCK",
    "MAGNITUDES",
    "decode",
    "encode",
    "from_lanes",
    "has_wide_scales",
    "to_lanes",
]
