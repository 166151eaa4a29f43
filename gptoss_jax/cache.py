"""Keys and values of the past: whole for full layers, rings of `window` slots for sliding ones.

Every slot stores its position (-1: empty), and attention is told positions, so that one rule of
visibility serves both kinds. A ring keeps position p in slot p mod window:

    window 4, after positions 0..5:   slot 0 1 2 3
                                      pos  4 5 2 3
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .config import Config


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """One entry of `k` and `v` a layer: [B, K, S, H], S = capacity or the window.

    Annotated Any, since JAX also builds caches of what describes arrays (when it lowers ahead).
    """

    k: tuple[Any, ...]
    v: tuple[Any, ...]
    full_pos_BS: Int[Any, "B S"]  # int32
    ring_pos_BW: Int[Any, "B W"]  # int32
    length_B: Int[Any, " B"]  # int32: the position the next token takes

    @property
    def capacity(self) -> int:
        """Positions a full layer can hold."""
        return self.full_pos_BS.shape[1]


def make(config: Config, batch: int, capacity: int, dtype=jnp.bfloat16) -> Cache:
    """An empty cache for `batch` rows of at most `capacity` positions.

    Raises ValueError where capacity exceeds what the model was made for.
    """
    if not 1 <= capacity <= config.max_context:
        raise ValueError(
            f"capacity must lie in 1..{config.max_context} (the model's max_context); "
            f"got {capacity}."
        )

    def layer(i: int) -> Array:
        slots = config.window_of(i) or capacity
        return jnp.zeros((batch, config.kv_heads, slots, config.head_width), dtype)

    return Cache(
        k=tuple(map(layer, range(config.layers))),
        v=tuple(map(layer, range(config.layers))),
        full_pos_BS=jnp.full((batch, capacity), -1, jnp.int32),
        ring_pos_BW=jnp.full((batch, config.window), -1, jnp.int32),
        length_B=jnp.zeros(batch, jnp.int32),
    )


def store(slots_BKSH: Array, new_BTKH: Array, slot_BT: Int[Array, "B T"]) -> Array:
    """Writes new[b, t] into slots[b, :, slot[b, t]]; a slot of S or more is dropped.

    Callers send -1 (padding) as S: an index of -1 would wrap to the last slot even under "drop".
    """
    rows = jnp.arange(slot_BT.shape[0])[:, None]
    return slots_BKSH.at[rows, :, slot_BT].set(new_BTKH.astype(slots_BKSH.dtype), mode="drop")


def full_slots(positions_BT: Int[Array, "B T"], capacity: int) -> Int[Array, "B T"]:
    """Where a full layer keeps these positions; padding goes to `capacity`, which drops it."""
    return jnp.where(positions_BT >= 0, positions_BT, capacity)


def ring_slots(positions_BT: Int[Array, "B T"], window: int) -> Int[Array, "B T"]:
    """Where a ring keeps these positions; padding goes to `window`, which drops it.

    Of the positions of one chunk that share a slot only the last is kept, so that no two writes
    meet (the order of a scatter's writes is not defined).
    """
    last_B1 = jnp.max(positions_BT, axis=1, keepdims=True)
    kept = (positions_BT >= 0) & (positions_BT > last_B1 - window)
    return jnp.where(kept, positions_BT % window, window)


def store_positions(pos_BS: Array, positions_BT: Array, slot_BT: Array) -> Int[Array, "B S"]:
    """The slots' positions after `store` with the same slots.

    One position a row is a select, which XLA joins with what reads it; a scatter is three kernels.
    """
    if slot_BT.shape[1] == 1:
        return jnp.where(jnp.arange(pos_BS.shape[1]) == slot_BT, positions_BT, pos_BS)
    rows = jnp.arange(slot_BT.shape[0])[:, None]
    return pos_BS.at[rows, slot_BT].set(positions_BT, mode="drop")
