"""The Mosaic GPU form, for Hopper and many tokens: schedule, two grouped matmuls, combine.

It has run on an NVIDIA H200 (2026-11-30, jax 0.11.2): equal to float64 within bfloat16's rounding,
and the same bits 50 times.

Rows are sorted by expert into slots and x is gathered into them once. There are no gaps but up to
the next multiple of 8. An expert's slots are cut into the fewest tiles of at most `widths[-1]` rows
and those into equal parts, so 270 rows are 136 + 136, not 192 + 80.
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

    def shared_bytes(self, rows: int) -> int:
        """Of the stages: tokens, weights and scales."""
        return self.stages * (rows * DEPTH * 2 + self.warpgroups * (ROWS * DEPTH // 2 + 128))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How one layer is computed at one number of tokens."""

    widths: tuple[int, ...]  # of a tile, in rows: multiples of 8 up to 256, ascending
    gate_up: Shape
    down: Shape
    partial: str = "bfloat16"  # dtype of the rows that combine reads


def fitted(widest: int) -> Shape:
    """As many stages as shared memory holds, 12 at most."""
    # 1 KB for barriers and alignment.
    return Shape(stages=min(12, (SHARED_BYTES - 1024) // Shape(stages=1).shared_bytes(widest)))


def heuristic(tokens: int, chosen: int, experts: int) -> Plan:
    """By the mean number of rows of an expert."""
    return candidates(tokens, chosen, experts)[0]


# Up to this mean of rows an expert: widths of tiles, the first of a line as `heuristic` takes it.
# A step of 64 columns took 0.44 us with tiles of some 75 rows, 0.59 with 136 and 0.71 with 176
# (gate_up at 512, 2048 and 8192 tokens: 8, 15 and 44 rounds of 45 steps), 0.25 us and 2.6 ns a row:
# few tiles count, each hardly wider than its rows. Every width costs a second of compiling.
# Measured: (8, 16, 24, 32, 64), (64, 72, 88, 128), (64, 112, 136, 160, 192) and
# (96, 136, 160, 176, 192), each at its size. The others come from that sum over tiles, for even and
# for uneven routing.
_WIDTHS = (
    (20, ((8, 16, 24, 32, 64), (16, 32, 64), (16, 24, 40, 72, 128))),
    (48, ((16, 32, 48, 80, 128), (24, 32, 40, 48, 96), (16, 32, 64))),
    (96, ((64, 72, 88, 128), (56, 64, 72, 88, 128), (32, 64, 80, 112, 160))),
    (384, ((64, 112, 136, 160, 192), (64, 128, 144, 160, 176, 192), (64, 120, 136, 152, 192))),
    (None, ((96, 136, 160, 176, 192), (64, 128, 144, 160, 176, 192), (112, 136, 152, 168, 192))),
)


def candidates(tokens: int, chosen: int, experts: int) -> list[Plan]:
    """Plans worth timing at this size, the most promising first.

    All have three computing warpgroups: with two, gate_up took 180 us, not 159 (20b, 512 tokens),
    425, not 401 (2048, tiles up to 256 rows wide) and 1,606, not 1,399 (8192). One warpgroup and
    three blocks a processor: 134 us at 32 tokens, not 109.
    """
    mean = tokens * chosen / experts
    found = next(widths for most, widths in _WIDTHS if most is None or mean <= most)
    plans = []
    for widths in found:
        shape = fitted(widths[-1])
        plans.append(Plan(widths=widths, gate_up=shape, down=shape))
    if mean > 384:
        # Rounds once less (error 1.6e-3, not 2.2e-3); combine took 101 us, not 56, at 8192 tokens.
        plans.append(dataclasses.replace(plans[0], partial="float32"))
    return plans


def require() -> None:
    """Raises NotImplementedError where the kernel cannot run or be compiled for."""
    device.require_nvidia("backend 'mosaic'")
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < (0, 11):
        raise NotImplementedError(
            f"backend 'mosaic' needs jax 0.11 or newer; this is {jax.__version__}. "
            "Use backend='triton'."
        )
    if device.capability() != "9.0":
        raise NotImplementedError(
            f"backend 'mosaic' is for Hopper, compute capability 9.0; this is "
            f"{device.capability()}. Use backend='triton'."
        )


def runs_here() -> bool:
    """Whether `require` would pass."""
    try:
        require()
    except NotImplementedError:
        return False
    return True


# Rows an expert, on average, from which on this beats the Triton kernels on the same layout. H200,
# us of a layer, Triton / Mosaic: 20b 64 tokens 182 / 219, 128 tokens (16 rows) 240 / 232; 120b 128
# tokens (4 rows) 530 / 696.
PAYS_FROM = 16


def pays(tokens: int, chosen: int, experts: int) -> bool:
    """Whether this many rows are faster here than with the Triton kernels on the same layout."""
    return tokens * chosen >= PAYS_FROM * experts


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
    total: int | None = None,
    plan: Plan | None = None,
    interpret: bool = False,
) -> Array:
    """As the reference, from mxfp4.fragments; x in bfloat16. plan None: `heuristic`, for
    `total` experts (None: those at hand).

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
        plan = heuristic(ids_NX.shape[0], ids_NX.shape[1], total or experts.count)
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


def sorted_rows(
    x_ND: Array, row_S: Array, size_G: Array, chosen: int, spare: int, *, interpret: bool
) -> Array:
    """[8 G + spare, D]: x of the token of each slot in use; other slots are not written.

    XLA's gather would fill every slot, and a slot that holds no row has garbage for its row.
    """
    embed = x_ND.shape[1]
    groups = size_G.shape[0]
    width = min(1024, pl.next_power_of_2(embed))

    def body(x_ref, row_ref, size_ref, out_ref):
        group = pl.program_id(0)
        first = group * ALIGN
        col_C = pl.program_id(1) * width + jnp.arange(width)
        size = size_ref[group]

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
        grid=(groups, pl.cdiv(embed, width)),
        out_shape=jax.ShapeDtypeStruct((groups * ALIGN + spare, embed), x_ND.dtype),
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
    groups = bound(ids_M.size, experts.count, ALIGN)
    _, size_G, row_S, slot_M, *parts = make_tiles(
        ids_M, experts.count, ALIGN, groups, widest=widest, interpret=interpret
    )
    tiles = tuple(parts)
    x_SD = sorted_rows(x_ND, row_S, size_G, chosen, widest, interpret=interpret)
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
