"""What the Mosaic kernel does in registers, as PTX: decode a tile, gate, add biases, store.

Thread t = 32 w + 4 g + c of a warpgroup, as in mxfp4.fragments: its accumulators are rows
16 w + g + 8 r (r = 0, 1: gate and up, or two values of the output next to each other) and tokens
8 j + 2 c + v. Nothing here goes through shared memory or another thread.

Interpret mode has no PTX: `decode_tile` and the *_plain forms are the same in jnp.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from ..mxfp4.fragments import DEPTH, ROWS, decode_tile
from .swiglu import swiglu

_MASK = "0x81C081C0"
# The register of place p of word w, before the scale, in t; see mxfp4.lanes for the bits.
_PLACE = (
    f"and.b32 t, w, {_MASK};",
    f"shl.b32 t, w, 3; and.b32 t, t, {_MASK};",
    f"shl.b32 t, w, 6; and.b32 t, t, {_MASK};",
    "shl.b32 t, w, 1; and.b32 t, t, 0x80008000;"
    "shr.u32 u, w, 5; and.b32 u, u, 0x01000100; or.b32 t, t, u;"
    "shr.u32 u, w, 4; and.b32 u, u, 0x00C000C0; or.b32 t, t, u;",
)


def _scale(byte: int, wide: bool) -> str:
    """PTX: both halves of f{byte} are bfloat16 2**(b - 1), wide 2**(b - 127), of a byte b of s."""
    spread = f"prmt.b32 t, s, 0, 0x4{byte}4{byte};"
    if not wide:
        return spread + f"mad.lo.u32 f{byte}, t, 128, 0x3F003F00;"
    # Byte 0 is 2**-127, a subnormal of bfloat16; 255 is NaN.
    return spread + (
        f"mul.lo.u32 f{byte}, t, 128;"
        f"setp.eq.u32 p, t, 0; selp.b32 f{byte}, 0x00400040, f{byte}, p;"
        f"setp.eq.u32 p, t, 0x00FF00FF; selp.b32 f{byte}, 0x7FC07FC0, f{byte}, p;"
    )


def _decode_ptx(wide: bool) -> str:
    """Inputs: addresses of this thread's four words and of its scale word; 16 registers out."""
    lines = [
        "{ .reg .b32 t, u, w, w0, w1, w2, w3, s, f0, f1, f2, f3; .reg .pred p;",
        "ld.shared.v4.b32 {w0, w1, w2, w3}, [$16]; ld.shared.b32 s, [$17];",
        *(_scale(byte, wide) for byte in range(4)),
    ]
    for i in range(4):
        lines.append(f"mov.b32 w, w{i};")
        for place, bits in enumerate(_PLACE):
            row, block = place % 2, i // 2
            # 0x7E80 is 2**126, which a wide scale has no room for.
            lift = "mov.b32 u, 0x7E807E80; mul.rn.bf16x2 t, t, u;" if wide else ""
            lines.append(f"{bits}{lift} mul.rn.bf16x2 ${4 * i + place}, t, f{2 * row + block};")
    return " ".join(lines) + " }"


def _i32(value: int):
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def _thread():
    """w, g, c of this thread in its warpgroup, int32."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
    thread = arith.remui(thread, _i32(128))
    lane = arith.remui(thread, _i32(32))
    return (
        arith.divui(thread, _i32(32)),
        arith.divui(lane, _i32(4)),
        arith.remui(lane, _i32(4)),
    )


def _plus(*terms):
    total = terms[0]
    for term in terms[1:]:
        total = arith.addi(total, term)
    return total


def _times(value, factor: int):
    return arith.muli(value, _i32(factor))


def _shared_address(ref):
    i32 = ir.IntegerType.get_signless(32)
    return llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref))


def _global_address(ref):
    """64-bit address of a ref's first element."""
    i64 = ir.IntegerType.get_signless(64)
    return llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))


def _add_bytes(address, offset):
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(address, arith.extsi(i64, offset))


def _asm(results, args, text, constraints, *, pure=False):
    """One inline PTX; results: MLIR types, none, one or several."""
    if not results:
        kind = ir.Type.parse("!llvm.void")
    elif len(results) == 1:
        kind = results[0]
    else:
        kind = llvm.StructType.get_literal(results)
    out = llvm.inline_asm(kind, args, text, constraints, asm_dialect=0, has_side_effects=not pure)
    if len(results) <= 1:
        return [out] if results else []
    return [llvm.extractvalue(result, out, [i]) for i, result in enumerate(results)]


def decode(words_smem, scales_smem, *, wide: bool, interpret: bool):
    """bfloat16 [64, 64] in the tensor core's registers, from [4, 128] words and [32] scales."""
    if interpret:
        return decode_tile(words_smem[...], scales_smem[...])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((ROWS, DEPTH), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def in_registers(_, words, scales):
        i32 = ir.IntegerType.get_signless(32)
        w, g, c = _thread()
        word_at = _plus(_shared_address(words), _times(w, 512), _times(g, 64), _times(c, 16))
        scale_at = _plus(_shared_address(scales), _times(w, 32), _times(g, 4))
        registers = _asm(
            [i32] * 16, [word_at, scale_at], _decode_ptx(wide), ",".join(["=r"] * 16 + ["r"] * 2)
        )
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        one = ir.VectorType.get((1,), i32)
        layout = mgpu.WGMMA_LAYOUT
        array = np.empty(16, dtype=object)
        for i, register in enumerate(registers):
            array[i] = vector.bitcast(pair, vector.broadcast(one, register))
        return mgpu.FragmentedArray(
            _registers=array.reshape(layout.registers_shape((ROWS, DEPTH))),
            _layout=layout,
            _is_signed=None,
        )

    return in_registers(words_smem, scales_smem)


def keep(tile, *, interpret: bool):
    """Holds a tile's registers until here: a wgmma that reads them may still run before this."""
    if interpret:
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,))
    def in_registers(_, tile):
        i32 = ir.IntegerType.get_signless(32)
        one = ir.VectorType.get((1,), i32)
        args = [
            vector.extract(
                vector.bitcast(one, register),
                dynamic_position=[],
                static_position=ir.DenseI64ArrayAttr.get([0]),
            )
            for register in tile.registers.flat
        ]
        _asm([], args, "", ",".join(["r"] * len(args)))

    in_registers(tile)


def _bias_pair(bias, w, g):
    """The two float32 biases of this thread's two rows, from a ref of the tile's 64."""
    f32 = ir.F32Type.get()
    i32 = ir.IntegerType.get_signless(32)
    element = ir.MemRefType(bias.type).element_type
    size = mgpu.utils.bytewidth(element)
    at = _add_bytes(_global_address(bias), _times(_plus(_times(w, 16), _times(g, 2)), size))
    if size == 4:
        return _asm([f32, f32], [at], "ld.global.nc.v2.f32 {$0, $1}, [$2];", "=f,=f,l")
    (both,) = _asm([i32], [at], "ld.global.nc.b32 $0, [$1];", "=r,l")
    shift = "{ .reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xFFFF0000; "
    return _asm([f32, f32], [both], shift + "mov.b32 $1, t; }", "=f,=f,r", pure=True)


def _accumulators(acc):
    """(first token of the thread's pair, its two rows' registers [r][v]) of each 8 tokens."""
    registers = acc.registers.reshape(-1, 2)  # 8 tokens each, r

    def values(register):
        return [
            vector.extract(
                register,
                dynamic_position=[],
                static_position=ir.DenseI64ArrayAttr.get([v]),
            )
            for v in (0, 1)
        ]

    for j, rows in enumerate(registers):
        yield 8 * j, [values(register) for register in rows]


def _float(value: float) -> str:
    """A float32 immediate of PTX."""
    return f"0f{int(np.float32(value).view(np.uint32)):08X}"


_SCALAR = plgpu.Layout.WG_SPLAT(())


def store_gated(acc, bias_ref, out_ref, size, *, pitch, limit, alpha, interpret: bool):
    """out [tokens, 32] = swiglu(acc + bias) of the first `size` tokens; acc [64, tokens] float32.

    pitch: elements from one row of the whole output to the next. Clamps keep NaN, as jnp's do.
    """
    if interpret:
        pairs = _pairs(acc, bias_ref)
        _store_rows(swiglu(pairs[:, 0], pairs[:, 1], limit=limit, alpha=alpha), out_ref, size)
        return
    clamp = ""
    if limit is not None:
        most, least = _float(limit), _float(-limit)
        clamp = f"min.NaN.f32 g, g, {most}; min.NaN.f32 u, u, {most}; max.NaN.f32 u, u, {least};"
    # gate * sigmoid(alpha gate) * (up + 1); ex2 and rcp err by 2 units in the last place.
    gated = (
        f"add.f32 g, $0, $2; add.f32 u, $1, $3; {clamp}"
        f"mul.f32 e, g, {_float(-alpha / math.log(2))}; ex2.approx.ftz.f32 e, e;"
        "add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 e, e;"
        "mul.f32 g, g, e; fma.rn.f32 g, u, g, g; cvt.rn.bf16.f32 h, g;"
    )

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType(), _SCALAR))
    def in_registers(_, acc, bias, out, size):
        w, g, c = _thread()
        gate_bias, up_bias = _bias_pair(bias, w, g)
        left = arith.subi(size.registers.item(), _times(c, 2))
        column = _plus(_times(w, 8), g, _times(c, 2 * pitch))
        at = _add_bytes(_global_address(out), _times(column, 2))
        for token, ((gate0, gate1), (up0, up1)) in _accumulators(acc):
            for v, (gate, up) in enumerate(((gate0, up0), (gate1, up1))):
                _asm(
                    [],
                    [gate, up, gate_bias, up_bias, left, at],
                    "{ .reg .f32 g, u, e; .reg .pred p; .reg .b16 h;"
                    f"{gated} setp.gt.s32 p, $4, {token + v};"
                    f"@p st.global.b16 [$5+{(token + v) * pitch * 2}], h; }}",
                    "f,f,f,f,r,l",
                )

    in_registers(acc, bias_ref, out_ref, size)


def store_biased(acc, bias_ref, out_ref, size, *, pitch, interpret: bool):
    """out [tokens, 64] = acc + bias, in out's dtype, of the first `size` tokens."""
    if interpret:
        _store_rows(_pairs(acc, bias_ref).reshape(ROWS, -1), out_ref, size)
        return
    wide = out_ref.dtype == jnp.float32
    bytes_ = 4 if wide else 2
    store = "st.global.v2.f32 [$5+{}], {{a, b}};"
    if not wide:
        store = "cvt.rn.bf16x2.f32 h, b, a; @p st.global.b32 [$5+{}], h;"
    else:
        store = "@p " + store

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType(), _SCALAR))
    def in_registers(_, acc, bias, out, size):
        w, g, c = _thread()
        first_bias, second_bias = _bias_pair(bias, w, g)
        left = arith.subi(size.registers.item(), _times(c, 2))
        column = _plus(_times(w, 16), _times(g, 2), _times(c, 2 * pitch))
        at = _add_bytes(_global_address(out), _times(column, bytes_))
        for token, ((first0, first1), (second0, second1)) in _accumulators(acc):
            for v, (first, second) in enumerate(((first0, second0), (first1, second1))):
                _asm(
                    [],
                    [first, second, first_bias, second_bias, left, at],
                    "{ .reg .f32 a, b; .reg .pred p; .reg .b32 h;"
                    f"add.f32 a, $0, $2; add.f32 b, $1, $3; setp.gt.s32 p, $4, {token + v};"
                    + store.format((token + v) * pitch * bytes_)
                    + "}",
                    "f,f,f,f,r,l",
                )

    in_registers(acc, bias_ref, out_ref, size)


def _pairs(acc, bias_ref):
    """float32 [32, 2, tokens] with bias: fragment rows 16 w + 8 r + g to pairs 8 w + g."""
    tokens = acc.shape[-1]
    pairs = jnp.swapaxes(acc.reshape(4, 2, 8, tokens), 1, 2).reshape(32, 2, tokens)
    return pairs + bias_ref[...].astype(jnp.float32).reshape(32, 2, 1)


def _store_rows(values, out_ref, size):
    """The first `size` columns as rows, one by one: the next rows may be another tile's."""
    rows = values.T.astype(out_ref.dtype)
    for row in range(rows.shape[0]):

        @pl.when(row < size)
        def _(row=row):
            out_ref[row] = rows[row]
