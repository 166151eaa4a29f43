"""The PTX of the Mosaic kernel, as text: decode a tile's lanes, gate and store, add and store.

Text alone, so that tests can run it instruction by instruction on a machine without a GPU. Operands
are $0, $1, ... as in LLVM's inline assembly; each form says which.
"""

import math
import struct

MASK = (
    0x81C081C0  # sign and the three bits below it that make a bfloat16 of a nibble, in both halves
)


def _float(value: float) -> str:
    """A float32 immediate."""
    return "0f" + struct.pack(">f", value).hex().upper()


# The register of place p of word w, before the scale, in t; see mxfp4.lanes for the bits.
_PLACE = (
    f"and.b32 t, w, {MASK:#x};",
    f"shl.b32 t, w, 3; and.b32 t, t, {MASK:#x};",
    f"shl.b32 t, w, 6; and.b32 t, t, {MASK:#x};",
    "shl.b32 t, w, 1; and.b32 t, t, 0x80008000; "
    "shr.u32 u, w, 5; and.b32 u, u, 0x01000100; or.b32 t, t, u; "
    "shr.u32 u, w, 4; and.b32 u, u, 0x00C000C0; or.b32 t, t, u;",
)


def _scale(byte: int, wide: bool) -> str:
    """Both halves of f{byte}: bfloat16 2**(b - 1), wide 2**(b - 127), of byte b of s."""
    spread = f"prmt.b32 t, s, 0, 0x4{byte}4{byte};"
    if not wide:
        return f"{spread} mad.lo.u32 f{byte}, t, 128, 0x3F003F00;"
    # Byte 0 is 2**-127, a subnormal of bfloat16; 255 is NaN.
    return (
        f"{spread} mul.lo.u32 f{byte}, t, 128; "
        f"setp.eq.u32 p, t, 0; selp.b32 f{byte}, 0x00400040, f{byte}, p; "
        f"setp.eq.u32 p, t, 0x00FF00FF; selp.b32 f{byte}, 0x7FC07FC0, f{byte}, p;"
    )


def decode(wide: bool) -> str:
    """$0 .. $15 = the registers of a left operand of four wgmma, in their order.

    $16: shared address of this thread's lanes, four words; $17: of its scales, one word.
    """
    lines = [
        "{ .reg .b32 t, u, w, w0, w1, w2, w3, s, f0, f1, f2, f3; .reg .pred p;",
        "ld.shared.v4.b32 {w0, w1, w2, w3}, [$16]; ld.shared.b32 s, [$17];",
        *(_scale(byte, wide) for byte in range(4)),
    ]
    for word in range(4):
        lines.append(f"mov.b32 w, w{word};")
        for place, bits in enumerate(_PLACE):
            # Operand 2 b + i of 16 columns each; in it, column half h and row r.
            (block, row), (i, half) = divmod(place, 2), divmod(word, 2)
            target = 4 * (2 * block + i) + 2 * half + row
            # 0x7E80 is 2**126, which a wide scale has no room for.
            lift = "mov.b32 u, 0x7E807E80; mul.rn.bf16x2 t, t, u;" if wide else ""
            lines.append(f"{bits} {lift} mul.rn.bf16x2 ${target}, t, f{place};")
    return " ".join([*lines, "}"])


# Inputs of both stores, of 8 tokens: $0 .. $3 sums of row 0 and of row 1 of this thread's two
# tokens (row 0, row 0, row 1, row 1), $4 $5 the biases of the rows, $6 the tokens of the tile,
# $7 the global address of the thread's first output.


def store_gated(token: int, pitch: int, limit: float | None, alpha: float) -> str:
    """bfloat16 gate * sigmoid(alpha gate) * (up + 1) of tokens `token` and the next; row 0 gates.

    pitch: bytes from one token's output to the next's. ex2 and rcp err by 2 units in the last place
    of float32. A clamp keeps NaN, as jnp's does.
    """
    clamp = ""
    if limit is not None:
        most, least = _float(limit), _float(-limit)
        clamp = f"min.NaN.f32 g, g, {most}; min.NaN.f32 u, u, {most}; max.NaN.f32 u, u, {least};"
    lines = [f"{{ .reg .f32 g, u, e; .reg .b16 h; .reg .pred p; setp.gt.s32 p, $6, {token};"]
    for v in (0, 1):
        lines += [
            f"add.f32 g, ${v}, $4; add.f32 u, ${2 + v}, $5; {clamp}",
            f"mul.f32 e, g, {_float(-alpha / math.log(2))}; ex2.approx.ftz.f32 e, e;",
            "add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 e, e;",
            "mul.f32 g, g, e; fma.rn.f32 g, u, g, g; cvt.rn.bf16.f32 h, g;",
            f"@p st.global.b16 [$7+{(token + v) * pitch}], h;",
        ]
    return " ".join([*lines, "}"])


def store_biased(token: int, pitch: int, float32: bool) -> str:
    """Both rows' sums with bias, next to each other, of tokens `token` and the next."""
    lines = [f"{{ .reg .f32 a, b; .reg .b32 h; .reg .pred p; setp.gt.s32 p, $6, {token};"]
    for v in (0, 1):
        lines.append(f"add.f32 a, ${v}, $4; add.f32 b, ${2 + v}, $5;")
        at = f"[$7+{(token + v) * pitch}]"
        if float32:
            lines.append(f"@p st.global.v2.f32 {at}, {{a, b}};")
        else:
            lines.append(f"cvt.rn.bf16x2.f32 h, b, a; @p st.global.b32 {at}, h;")
    return " ".join([*lines, "}"])
