"""What the Mosaic kernel does in registers: decode a tile, gate, add biases, store.

Thread t = 32 w + 4 g + c of a warpgroup, as in mxfp4.fragments: its accumulators are rows
16 w + g + 8 r (r = 0, 1: gate and up, or two values of the output next to each other) and tokens
8 j + 2 c + v. Nothing here goes through shared memory or another thread.

jax's interpreter knows no PTX: there the same is done in jnp, and tests run the text of mosaic_ptx.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from ..mxfp4.fragments import DEPTH, ROWS, decode_tile
from . import mosaic_ptx
from .swiglu import swiglu

_SCALAR = plgpu.Layout.WG_SPLAT(())


def _int(bits: int):
    return ir.IntegerType.get_signless(bits)


def _i32(value: int):
    return arith.constant(_int(32), ir.IntegerAttr.get(_int(32), value))


def _thread():
    """w, g, c of this thread in its warpgroup, int32."""
    thread = arith.index_cast(_int(32), gpu.thread_id(gpu.Dimension.x))
    lane = arith.remui(thread, _i32(32))
    return (
        arith.divui(arith.remui(thread, _i32(128)), _i32(32)),
        arith.divui(lane, _i32(4)),
        arith.remui(lane, _i32(4)),
    )


def _sum(*terms):
    """Of values, or of (value, factor)."""
    total = None
    for term in terms:
        if isinstance(term, tuple):
            term = arith.muli(term[0], _i32(term[1]))
        total = term if total is None else arith.addi(total, term)
    return total


def _address(ref, bits: int, offset):
    """Of a ref's first element, and `offset` bytes further."""
    base = llvm.ptrtoint(_int(bits), mgpu.utils.memref_ptr(ref))
    return arith.addi(base, offset if bits == 32 else arith.extsi(_int(64), offset))


def _element(register, at: int):
    position = ir.DenseI64ArrayAttr.get([at])
    return vector.extract(register, dynamic_position=[], static_position=position)


def _asm(results, args, text, constraints):
    """One inline PTX that stays where it is; results: MLIR types, none or several."""
    kind = llvm.StructType.get_literal(results) if results else ir.Type.parse("!llvm.void")
    out = llvm.inline_asm(kind, args, text, constraints, asm_dialect=0, has_side_effects=True)
    return [llvm.extractvalue(result, out, [i]) for i, result in enumerate(results)]


def decode(lanes_smem, scales_smem, *, wide: bool, interpret: bool):
    """bfloat16 [64, 64] in the tensor core's registers, from [4, 256] lanes and [32] scales."""
    if interpret:
        return decode_tile(lanes_smem[...], scales_smem[...])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((ROWS, DEPTH), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def in_registers(_, lanes, scales):
        w, g, c = _thread()
        addresses = [
            _address(lanes, 32, _sum((w, 512), (g, 64), (c, 16))),
            _address(scales, 32, _sum((w, 32), (g, 4))),
        ]
        constraints = ",".join(["=r"] * 16 + ["r"] * 2)
        packed = _asm([_int(32)] * 16, addresses, mosaic_ptx.decode(wide), constraints)
        pair, one = ir.VectorType.get((2,), ir.BF16Type.get()), ir.VectorType.get((1,), _int(32))
        registers = np.empty(16, dtype=object)
        for i, value in enumerate(packed):
            registers[i] = vector.bitcast(pair, vector.broadcast(one, value))
        layout = mgpu.WGMMA_LAYOUT
        return mgpu.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape((ROWS, DEPTH))),
            _layout=layout,
            _is_signed=None,
        )

    return in_registers(lanes_smem, scales_smem)


def keep(weights, *, interpret: bool):
    """Holds a tile's registers until here: a wgmma that reads them may run until it is awaited."""
    if interpret:
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,))
    def in_registers(_, weights):
        one = ir.VectorType.get((1,), _int(32))
        args = [_element(vector.bitcast(one, r), 0) for r in weights.registers.flat]
        _asm([], args, "", ",".join(["r"] * len(args)))

    in_registers(weights)


def _biases(bias, w, g):
    """The float32 biases of this thread's two rows, from a ref of the tile's 64."""
    f32 = ir.F32Type.get()
    size = mgpu.utils.bytewidth(ir.MemRefType(bias.type).element_type)
    at = [_address(bias, 64, _sum((w, 16 * size), (g, 2 * size)))]
    if size == 4:
        return _asm([f32, f32], at, "ld.global.nc.v2.f32 {$0, $1}, [$2];", "=f,=f,l")
    text = (
        "{ .reg .b32 t, u; ld.global.nc.b32 t, [$2]; shl.b32 u, t, 16; mov.b32 $0, u; "
        "and.b32 t, t, 0xFFFF0000; mov.b32 $1, t; }"
    )
    return _asm([f32, f32], at, text, "=f,=f,l")


def _store(sums, bias_ref, out_ref, size, text, *, row_bytes: int, step: int):
    """text(token) for each 8 tokens; row_bytes, step: bytes of a thread's rows and of a token's."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType(), _SCALAR))
    def in_registers(_, sums, bias, out, size):
        w, g, c = _thread()
        given = [*_biases(bias, w, g), size.registers.item()]
        at = _address(out, 64, _sum((w, 8 * row_bytes), (g, row_bytes), (c, 2 * step)))
        for j, rows in enumerate(sums.registers.reshape(-1, 2)):
            values = [_element(row, v) for row in rows for v in (0, 1)]
            _asm([], [*values, *given, at], text(8 * j), "f,f,f,f,f,f,r,l")

    in_registers(sums, bias_ref, out_ref, size)


def store_gated(sums, bias_ref, out_ref, size, *, width, limit, alpha, interpret: bool):
    """out [tokens, 32] = swiglu(sums + bias) of the first `size` tokens; sums [64, tokens] float32.

    Up to the next multiple of 8, tokens past `size` may be written. width: of the whole output, in
    elements.
    """
    if interpret:
        pairs = _pairs(sums, bias_ref)
        _store_rows(swiglu(pairs[:, 0], pairs[:, 1], limit=limit, alpha=alpha), out_ref, size)
        return

    def text(token):
        return mosaic_ptx.store_gated(token, width * 2, limit, alpha)

    _store(sums, bias_ref, out_ref, size, text, row_bytes=2, step=width * 2)


def store_biased(sums, bias_ref, out_ref, size, *, width, interpret: bool):
    """out [tokens, 64] = sums + bias, in out's dtype, of the tokens of store_gated."""
    if interpret:
        _store_rows(_pairs(sums, bias_ref).reshape(ROWS, -1), out_ref, size)
        return
    float32 = out_ref.dtype == jnp.float32
    step = width * (4 if float32 else 2)

    def text(token):
        return mosaic_ptx.store_biased(token, step, float32)

    row_bytes = 8 if float32 else 4
    _store(sums, bias_ref, out_ref, size, text, row_bytes=row_bytes, step=step)


def _pairs(sums, bias_ref):
    """float32 [32, 2, tokens] with bias: fragment rows 16 w + 8 r + g to pairs 8 w + g."""
    tokens = sums.shape[-1]
    pairs = jnp.swapaxes(sums.reshape(4, 2, 8, tokens), 1, 2).reshape(32, 2, tokens)
    return pairs + bias_ref[...].astype(jnp.float32).reshape(32, 2, 1)


def _store_rows(values, out_ref, size):
    """The first `size` columns as rows, one by one: the next rows may be another tile's."""
    rows = values.T.astype(out_ref.dtype)
    for row in range(rows.shape[0]):

        @pl.when(row < size)
        def _(row=row):
            out_ref[row] = rows[row]
