"""The Pallas-Triton kernels: tiles of rows times packed experts, and the sum over the chosen.

One program computes `cols` pairs of rows of an expert's matrix (see `packed`) for the `rows`
activations of a tile: two accumulators, so that gate and up meet in registers. Weights are the left
operand: they are decoded in registers, which a Hopper tensor core reads its left operand from, and
only the activations pass through shared memory.

    acc[plane] [cols, rows] += weights[plane] [cols, lanes] @ x [lanes, rows]      for each place

A step is 32 * groups columns of K.
"""

import dataclasses
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..mxfp4.codec import BLOCK
from ..mxfp4.in_kernel import weight_of
from .packed import Fragments, Lanes, ordered_width, place_of, split
from .swiglu import swiglu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """How one matmul is cut. Every number is a power of two, but for stages."""

    cols: int = 64  # weight rows of each plane in a program
    groups: int = 8  # blocks of 32 columns in a step; even for fragments
    lanes: int = 4  # of each block in one dot, whose depth is groups * lanes; of `Lanes` only
    warps: int = 4
    stages: int = 3
    parts: int = 1  # of K, side by side in a program: tiles of one row only, see `row`


class How(NamedTuple):
    """What every kernel here needs to know besides its arrays."""

    shape: Shape
    wide: bool
    order: str = "natural"
    interpret: bool = False


def call(body, *, name, grid, out_shape, warps, stages, interpret):
    with warnings.catch_warnings():
        # jax 0.11 announces the end of Pallas on Triton at every call.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return pl.pallas_call(
            body,
            name=name,
            grid=grid,
            out_shape=out_shape,
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        )


class Tiles(NamedTuple):
    """A schedule as the kernels take it; see routing.in_kernel. Slots are tile * rows + place."""

    expert_T: Array  # int32; outside [0, E): nothing to do
    size_T: Array  # int32: slots used
    row_S: Array  # int32: token * X + choice of each used slot


def accumulate(x_ref, weights, expert, col_C, slot_R, live_R, how, first=None):
    """Both planes' float32 sums [C, R] of pairs of weight rows times activations.

    expert: of all weight rows, or [C, 1] of each. first: (first_C, first_R), the blocks of 32 at
    which each weight row and each activation begin, of K cut into how.shape.parts.

    Joined, the four places of a tile are one dot, which Triton issues without waiting; else each
    is a dot of its own, and the compiler waits for it before the next overwrites its registers.
    """
    shape = how.shape
    lanes_ref, scales_ref = weights
    packed = packed_of(lanes_ref.shape, how)
    total, half = packed.total, packed.half
    steps = pl.cdiv(part_groups(total, shape), shape.groups)
    whole = total % (shape.groups * shape.parts) == 0
    everywhere = whole and half % shape.cols == 0 and jnp.ndim(expert) == 0
    # Of experts by row, those that are not here are not read: the id itself is compared.
    here = None if jnp.ndim(expert) == 0 else (expert >= 0) & (expert < lanes_ref.shape[0])
    col = col_C[:, None]
    tile = (col_C.size, packed.depth)
    exact = dict(wide=how.wide, interpret=how.interpret)

    def load_x(k_L, block_L):  # [L, R]; masked by block, not by column: runs stay runs
        k, block = k_L[:, None], block_L[:, None]
        if first is not None:
            k = k + first[1][None, :] * BLOCK
            block = block + first[1][None, :]
        live = live_R[None, :] if whole else live_R[None, :] & (block < total)
        live = jnp.broadcast_to(live, (k_L.size, live_R.size))
        return plt.load(x_ref.at[slot_R[None, :], k], mask=live, other=jnp.zeros((), x_ref.dtype))

    def dot(w, x):
        contract = (((1,), (0,)), ((), ()))
        return jax.lax.dot_general(w, x, contract, preferred_element_type=jnp.float32)

    def step(i, acc):
        acc = list(acc)
        for run in packed.runs:
            block_L = packed.block(i, run)
            at = block_L[None, :] if first is None else block_L[None, :] + first[0][:, None]
            masked, scaled = {}, {}
            if not everywhere:
                mask = at < total if half % shape.cols == 0 else (at < total) & (col < half)
                mask = mask if here is None else mask & here
                masked = dict(mask=jnp.broadcast_to(mask, tile), other=jnp.uint16(0))
                some = tile if block_L.size > 1 else (col_C.size, 1)
                scaled = dict(
                    mask=jnp.broadcast_to(mask, some), other=jnp.zeros((), scales_ref.dtype)
                )
            scale = plt.load(scales_ref.at[expert, *packed.scale_at(at, col)], **scaled)
            factor = packed.factors(scale, **exact)
            index = [packed.lane_at(at, col, run, plane) for plane in packed.loads]
            lanes = [plt.load(lanes_ref.at[expert, *each], **masked) for each in index]

            def weights_at(place, plane, lanes=lanes, factor=factor):
                lane = lanes[plane % len(lanes)]
                factor_CL = factor[plane][place]
                return weight_of(lane, factor_CL, packed.code(place, plane), **exact)

            if how.order == "joined":
                k_K = i * (shape.groups * BLOCK) + jnp.arange(shape.groups * BLOCK)
                x = load_x(k_K, split(k_K, BLOCK)[0])
                for plane in (0, 1):
                    w = [weights_at(place, plane) for place in range(packed.places)]
                    halves = [jnp.stack([w[0], w[2]], axis=-1), jnp.stack([w[1], w[3]], axis=-1)]
                    halves = [h.reshape(shape.cols, -1) for h in halves]
                    w = jnp.stack(halves, axis=-1).reshape(shape.cols, -1)
                    acc[plane] += dot(w, x)
                continue
            for place in range(packed.places):
                x = load_x(packed.columns(i, run, place), block_L)
                for plane in (0, 1):
                    acc[plane] += dot(weights_at(place, plane), x)
        return tuple(acc)

    zero = jnp.zeros((col_C.size, live_R.size), jnp.float32)
    return jax.lax.fori_loop(0, steps, step, (zero, zero))


def packed_of(blocks: tuple[int, ...], how: How) -> Lanes | Fragments:
    """How weights of this shape are read: lanes have five axes, flat fragments four."""
    if len(blocks) == 4:
        return Fragments(blocks, how.shape.groups, how.order)
    return Lanes(blocks, how.shape.groups, how.shape.lanes, how.order)


def part_groups(groups: int, shape: Shape) -> int:
    """Blocks of K in each part: whole steps, so that only the last part has a tail."""
    if shape.parts == 1:
        return groups
    return pl.cdiv(pl.cdiv(groups, shape.parts), shape.groups) * shape.groups


def gate_up(
    x_ND: Array,
    tiles: Tiles,
    lanes: Array,
    scales: Array,
    bias_EP: Array,
    *,
    rows: int,
    chosen: int,
    how: How,
    limit: float | None,
    alpha: float,
) -> Array:
    """Hidden values [T * rows, F] of every slot; slots past a tile's size are not written."""
    count, ffn, shape = tiles.expert_T.shape[0], packed_of(lanes.shape, how).half, how.shape

    def body(expert_ref, size_ref, row_ref, x_ref, lanes_ref, scales_ref, bias_ref, out_ref):
        tile = pl.program_id(1)
        col_C = pl.program_id(0) * shape.cols + jnp.arange(shape.cols)
        expert = expert_ref[tile]

        # The id itself is compared, before any arithmetic on it.
        @pl.when((expert >= 0) & (expert < lanes_ref.shape[0]))
        def _():
            live_R = jnp.arange(rows) < size_ref[tile]
            slot_R = tile * rows + jnp.arange(rows)
            row_R = plt.load(row_ref.at[slot_R], mask=live_R, other=0)
            weights = lanes_ref, scales_ref
            acc = accumulate(x_ref, weights, expert, col_C, row_R // chosen, live_R, how)
            inside_C = col_C < ffn
            gate, up = (
                acc[plane] + bias_at(bias_ref, expert, 2 * col_C + plane, inside_C)[:, None]
                for plane in (0, 1)
            )
            h = swiglu(gate, up, limit=limit, alpha=alpha)
            at = out_ref.at[slot_R[None, :], place_of(col_C, how.order)[:, None]]
            plt.store(at, h.astype(out_ref.dtype), mask=live_R[None, :] & inside_C[:, None])

    return call(
        body,
        name="experts_gate_up",
        grid=(pl.cdiv(ffn, shape.cols), count),
        out_shape=jax.ShapeDtypeStruct((count * rows, ordered_width(ffn, how.order)), x_ND.dtype),
        warps=shape.warps,
        stages=shape.stages,
        interpret=how.interpret,
    )(tiles.expert_T, tiles.size_T, tiles.row_S, x_ND, lanes, scales, bias_EP)


def bias_at(bias_ref, expert, col_C, inside_C):
    """float32 [C]; 0 where there is no such column."""
    zero = jnp.zeros((), bias_ref.dtype)
    return plt.load(bias_ref.at[expert, col_C], mask=inside_C, other=zero).astype(jnp.float32)


def down(
    h_SF: Array,
    tiles: Tiles,
    lanes: Array,
    scales: Array,
    bias_ED: Array,
    *,
    rows: int,
    how: How,
    out_dtype: jnp.dtype,
) -> Array:
    """[T * rows, D]: the sums of every slot and the bias, not yet weighted."""
    count, packed, shape = tiles.expert_T.shape[0], packed_of(lanes.shape, how), how.shape
    half = packed.half

    def body(expert_ref, size_ref, h_ref, lanes_ref, scales_ref, bias_ref, out_ref):
        tile = pl.program_id(1)
        col_C = pl.program_id(0) * shape.cols + jnp.arange(shape.cols)
        expert = expert_ref[tile]

        @pl.when((expert >= 0) & (expert < lanes_ref.shape[0]))
        def _():
            live_R = jnp.arange(rows) < size_ref[tile]
            slot_R = tile * rows + jnp.arange(rows)
            weights = lanes_ref, scales_ref
            acc = accumulate(h_ref, weights, expert, col_C, slot_R, live_R, how)
            inside_C = col_C < half
            for plane in (0, 1):
                to_C = packed.row_of(col_C, plane, half)
                bias_C = bias_at(bias_ref, expert, to_C, inside_C)
                y = (acc[plane] + bias_C[:, None]).astype(out_dtype)
                at = out_ref.at[slot_R[None, :], to_C[:, None]]
                plt.store(at, y, mask=live_R[None, :] & inside_C[:, None])

    return call(
        body,
        name="experts_down",
        grid=(pl.cdiv(half, shape.cols), count),
        out_shape=jax.ShapeDtypeStruct((count * rows, 2 * half), out_dtype),
        warps=shape.warps,
        stages=shape.stages,
        interpret=how.interpret,
    )(tiles.expert_T, tiles.size_T, h_SF, lanes, scales, bias_ED)


def combine(
    y_SD: Array,
    slot_M: Array,
    weights_NX: Array,
    residual_ND: Array | None,
    *,
    out_dtype: jnp.dtype,
    interpret: bool,
) -> Array:
    """[N, D]: residual + the sum over x, in order, of weights times a slot's row; rounded once.

    Gathers: a row's bits depend on its own slots alone. Slot -1 adds nothing and reads nothing.
    """
    embed = y_SD.shape[1]
    tokens, chosen = weights_NX.shape
    rows = 1 if tokens <= 64 else 4
    cols = min(1024 // rows, pl.next_power_of_2(embed))

    def body(y_ref, slot_ref, weight_ref, *refs):
        *residual_ref, out_ref = refs
        row = pl.program_id(1)
        token_R = row * rows + jnp.arange(rows)
        col_C = pl.program_id(0) * cols + jnp.arange(cols)
        real_R, inside = token_R < tokens, (col_C < embed)[None, :]
        at, keep = (token_R[:, None], col_C[None, :]), real_R[:, None] & inside
        total = jnp.zeros((rows, cols), jnp.float32)
        for x in range(chosen):
            slot_R = plt.load(slot_ref.at[token_R * chosen + x], mask=real_R, other=-1)
            weight_R = plt.load(weight_ref.at[token_R, x], mask=real_R, other=0.0)
            here = (slot_R >= 0)[:, None] & inside
            zero = jnp.zeros((), y_ref.dtype)
            y = plt.load(y_ref.at[slot_R[:, None], col_C[None, :]], mask=here, other=zero)
            term = y.astype(jnp.float32) * weight_R[:, None].astype(jnp.float32)
            # A NaN weight of a row that is not here must not leak through the zeros.
            total += jnp.where(here, term, 0.0)
        for ref in residual_ref:
            zero = jnp.zeros((), ref.dtype)
            total += plt.load(ref.at[at], mask=keep, other=zero).astype(jnp.float32)
        plt.store(out_ref.at[at], total.astype(out_dtype), mask=keep)

    return call(
        body,
        name="experts_combine",
        grid=(pl.cdiv(embed, cols), pl.cdiv(tokens, rows)),
        out_shape=jax.ShapeDtypeStruct((tokens, embed), out_dtype),
        warps=4,
        stages=2,
        interpret=interpret,
    )(y_SD, slot_M, weights_NX, *(() if residual_ND is None else (residual_ND,)))
