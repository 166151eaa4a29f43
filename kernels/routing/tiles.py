"""Rows sorted by expert into tiles of one expert each: the schedule of a grouped matmul.

With R rows a tile and ids [[2, 0], [2, 9], [0, 2]] of E = 3 experts, R = 2 (9 is not here):

    expert_T   0        2        2        -1 ...
    rows       0 4      1 2      5 .
               (row r is token r // X, choice r % X)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


class Tiles(NamedTuple):
    """T tiles of R rows. T is a static bound; tiles beyond the last used one have expert -1."""

    expert_T: Int32[Array, " T"]  # -1: nothing to do
    row_TR: Int32[Array, "T R"]  # token * X + choice; -1: padding
    slot_NX: Int32[Array, "N X"]  # tile * R + place of each row; -1: its id is not here


def bound(rows: int, experts: int, tile_rows: int) -> int:
    """Tiles that suffice for any distribution of rows: each used expert leaves one tile unfull."""
    return max(1, (rows + min(experts, rows) * (tile_rows - 1)) // tile_rows)


def make_tiles(ids_NX: Int32[Array, "N X"], experts: int, tile_rows: int) -> Tiles:
    """Groups rows by expert, in order of row inside an expert: stable, so equal from run to run.

    Ids outside [0, experts) get no tile. They are found by comparing the id itself, before any
    arithmetic: -1 // 32 is -1 here and 0 elsewhere, and at[-1] writes the last element.
    """
    rows = ids_NX.size
    count = bound(rows, experts, tile_rows)
    ids_M = ids_NX.reshape(-1)
    here_M = (ids_M >= 0) & (ids_M < experts)
    id_M = jnp.where(here_M, ids_M, experts)
    onehot_ME = (id_M[:, None] == jnp.arange(experts, dtype=jnp.int32)).astype(jnp.int32)
    before_ME = jnp.cumsum(onehot_ME, axis=0) - onehot_ME  # earlier rows of the same expert
    rank_M = jnp.sum(before_ME * onehot_ME, axis=1)
    tiles_E = (onehot_ME.sum(axis=0) + tile_rows - 1) // tile_rows
    end_E = jnp.cumsum(tiles_E)
    first_M = jnp.sum((end_E - tiles_E) * onehot_ME, axis=1)
    slot_M = jnp.where(here_M, first_M * tile_rows + rank_M, -1)
    tile_T = jnp.arange(count, dtype=jnp.int32)
    expert_T = jnp.sum(tile_T[:, None] >= end_E, axis=1, dtype=jnp.int32)
    expert_T = jnp.where(expert_T < experts, expert_T, -1)
    # Each slot is written by one row at most; rows that are not here go past the end and drop.
    place_M = jnp.where(here_M, slot_M, count * tile_rows)
    row_S = jnp.full(count * tile_rows, -1, jnp.int32)
    row_S = row_S.at[place_M].set(jnp.arange(rows, dtype=jnp.int32), mode="drop")
    return Tiles(
        expert_T=expert_T,
        row_TR=row_S.reshape(count, tile_rows),
        slot_NX=slot_M.astype(jnp.int32).reshape(ids_NX.shape),
    )


def combine(rows_SD: Array, slot_NX: Int32[Array, "N X"], weights_NX: Array) -> Array:
    """float32 [N, D]: the sum over x, in that order, of weight times row; slot -1 adds nothing.

    A gather and a sum: no scatter, so a row's bits do not depend on the other rows.
    """
    out_ND = jnp.zeros((slot_NX.shape[0], rows_SD.shape[-1]), jnp.float32)
    for x in range(slot_NX.shape[1]):
        here_N = slot_NX[:, x] >= 0
        row_ND = rows_SD[jnp.where(here_N, slot_NX[:, x], 0)].astype(jnp.float32)
        term_ND = weights_NX[:, x, None].astype(jnp.float32) * row_ND
        out_ND = out_ND + jnp.where(here_N[:, None], term_ND, 0.0)
    return out_ND
