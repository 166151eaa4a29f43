"""The Mosaic GPU kernel of one grouped matmul: packed weights times tiles of sorted tokens.

A block of the grid stays on its processor and takes every 132nd piece of work, a piece being
`warpgroups` tiles of 64 weight rows times one tile of tokens. One more warpgroup loads: for each
step of 64 columns a bulk copy of tokens, of packed weights and of scales, `stages` steps ahead.

    acc [64, tokens] += decoded weights [64, 64] (registers) @ x [64, tokens] (shared memory)

While one warpgroup decodes, the tensor core works for the others; they wait for each other only
through the loader. Tiles of fewer tokens take a narrower form of the same loop.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..mxfp4.fragments import DEPTH, ROWS
from . import mosaic_registers as registers

# Registers of a loading and of a computing thread. A kernel starts with 65,536 in equal parts, 168
# or 128 a thread, and deals them anew; asking for more than there are would wait for ever.
_REGISTERS = {2: (40, 232), 3: (32, 160)}


def matmul(
    x_SK: Array,
    tiles: tuple[Array, Array, Array],
    lanes: Array,
    scales: Array,
    bias_EN: Array,
    *,
    widths: tuple[int, ...],
    shape,
    gate: tuple[float | None, float] | None,
    wide: bool,
    out_dtype: jnp.dtype,
    processors: int,
    interpret: bool,
) -> Array:
    """[S, N], or with a gate (limit, alpha of SwiGLU) [S, N / 2]; rows of no tile are not written.

    x_SK: bfloat16, rows sorted by tile, and enough of them after each start for a whole width,
    which is what is copied. tiles: expert_T (ascending, then -1), start_T in groups of 8 rows,
    size_T in rows, a multiple of 8, all of them the tile's own: the parts of routing's make_tiles.
    widths: a tile is computed in the first that holds it. lanes
    [E, N/64, K/64, 4, 256] and scales [E, N/64, K/64, 32]: see mxfp4.fragments.
    """
    count = tiles[0].shape[0]
    _, blocks, steps, _, _ = lanes.shape
    groups = min(shape.warpgroups, blocks)
    columns = pl.cdiv(blocks, groups)
    stages = min(shape.stages, steps)
    span = ROWS // 2 if gate else ROWS  # of a tile of weight rows, in the output

    def body(*refs):
        expert_gmem, start_gmem, size_gmem, x_gmem, *refs = refs
        lanes_gmem, scales_gmem, bias_gmem, out_gmem, *scratch = refs
        x_smem, lanes_smem, scales_smem, full, empty, *weights_smem = scratch
        thread = lax.axis_index("warpgroup")

        def expert_of(work):
            tile = jnp.minimum(lax.div(work, columns), count - 1)
            return jnp.where(work < count * columns, expert_gmem[tile], -1)

        def each_piece(form):
            """form(width, start, size, expert, first block of rows, slot) -> slot, in order."""

            def visit(carry):
                work, expert, slot = carry
                tile = lax.div(work, columns)
                # The last blocks may be computed twice, to the same bits, instead of masked.
                block = jnp.minimum(lax.rem(work, columns) * groups, blocks - groups)
                size = size_gmem[tile]
                # Copies of swizzled rows start at multiples of 8, and the compiler must see it.
                start = start_gmem[tile] * 8
                args = start, size, expert, block, slot
                if len(widths) == 1:
                    slot = form(widths[0], *args)
                else:
                    branch = sum((size > n).astype(jnp.int32) for n in widths[:-1])
                    slot = lax.switch(branch, [functools.partial(form, n) for n in widths], *args)
                work = work + processors
                return work, expert_of(work), slot

            start = jnp.int32(lax.axis_index("processor"))
            lax.while_loop(
                lambda carry: carry[1] >= 0, visit, (start, expert_of(start), jnp.int32(0))
            )

        def after(slot):
            return jnp.where(slot + 1 == stages, 0, slot + 1)

        def load(width, start, size, expert, block, slot):
            def step(s, slot):
                plgpu.barrier_wait(empty.at[slot])
                plgpu.copy_gmem_to_smem(
                    x_gmem.at[pl.ds(start, width), pl.ds(s * DEPTH, DEPTH)],
                    x_smem.at[slot, pl.ds(0, width)],
                    full.at[slot],
                )
                for source, target in ((lanes_gmem, lanes_smem), (scales_gmem, scales_smem)):
                    plgpu.copy_gmem_to_smem(
                        source.at[expert, pl.ds(block, groups), s], target.at[slot], full.at[slot]
                    )
                return after(slot)

            return lax.fori_loop(0, steps, step, slot)

        def decoded(slot):
            plgpu.barrier_wait(full.at[slot])
            return registers.decode(
                lanes_smem.at[slot, thread],
                scales_smem.at[slot, thread],
                wide=wide,
                interpret=interpret,
            )

        def compute(width, start, size, expert, block, slot):
            def accumulate(acc):
                def multiply(weights, slot):
                    x = x_smem.at[slot, pl.ds(0, width)]
                    if weights_smem:
                        (at_smem,) = weights_smem
                        at_smem[thread] = weights
                        weights = at_smem.at[thread]
                    plgpu.wgmma(acc, weights, x.transpose((1, 0)))

                def finish(weights, slot):
                    plgpu.wgmma_wait(0)
                    registers.keep(weights, interpret=interpret)
                    plgpu.barrier_arrive(empty.at[slot])

                def step(_, carry):
                    slot, weights = carry
                    multiply(weights, slot)
                    ahead = decoded(after(slot))
                    finish(weights, slot)
                    return after(slot), ahead

                slot_, weights = lax.fori_loop(0, steps - 1, step, (slot, decoded(slot)))
                multiply(weights, slot_)
                finish(weights, slot_)
                return acc[...], after(slot_)

            sums, slot = pl.run_scoped(accumulate, plgpu.ACC((ROWS, width), jnp.float32))
            mine = block + thread
            bias = bias_gmem.at[expert, pl.ds(mine * ROWS, ROWS)]
            out = out_gmem.at[pl.ds(start, width), pl.ds(mine * span, span)]
            common = dict(width=blocks * span, interpret=interpret)
            if gate:
                limit, alpha = gate
                registers.store_gated(sums, bias, out, size, limit=limit, alpha=alpha, **common)
            else:
                registers.store_biased(sums, bias, out, size, **common)
            return slot

        @pl.when(thread == groups)
        def _():
            if groups in _REGISTERS:
                plgpu.set_max_registers(_REGISTERS[groups][0], action="decrease")
            each_piece(load)
            for slot in range(stages):
                plgpu.barrier_wait(empty.at[slot])

        @pl.when(thread < groups)
        def _():
            if groups in _REGISTERS:
                plgpu.set_max_registers(_REGISTERS[groups][1], action="increase")
            for slot in range(stages):
                plgpu.barrier_arrive(empty.at[slot])
            each_piece(compute)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x_SK.shape[0], blocks * span), out_dtype),
        grid=(processors,),
        grid_names=("processor",),
        num_threads=groups + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((stages, widths[-1], DEPTH), jnp.bfloat16),
            plgpu.SMEM((stages, groups, 4, 256), jnp.uint16),
            plgpu.SMEM((stages, groups, 32), jnp.uint32),
            plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
            # jax's interpreter multiplies only what lies in shared memory.
            *([plgpu.SMEM((groups, ROWS, DEPTH), jnp.bfloat16)] if interpret else []),
        ],
        # Nothing here is both read and written by one thread, so no barriers of Pallas's own.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=True
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name="experts_gate_up" if gate else "experts_down",
    )(*tiles, x_SK, lanes, scales, bias_EN)
