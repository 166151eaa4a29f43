"""The form for every backend: sorted tiles, each with the one expert that its rows chose.

Work and memory follow the chosen rows, not E: at one token X experts are decoded and no other
weight is read. Tiles run one after another, so one decoded expert is held at a time.
"""

import jax
import jax.numpy as jnp
from jax import Array

from ..routing import combine, make_tiles
from .swiglu import swiglu_of_rows
from .weights import ExpertWeights

MOST_ROWS = 128
# A batch goes through every dense expert where that costs at most this many times the chosen ones.
EVERY_EXPERT_RATIO = 4


def expert_matmul(
    x_ND: Array,
    ids_NX: Array,
    weights_NX: Array,
    experts: ExpertWeights,
    *,
    limit: float | None,
    alpha: float,
    out_dtype: jnp.dtype,
) -> Array:
    """As the reference, of the chosen rows alone. Differentiable where the layout is dense.

    Dense, with few experts and a batch of at least E tokens, every token goes through every expert
    in two large matmuls: that is what training a small model wants (no sort, gradients without
    scatter), and it costs E / X <= 4 times the FLOPs.
    """
    chosen = ids_NX.shape[1]
    few = experts.count <= EVERY_EXPERT_RATIO * chosen and x_ND.shape[0] >= experts.count
    form = _every_expert if experts.layout == "dense" and few else _tiles
    out_ND = form(x_ND, ids_NX, weights_NX, experts, limit, alpha)
    return out_ND.astype(out_dtype)


def _einsum(pattern: str, x: Array, w: Array) -> Array:
    """float32; a float32 product stays one (a GPU would take tf32 and no type would show it)."""
    highest = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(
        pattern, x, w.astype(x.dtype), precision=highest, preferred_element_type=jnp.float32
    )


def _every_expert(x_ND, ids_NX, weights_NX, experts, limit, alpha):
    h_NEP = _einsum("ND,EPD->NEP", x_ND, experts.gate_up)
    h_NEP = h_NEP + experts.gate_up_bias.astype(jnp.float32)
    h_NEF = swiglu_of_rows(h_NEP, limit=limit, alpha=alpha)
    y_NED = _einsum("NEF,EDF->NED", h_NEF.astype(x_ND.dtype), experts.down)
    y_NED = y_NED + experts.down_bias.astype(jnp.float32)
    out_ND = jnp.zeros(x_ND.shape, jnp.float32)
    for x in range(ids_NX.shape[1]):
        here_N = (ids_NX[:, x] >= 0) & (ids_NX[:, x] < experts.count)
        row_N11 = jnp.where(here_N, ids_NX[:, x], 0)[:, None, None]
        chosen_ND = jnp.take_along_axis(y_NED, row_N11, axis=1)[:, 0]
        term_ND = weights_NX[:, x, None].astype(jnp.float32) * chosen_ND
        out_ND = out_ND + jnp.where(here_N[:, None], term_ND, 0.0)
    return out_ND


def tile_rows(rows: int, experts: int) -> int:
    """About the mean number of rows of an expert, as a power of two: 1 for one token."""
    mean = max(1, rows // experts)
    return min(MOST_ROWS, 1 << (mean - 1).bit_length())


def _tiles(x_ND, ids_NX, weights_NX, experts, limit, alpha):
    rows = tile_rows(ids_NX.size, experts.count)
    tiles = make_tiles(ids_NX, experts.count, rows)

    def one(_, tile):
        expert, row_R = tile
        computed_RD = jax.lax.cond(expert >= 0, _one_tile, _nothing, x_ND, row_R, expert)
        return None, computed_RD

    def _one_tile(x_ND, row_R, expert):
        gate_up_PD = experts.matrix("gate_up", expert, x_ND.dtype)
        down_DF = experts.matrix("down", expert, x_ND.dtype)
        token_R = jnp.where(row_R >= 0, row_R // ids_NX.shape[1], 0)
        h_RP = _einsum("RD,PD->RP", x_ND[token_R], gate_up_PD)
        h_RP = h_RP + experts.gate_up_bias[expert].astype(jnp.float32)
        h_RF = swiglu_of_rows(h_RP, limit=limit, alpha=alpha).astype(x_ND.dtype)
        y_RD = _einsum("RF,DF->RD", h_RF, down_DF)
        return y_RD + experts.down_bias[expert].astype(jnp.float32)

    def _nothing(x_ND, row_R, expert):
        return jnp.zeros((rows, x_ND.shape[1]), jnp.float32)

    _, y_TRD = jax.lax.scan(one, None, (tiles.expert_T, tiles.row_TR))
    return combine(y_TRD.reshape(-1, x_ND.shape[1]), tiles.slot_NX, weights_NX)
