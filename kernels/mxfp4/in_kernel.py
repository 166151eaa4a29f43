"""Lanes to bfloat16 inside a Pallas kernel: inline PTX on a GPU, the same in jnp when interpreted.

Every asm works on each 16-bit element alone. Triton may lay a tensor out anew under an asm, so one
that moved bits between the two lanes of a register was right in one configuration and garbage in
the next (measured: relative error 1.2).
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

_MASK = "0x81C081C0"
_PLACE = (
    f"and.b32 t, $1, {_MASK};",
    f"shl.b32 t, $1, 3; and.b32 t, t, {_MASK};",
    f"shl.b32 t, $1, 6; and.b32 t, t, {_MASK};",
    "shl.b32 t, $1, 1; and.b32 t, t, 0x80008000;"
    "shr.u32 u, $1, 5; and.b32 u, u, 0x01000100; or.b32 t, t, u;"
    "shr.u32 u, $1, 4; and.b32 u, u, 0x00C000C0; or.b32 t, t, u;",
)
# 2 ** (byte - 1) as bfloat16: (byte + 126) << 7 in both halves of a register.
_SCALE = (
    "and.b32 t, $1, 0x00FF00FF; mad.lo.u32 $0, t, 128, 0x3F003F00;",
    "shr.u32 t, $1, 1; and.b32 t, t, 0x7F807F80; add.u32 $0, t, 0x3F003F00;",
)


def _asm(body, args, constraints):
    return plt.elementwise_inline_asm(
        "{ .reg .b32 t, u; " + body + " }",
        args=args,
        constraints=constraints,
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.bfloat16)],
    )[0]


def scale_of(pair, plane: int, *, wide: bool, interpret: bool):
    """bfloat16 factors of one plane from scale lanes: 2**(byte - 1), wide 2**(byte - 127)."""
    if not wide and not interpret:
        return _asm(_SCALE[plane], [pair], "=r,r")
    return _factor((pair.astype(jnp.int32) >> (8 * plane)) & 255, wide)


def scale_of_word(word, place: int, *, wide: bool, interpret: bool):
    """As scale_of, of one byte of 32-bit words."""
    if not wide and not interpret:
        low, high = 0x11 * place, 0x11 * (4 + place)
        body = f"prmt.b32 t, $1, $2, {high << 8 | low:#x}; and.b32 t, t, 0x00FF00FF;"
        return _asm(body + " mad.lo.u32 $0, t, 128, 0x3F003F00;", [word], "=r,r,r")
    return _factor((word.astype(jnp.int32) >> (8 * place)) & 255, wide)


def _factor(byte, wide: bool):
    if wide:
        bits = jnp.where(byte == 0, 0x0040, jnp.where(byte == 255, 0x7FC0, byte << 7))
    else:
        bits = (byte + 126) << 7
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def weight_of(lane, scale, place: int, *, wide: bool, interpret: bool):
    """bfloat16 weights at one place of lanes, exact; scale as `scale_of` gives it.

    Code 0.5 is a bfloat16 subnormal before the multiplication. PTX's mul.bf16x2 keeps subnormals;
    XLA's CPU backend flushes them, so the interpreted form builds the value from integers.
    """
    if not interpret:
        # 0x7E80 is 2**126: a wide scale leaves no room for it.
        lift = "mul.rn.bf16x2 t, t, u;" if wide else ""
        body = _PLACE[place] + ("mov.b32 u, 0x7E807E80;" + lift if wide else "")
        return _asm(body + "mul.rn.bf16x2 $0, t, $2;", [lane, scale], "=r,r,r")
    bits = lane.astype(jnp.int32)
    if place < 3:
        code = (bits << (3 * place)) & 0x81C0
    else:
        code = ((bits << 1) & 0x8000) | ((bits >> 5) & 0x0100) | ((bits >> 4) & 0x00C0)
    index = (code >> 6) & 7
    # 0 .5 1 1.5 2 3 4 6
    half = jnp.where(index >= 2, (2 + (index & 1)) << (index >> 1), 2 * index)
    value = half.astype(jnp.float32) * jnp.float32(0.25)
    value = jnp.where(code >= 0x8000, -value, value)
    factor = scale.astype(jnp.float32)
    if not wide:
        value = value * jnp.float32(2.0**-62)
        factor = factor * jnp.float32(2.0**-64)
    return (value * factor).astype(jnp.bfloat16)
