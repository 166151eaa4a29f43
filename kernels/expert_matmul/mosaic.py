"""The Mosaic GPU form, for Hopper and many tokens: schedule, two grouped matmuls, combine.

Nothing here has run on a GPU yet: it compiles for an H200, agrees with float64 when interpreted,
and `backend=None` does not choose it.

Rows are sorted by expert into slots and x is gathered into them once. Large batches leave no gaps
but up to the next multiple of 8, and cut an expert's slots into the fewest tiles of at most
`widths[-1]` rows and those into equal parts, so 270 rows are 136 + 136, not 256 + 16. Small ones
give every tile `widths[-1]` slots, which needs no second step of scheduling.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from .. import device
from ..mxfp4.fragments import DEPTH, ROWS
from ..routing import bound
from ..routing.in_kernel import make_tiles
from . import grouped
from .weights import ExpertWeights

ALIGN = 8  # rows: the swizzle's period, where a copy may start
SHARED_BYTES = 232448  # what one block may have on Hopper


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """How one matmul is cut."""

    warpgroups: int = 3  # that compute, 64 weight rows each
    stages: int = 5  # steps of 64 columns in shared memory
    blocks: int = 1  # on a processor

    def shared_bytes(self, rows: int) -> int:
        """Of the stages: tokens, weights and scales."""
        return self.stages * (rows * DEPTH * 2 + self.warpgroups * (ROWS * DEPTH // 2 + 128))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How one layer is computed at one number of tokens."""

    widths: tuple[int, ...]  # of a tile, in rows: multiples of 8 up to 256, ascending
    gate_up: Shape
    down: Shape
    even: bool = True  # tiles of an expert in equal parts, slots without gaps
    partial: str = "bfloat16"  # dtype of the rows that combine reads


def fitted(warpgroups: int, widest: int, blocks: int = 1) -> Shape:
    """As many stages as shared memory holds, 12 at most."""
    one = Shape(warpgroups=warpgroups, stages=1).shared_bytes(widest)
    # 1 KB for barriers and alignment.
    stages = min(12, (SHARED_BYTES // blocks - 1024) // one)
    return Shape(warpgroups=warpgroups, stages=stages, blocks=blocks)


def _plan(widths: tuple[int, ...], gate_up=(3,), down=(3,), **other) -> Plan:
    """gate_up, down: computing warpgroups, and blocks on a processor where not one."""
    shapes = (fitted(n, widths[-1], *blocks) for n, *blocks in (gate_up, down))
    return Plan(widths=widths, **dict(zip(("gate_up", "down"), shapes, strict=True)), **other)


# Below 64 rows a tile the decoding of weights, not the tensor core, fills a step. Every width costs
# a second of compiling. Equal parts of many rows are between half and all of the widest.
FEW, SOME = (16, 32, 64), (64, 72, 88, 128)
MANY, MOST = (64, 112, 136, 160, 192), (96, 136, 160, 176, 192)


def heuristic(tokens: int, chosen: int, experts: int) -> Plan:
    """By the mean number of rows of an expert; counted and compiled, not measured."""
    return candidates(tokens, chosen, experts)[0]


def candidates(tokens: int, chosen: int, experts: int) -> list[Plan]:
    """Plans worth timing at this size, the most promising first."""
    mean = tokens * chosen / experts
    if tokens <= 128:
        widths = (8,) if tokens <= 8 else (8, 16, 32)
        # One computing warpgroup and as many blocks as registers allow (60 a thread with one
        # width, 74 with three): the finest pieces.
        small = (1, 4 if tokens <= 8 else 3)
        return [
            _plan(widths, gate_up=small, down=small, even=False),
            _plan(widths, down=small, even=False),
            _plan(widths, even=False),
        ]
    if mean <= 96:
        widths = FEW if mean <= 32 else SOME
        return [
            _plan(widths),
            _plan(widths, gate_up=(2,)),
            _plan(widths, gate_up=(2,), down=(2,)),
        ]
    widths = MANY if mean <= 512 else MOST
    return [
        _plan(widths),
        _plan((64, 128, 144, 192, 256), gate_up=(2,), down=(2,)),
        _plan((64, 96, 128)),
        _plan(widths, partial="float32"),
    ]


def require() -> None:
    """Raises NotImplementedError where the kernel cannot run or be compiled for."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < (0, 11):
        raise NotImplementedError(
            f"backend 'mosaic' needs jax 0.11 or newer; this is {jax.__version__}. "
            "Use backend='triton'."
        )
    device.require_nvidia("backend 'mosaic'")
    if jax.default_backend() != "gpu":
        return  # compiled ahead of time, for a Hopper
    gpu = jax.devices()[0]
    if gpu.compute_capability != "9.0":
        raise NotImplementedError(
            f"backend 'mosaic' is for Hopper, compute capability 9.0; {gpu.device_kind} has "
            f"{gpu.compute_capability}. Use backend='triton'."
        )


def expert_matmul(
    x_ND: Array,
    ids_NX: Array,
    weights_NX: Array,
    experts: ExpertWeights,
    *,
    limit: float | None,
    alpha: float,
    out_dtype: jnp.dtype,
    residual_ND: Array | None = None,
    plan: Plan | None = None,
    interpret: bool = False,
) -> Array:
    """As the reference, from mxfp4.fragments; x in bfloat16. plan None: `heuristic`.

    residual_ND: added to the sum in float32, before the only rounding.
    interpret: on a CPU, with jax's simulator of shared memory and barriers; small shapes only.

    Raises:
        NotImplementedError: for jax before 0.11, a device that is no Hopper, activations that are
            not bfloat16, biases that are neither bfloat16 nor float32.
    """
    if not interpret:
        require()
    if x_ND.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"mosaic experts multiply bfloat16 activations; got {x_ND.dtype}. Use backend='xla'."
        )
    for name in ("gate_up_bias", "down_bias"):
        dtype = getattr(experts, name).dtype
        if dtype not in (jnp.bfloat16, jnp.float32):
            raise NotImplementedError(f"mosaic experts add bfloat16 or float32 biases; got {dtype}")
    if plan is None:
        plan = heuristic(ids_NX.shape[0], ids_NX.shape[1], experts.count)
    return _layer(
        x_ND,
        ids_NX,
        weights_NX,
        experts,
        residual_ND,
        limit=limit,
        alpha=alpha,
        out_dtype=out_dtype,
        plan=plan,
        processors=2 if interpret else _processors(),
        interpret=interpret,
    )


def _processors() -> int:
    """Of the GPU that runs here; an H200's where there is none to ask."""
    return getattr(jax.devices()[0], "core_count", 132) if jax.default_backend() == "gpu" else 132


def tiles_of(expert_G: Array, experts: int, widest: int, count: int) -> tuple[Array, ...]:
    """expert_T, start_T (in groups of 8 slots), size_T (in slots) of tiles up to `widest` rows.

    expert_G: the expert of each group of 8 slots, ascending, -1 past the end.

    >>> tiles_of(jnp.array([0, 0, 0, 2, -1]), 3, 16, 4)       # 3 groups in tiles of at most 2
    expert 0 0 2 -1, start 0 2 3 0, size 16 8 8 0
    """
    expert_E = jnp.arange(experts, dtype=jnp.int32)
    real_GE = expert_G[:, None] >= 0
    groups_E = jnp.sum(expert_G[:, None] == expert_E, axis=0, dtype=jnp.int32)
    first_E = jnp.sum(real_GE & (expert_G[:, None] < expert_E), axis=0, dtype=jnp.int32)
    most = widest // ALIGN
    tiles_E = (groups_E + (most - 1)) // most
    share_E = (groups_E + jnp.maximum(tiles_E, 1) - 1) // jnp.maximum(tiles_E, 1)
    before_E = jnp.sum(jnp.where(expert_E[:, None] > expert_E, tiles_E, 0), axis=1)
    tile_T = jnp.arange(count, dtype=jnp.int32)
    rank_TE = tile_T[:, None] - before_E
    here_TE = (rank_TE >= 0) & (rank_TE < tiles_E)
    start_TE = first_E + rank_TE * share_E
    size_TE = jnp.minimum(share_E, groups_E - rank_TE * share_E) * ALIGN
    expert_T = jnp.sum(jnp.where(here_TE, expert_E + 1, 0), axis=1, dtype=jnp.int32) - 1
    start_T = jnp.sum(jnp.where(here_TE, start_TE, 0), axis=1, dtype=jnp.int32)
    size_T = jnp.sum(jnp.where(here_TE, size_TE, 0), axis=1, dtype=jnp.int32)
    return expert_T, start_T, size_T


def sorted_rows(
    x_ND: Array,
    row_S: Array,
    size_G: Array,
    chosen: int,
    group: int,
    spare: int,
    *,
    interpret: bool,
) -> Array:
    """[G * group + spare, D]: x of the token of each slot in use; other slots are not written.

    XLA's gather would fill every slot, and a slot that holds no row has garbage for its row.
    """
    embed = x_ND.shape[1]
    slots = size_G.shape[0] * group
    width = min(1024, pl.next_power_of_2(embed))

    def body(x_ref, row_ref, size_ref, out_ref):
        first = pl.program_id(0) * ALIGN
        col_C = pl.program_id(1) * width + jnp.arange(width)
        size = size_ref[jax.lax.div(first, group)] - jax.lax.rem(first, group)

        @pl.when(size > 0)
        def _():
            place_R = jnp.arange(ALIGN)
            row_R = plt.load(row_ref.at[first + place_R], mask=place_R < size, other=0)
            token_R = jax.lax.div(row_R, jnp.full_like(row_R, chosen))
            live = (place_R < size)[:, None] & (col_C < embed)[None, :]
            zero = jnp.zeros((), x_ref.dtype)
            x = plt.load(x_ref.at[token_R[:, None], col_C[None, :]], mask=live, other=zero)
            plt.store(out_ref.at[first + place_R[:, None], col_C[None, :]], x, mask=live)

    return grouped.call(
        body,
        name="experts_sort",
        grid=(slots // ALIGN, pl.cdiv(embed, width)),
        out_shape=jax.ShapeDtypeStruct((slots + spare, embed), x_ND.dtype),
        warps=4,
        stages=2,
        interpret=interpret,
    )(x_ND, row_S, size_G)


# A jit of its own: a model of 24 layers then traces the kernels once.
@functools.partial(
    jax.jit, static_argnames=("limit", "alpha", "out_dtype", "plan", "processors", "interpret")
)
def _layer(
    x_ND,
    ids_NX,
    weights_NX,
    experts,
    residual_ND,
    *,
    limit,
    alpha,
    out_dtype,
    plan,
    processors,
    interpret,
):
    from .mosaic_kernel import matmul  # needs jax 0.11

    chosen, widest = ids_NX.shape[1], plan.widths[-1]
    ids_M = ids_NX.reshape(-1)
    group = ALIGN if plan.even else widest
    groups = bound(ids_M.size, experts.count, group)
    expert_G, size_G, row_S, slot_M = make_tiles(
        ids_M, experts.count, group, groups, interpret=interpret
    )
    if plan.even:
        most = bound(ids_M.size, experts.count, widest)
        tiles = tiles_of(expert_G, experts.count, widest, most)
    else:
        tiles = expert_G, None, size_G
    spare = widest if plan.even else 0
    x_SD = sorted_rows(x_ND, row_S, size_G, chosen, group, spare, interpret=interpret)
    common = dict(
        widths=plan.widths,
        wide=experts.layout == "mosaic_wide",
        processors=processors,
        interpret=interpret,
    )
    h_SF = matmul(
        x_SD,
        tiles,
        experts.gate_up_blocks,
        experts.gate_up_scales,
        experts.gate_up_bias,
        shape=plan.gate_up,
        gate=(limit, alpha),
        out_dtype=x_ND.dtype,
        **common,
    )
    y_SD = matmul(
        h_SF,
        tiles,
        experts.down_blocks,
        experts.down_scales,
        experts.down_bias,
        shape=plan.down,
        gate=None,
        out_dtype=jnp.dtype(plan.partial),
        **common,
    )
    return grouped.combine(
        y_SD,
        slot_M,
        weights_NX,
        residual_ND,
        out_dtype=out_dtype,
        interpret=interpret,
    )
