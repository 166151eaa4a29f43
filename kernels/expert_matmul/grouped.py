"""The Pallas-Triton kernels: tiles of rows times packed experts, and the sum over the chosen.

One program computes `cols` rows r of both planes of an expert's matrix (see mxfp4.lanes) for the
`rows` activations of a tile: two accumulators, so that gate and up meet in registers. Weights are
the left operand: they are decoded in registers, which a Hopper tensor core reads its left operand
from, and only the activations pass through shared memory.

    acc[plane] [cols, rows] += weights[plane] [cols, lanes] @ x [lanes, rows]      for each place

Per step of K: 32 * groups columns, in 8 / lanes tiles of groups * lanes lanes, four places each.
"""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..mxfp4.codec import BLOCK
from ..mxfp4.in_kernel import scale_of, weight_of
from ..mxfp4.lanes import LANES, PLACES
from .swiglu import swiglu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """How one matmul is cut. Every number is a power of two, but for stages and split."""

    cols: int = 64  # weight rows of each plane in a program; at least 64 where weights are left
    groups: int = 8  # blocks of 32 columns in a step
    lanes: int = 4  # of each block in one dot; groups * lanes is the depth of a dot
    warps: int = 4
    stages: int = 3
    split: int = 1  # programs that share K; their sums are added in order, a launch later
    left: bool = True  # weights as the left operand


def _call(body, *, name, grid, out_shape, warps, stages, interpret):
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


# The order of activations in memory. "natural" is column order. Large batches permute them, so that
# a dot's tile of them is a long run (in natural order it is 16 bytes of every 64, and L2 moves
# sectors of 32: half of what it moved was thrown away):
#   "chunked"  in 128 columns, the 4 by 4 chunks of 8 transposed: a run for each place of a lane
#   "joined"   in 32 columns, 4 by 8 transposed: the four places of a lane next to each other, for
#              one dot over all of them
CHUNKED = PLACES * BLOCK


def ordered_width(width: int, order: str) -> int:
    """The width of activations in an order: whole blocks of 128 where chunked."""
    return -(-width // CHUNKED) * CHUNKED if order == "chunked" else width


def to_order(x_ND: Array, order: str) -> Array:
    """Activations in an order.

    chunked: value 128 i + 32 g + 8 p + j moves to 128 i + 32 p + 8 g + j, its own inverse
    joined: value 32 g + 8 p + j moves to 32 g + 4 j + p
    """
    rows, width = x_ND.shape
    if order == "chunked":
        x_ND = jnp.pad(x_ND, ((0, 0), (0, ordered_width(width, order) - width)))
        x = x_ND.reshape(rows, -1, PLACES, PLACES, LANES)
        return jnp.swapaxes(x, 2, 3).reshape(rows, -1)
    if order == "joined":
        x = x_ND.reshape(rows, -1, PLACES, LANES)
        return jnp.swapaxes(x, 2, 3).reshape(rows, -1)
    return x_ND


def _split(value_C, by):
    """Quotient and remainder by lax: the floor fix-up of // and % hides runs from Triton."""
    by_C = jnp.full_like(value_C, by)
    return jax.lax.div(value_C, by_C), jax.lax.rem(value_C, by_C)


def _place_of(col_C, order):
    """As to_order, of indices in a kernel."""
    if order == "natural":
        return col_C
    rest_C, j_C = _split(col_C, LANES)
    rest_C, p_C = _split(rest_C, PLACES)
    if order == "joined":
        return rest_C * BLOCK + j_C * PLACES + p_C
    i_C, g_C = _split(rest_C, PLACES)
    return i_C * CHUNKED + p_C * BLOCK + g_C * LANES + j_C


def _accumulate(x_ref, weights, expert, col_C, part, slot_R, live_R, shape, wide, order, interpret):
    """Both planes' float32 sums over this program's part of K.

    Joined, the four places of a tile are one dot, which Triton issues without waiting; else each
    is a dot of its own, and the compiler waits for it before the next overwrites its registers.
    """
    lanes_ref, scales_ref = weights
    _, _, groups, _, half = lanes_ref.shape
    lane_L = jnp.arange(shape.groups * shape.lanes)
    group_L, within_L = _split(lane_L, shape.lanes)
    steps = pl.cdiv(groups, shape.groups)
    whole = groups % shape.groups == 0
    even = half % shape.cols == 0

    def spread(lane):  # [L] -> broadcastable along the columns
        return lane[None, :] if shape.left else lane[:, None]

    col = col_C[:, None] if shape.left else col_C[None, :]
    tile = (shape.cols, lane_L.size) if shape.left else (lane_L.size, shape.cols)

    def position(i, place, first):  # of each lane of a tile in x
        if order == "natural":
            return (i * shape.groups + group_L) * BLOCK + place * LANES + first + within_L
        block_L, inner_L = _split(i * shape.groups + group_L, PLACES)
        return block_L * CHUNKED + place * BLOCK + inner_L * LANES + first + within_L

    def load_x(k_L, inside_L):  # [L, R] or [R, L]
        size = (k_L.size, live_R.size) if shape.left else (live_R.size, k_L.size)
        live, inside = (live_R[None, :], inside_L[:, None])
        where = slot_R[None, :], k_L[:, None]
        if not shape.left:
            live, inside = live_R[:, None], inside_L[None, :]
            where = slot_R[:, None], k_L[None, :]
        live = jnp.broadcast_to(live if whole else live & inside, size)
        return plt.load(x_ref.at[where], mask=live, other=jnp.zeros((), x_ref.dtype))

    def dot(w, x):
        pair = (w, x) if shape.left else (x, w)
        contract = (((1,), (0,)), ((), ()))
        return jax.lax.dot_general(*pair, contract, preferred_element_type=jnp.float32)

    def step(i, acc):
        at_L = i * shape.groups + group_L
        inside_L = at_L < groups
        masked = {}
        if not (whole and even):
            mask = spread(inside_L) & (col < half)
            masked = dict(mask=jnp.broadcast_to(mask, tile), other=jnp.uint16(0))
        pair = plt.load(scales_ref.at[expert, spread(at_L), col], **masked)
        factor = [scale_of(pair, plane, wide=wide, interpret=interpret) for plane in (0, 1)]
        acc = list(acc)
        for first in range(0, LANES, shape.lanes):
            lane = [
                plt.load(
                    lanes_ref.at[expert, plane, spread(at_L), spread(first + within_L), col],
                    **masked,
                )
                for plane in (0, 1)
            ]
            if order == "joined":
                k_K = i * (shape.groups * BLOCK) + jnp.arange(shape.groups * BLOCK)
                x = load_x(k_K, k_K < groups * BLOCK)
                for plane in (0, 1):
                    w = [
                        weight_of(lane[plane], factor[plane], p, wide=wide, interpret=interpret)
                        for p in range(PLACES)
                    ]
                    halves = [jnp.stack([w[0], w[2]], axis=-1), jnp.stack([w[1], w[3]], axis=-1)]
                    halves = [h.reshape(shape.cols, -1) for h in halves]
                    w = jnp.stack(halves, axis=-1).reshape(shape.cols, -1)
                    acc[plane] += dot(w, x)
                continue
            for place in range(PLACES):
                x = load_x(position(i, place, first), inside_L)
                for plane in (0, 1):
                    w = weight_of(lane[plane], factor[plane], place, wide=wide, interpret=interpret)
                    acc[plane] += dot(w, x)
        return tuple(acc)

    size = (shape.cols, live_R.size) if shape.left else (live_R.size, shape.cols)
    zero = jnp.zeros(size, jnp.float32)
    if shape.split == 1:
        return jax.lax.fori_loop(0, steps, step, (zero, zero))
    share = pl.cdiv(steps, shape.split)
    start = part * share
    stop = jnp.minimum(start + share, steps)
    return jax.lax.fori_loop(start, stop, step, (zero, zero))


def _across(shape, col_C, slot_R):
    """Indices [C, R] or [R, C] of an accumulator, as broadcastable (slot, column)."""
    if shape.left:
        return slot_R[None, :], col_C[:, None]
    return slot_R[:, None], col_C[None, :]


def gate_up(
    x_ND: Array,
    expert_T: Array,
    size_T: Array | None,
    row_S: Array | None,
    lanes: Array,
    scales: Array,
    bias_EP: Array,
    *,
    rows: int,
    chosen: int,
    shape: Shape,
    wide: bool,
    order: str,
    limit: float | None,
    alpha: float,
    interpret: bool,
) -> Array:
    """Hidden values [T * stride, F] of every slot; slots past a tile's size are not written.

    row_S: [T * rows] row (token * X + choice) of each slot; size_T: slots used of each tile.
    Both None: tile t is row t alone, and stride is 1.
    """
    tiles, ffn = expert_T.shape[0], lanes.shape[-1]
    stride = rows if row_S is not None else 1

    def body(*refs):
        expert_ref, *tile_refs, x_ref, lanes_ref, scales_ref, bias_ref, out_ref = refs
        tile, part = pl.program_id(1), pl.program_id(2)
        col_C = pl.program_id(0) * shape.cols + jnp.arange(shape.cols)
        expert = expert_ref[tile]

        # The id itself is compared, before any arithmetic on it.
        @pl.when((expert >= 0) & (expert < lanes_ref.shape[0]))
        def _():
            place_R = jnp.arange(rows)
            live_R = place_R < (tile_refs[0][tile] if tile_refs else 1)
            slot_R = tile * stride + place_R
            if tile_refs:
                row_R = plt.load(tile_refs[1].at[slot_R], mask=live_R, other=0)
            else:
                row_R = jnp.full((rows,), tile, jnp.int32)
            weights = lanes_ref, scales_ref
            acc = _accumulate(
                x_ref,
                weights,
                expert,
                col_C,
                part,
                row_R // chosen,
                live_R,
                shape,
                wide,
                order,
                interpret,
            )
            inside_C = col_C < ffn
            live, inside = _across(shape, inside_C, live_R)
            if shape.split > 1:
                slot, col = _across(shape, col_C, slot_R)
                for plane in (0, 1):
                    plt.store(out_ref.at[part, plane, slot, col], acc[plane], mask=live & inside)
                return
            bias = [_bias(bias_ref, expert, 2 * col_C + plane, inside_C) for plane in (0, 1)]
            gate, up = (
                sums + (b[:, None] if shape.left else b[None, :])
                for sums, b in zip(acc, bias, strict=True)
            )
            h = swiglu(gate, up, limit=limit, alpha=alpha)
            slot, col = _across(shape, _place_of(col_C, order), slot_R)
            plt.store(out_ref.at[slot, col], h.astype(out_ref.dtype), mask=live & inside)

    tile_args = () if row_S is None else (size_T, row_S)
    whole = jax.ShapeDtypeStruct((tiles * stride, ordered_width(ffn, order)), x_ND.dtype)
    parts = jax.ShapeDtypeStruct((shape.split, 2, tiles * stride, ffn), jnp.float32)
    out = _call(
        body,
        name="experts_gate_up",
        grid=(pl.cdiv(ffn, shape.cols), tiles, shape.split),
        out_shape=whole if shape.split == 1 else parts,
        warps=shape.warps,
        stages=shape.stages,
        interpret=interpret,
    )(expert_T, *tile_args, x_ND, lanes, scales, bias_EP)
    if shape.split == 1:
        return out
    return _activate(out, expert_T, bias_EP, whole, order, limit, alpha, interpret)


def _bias(bias_ref, expert, col_C, inside_C):
    zero = jnp.zeros((), bias_ref.dtype)
    return plt.load(bias_ref.at[expert, col_C], mask=inside_C, other=zero).astype(jnp.float32)


def _activate(parts_K2SF, expert_T, bias_EP, whole, order, limit, alpha, interpret):
    """The sums of each part of K added in order, biased and gated; a launch of its own."""
    split, _, slots, ffn = parts_K2SF.shape
    stride = slots // expert_T.shape[0]
    cols = min(512, pl.next_power_of_2(ffn))

    def body(parts_ref, expert_ref, bias_ref, out_ref):
        slot = pl.program_id(1)
        col_C = pl.program_id(0) * cols + jnp.arange(cols)
        expert = expert_ref[slot // stride]

        @pl.when((expert >= 0) & (expert < bias_ref.shape[0]))
        def _():
            inside_C = col_C < ffn
            gated = []
            for plane in (0, 1):
                total_C = _bias(bias_ref, expert, 2 * col_C + plane, inside_C)
                for part in range(split):
                    total_C += plt.load(
                        parts_ref.at[part, plane, slot, col_C], mask=inside_C, other=0.0
                    )
                gated.append(total_C)
            h = swiglu(*gated, limit=limit, alpha=alpha)
            to_C = _place_of(col_C, order)
            plt.store(out_ref.at[slot, to_C], h.astype(out_ref.dtype), mask=inside_C)

    return _call(
        body,
        name="experts_activate",
        grid=(pl.cdiv(ffn, cols), slots),
        out_shape=whole,
        warps=4,
        stages=2,
        interpret=interpret,
    )(parts_K2SF, expert_T, bias_EP)


def down(
    h_SF: Array,
    expert_T: Array,
    size_T: Array | None,
    lanes: Array,
    scales: Array,
    bias_ED: Array,
    *,
    rows: int,
    stride: int,
    shape: Shape,
    wide: bool,
    order: str,
    out_dtype: jnp.dtype,
    interpret: bool,
) -> Array:
    """[split, T * stride, D]: each part of K's sums of every slot, the bias in part 0."""
    tiles, half = expert_T.shape[0], lanes.shape[-1]

    def body(expert_ref, *refs):
        *size_ref, h_ref, lanes_ref, scales_ref, bias_ref, out_ref = refs
        tile, part = pl.program_id(1), pl.program_id(2)
        col_C = pl.program_id(0) * shape.cols + jnp.arange(shape.cols)
        expert = expert_ref[tile]

        @pl.when((expert >= 0) & (expert < lanes_ref.shape[0]))
        def _():
            place_R = jnp.arange(rows)
            live_R = place_R < (size_ref[0][tile] if size_ref else 1)
            slot_R = tile * stride + place_R
            weights = lanes_ref, scales_ref
            acc = _accumulate(
                h_ref,
                weights,
                expert,
                col_C,
                part,
                slot_R,
                live_R,
                shape,
                wide,
                order,
                interpret,
            )
            inside_C = col_C < half
            for plane in (0, 1):
                once_C = inside_C & (part == 0)
                bias_C = _bias(bias_ref, expert, plane * half + col_C, once_C)
                y = acc[plane] + (bias_C[:, None] if shape.left else bias_C[None, :])
                slot, col = _across(shape, plane * half + col_C, slot_R)
                live, inside = _across(shape, inside_C, live_R)
                plt.store(out_ref.at[part, slot, col], y.astype(out_dtype), mask=live & inside)

    return _call(
        body,
        name="experts_down",
        grid=(pl.cdiv(half, shape.cols), tiles, shape.split),
        out_shape=jax.ShapeDtypeStruct((shape.split, tiles * stride, 2 * half), out_dtype),
        warps=shape.warps,
        stages=shape.stages,
        interpret=interpret,
    )(expert_T, *(() if size_T is None else (size_T,)), h_SF, lanes, scales, bias_ED)


def combine(
    y_KSD: Array,
    slot_NX: Array,
    weights_NX: Array,
    *,
    direct: int | None = None,
    out_dtype: jnp.dtype,
    interpret: bool,
) -> Array:
    """[N, D]: sum over x, in order, of weights * (sum over the parts of K, in order) of a slot.

    Gathers: a row's bits depend on its own slots alone. Slot -1 adds nothing and reads nothing.
    direct: E. slot_NX then holds the ids themselves, and slots are rows.
    """
    parts, _, embed = y_KSD.shape
    tokens, chosen = slot_NX.shape
    rows = 1 if tokens <= 64 else 4
    cols = min(1024 // rows, pl.next_power_of_2(embed))

    def body(y_ref, slot_ref, weight_ref, out_ref):
        token_R = pl.program_id(1) * rows + jnp.arange(rows)
        col_C = pl.program_id(0) * cols + jnp.arange(cols)
        real_R, inside = token_R < tokens, (col_C < embed)[None, :]
        total = jnp.zeros((rows, cols), jnp.float32)
        for x in range(chosen):
            slot_R = plt.load(slot_ref.at[token_R, x], mask=real_R, other=-1)
            if direct is not None:
                here_R = (slot_R >= 0) & (slot_R < direct)
                slot_R = jnp.where(here_R, token_R * chosen + x, -1)
            weight_R = plt.load(weight_ref.at[token_R, x], mask=real_R, other=0.0)
            here = (slot_R >= 0)[:, None] & inside
            term = jnp.zeros((rows, cols), jnp.float32)
            for part in range(parts):
                y = plt.load(
                    y_ref.at[part, slot_R[:, None], col_C[None, :]],
                    mask=here,
                    other=jnp.zeros((), y_ref.dtype),
                )
                term += y.astype(jnp.float32)
            # A NaN weight of a row that is not here must not leak through the zeros.
            total += jnp.where(here, term * weight_R[:, None].astype(jnp.float32), 0.0)
        keep = real_R[:, None] & inside
        plt.store(out_ref.at[token_R[:, None], col_C[None, :]], total.astype(out_dtype), mask=keep)

    return _call(
        body,
        name="experts_combine",
        grid=(pl.cdiv(embed, cols), pl.cdiv(tokens, rows)),
        out_shape=jax.ShapeDtypeStruct((tokens, embed), out_dtype),
        warps=4,
        stages=2,
        interpret=interpret,
    )(y_KSD, slot_NX, weights_NX)
