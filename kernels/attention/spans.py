"""Which slots a query, or which blocks of slots a tile of queries, has to look at."""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from .reference import visible


def spans(
    q_pos_BT: Int[Array, "B T"],
    k_pos_BS: Int[Array, "B S"],
    *,
    window: int | None,
    queries: int,
    keys: int,
) -> Int[Array, "B tiles 2"]:
    """For each tile of `queries` queries, first and past-the-last of its blocks of `keys` slots.

    Outside the span nothing is visible to the tile; inside it a block may still hold nothing. It
    is found from the positions and not from T and S, so one rule serves causal prefill (half of
    the square), sliding layers (T x window), a cache of which little is filled, a chunk that
    continues it, and rings. A tile that sees nothing has the span (0, 0).

        T = S = 8, window 3, tiles of 2, blocks of 2:      spans
            #.......                                       0 1
            ##......
            ###.....                                       0 2
            .###....
            ..###...                                       1 3
            ...###..
            ....###.                                       2 4
            .....###
    """
    far = jnp.iinfo(jnp.int32).max
    q_pos = _blocks(q_pos_BT, queries)
    q_first = jnp.min(jnp.where(q_pos >= 0, q_pos, far), axis=-1)[:, :, None]
    q_last = jnp.max(q_pos, axis=-1)[:, :, None]
    k_pos = _blocks(k_pos_BS, keys)
    k_first = jnp.min(jnp.where(k_pos >= 0, k_pos, far), axis=-1)[:, None, :]
    k_last = jnp.max(k_pos, axis=-1)[:, None, :]

    needed = (k_last >= 0) & (k_first <= q_last)
    if window is not None:
        # q - k < window, written so that the "far" of a tile of padding cannot overflow.
        needed &= k_last > q_first - window
    blocks = needed.shape[-1]
    first = jnp.argmax(needed, axis=-1)
    end = blocks - jnp.argmax(needed[..., ::-1], axis=-1)
    end = jnp.where(jnp.any(needed, axis=-1), end, first)
    return jnp.stack([first, end], axis=-1).astype(jnp.int32)


def seen_by_one(
    q_pos_B: Int[Array, " B"], k_pos_BS: Int[Array, "B S"], *, window: int | None
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """First and last slot that the one query of a row sees; S and -1 where it sees none.

    Two reductions that XLA makes one kernel of; `spans` would be three.
    """
    seen_BS = visible(q_pos_B[:, None], k_pos_BS, window)[:, 0]
    S = k_pos_BS.shape[1]
    slot_S = jnp.arange(S, dtype=jnp.int32)
    first_B = jnp.min(jnp.where(seen_BS, slot_S, S), axis=1)
    last_B = jnp.max(jnp.where(seen_BS, slot_S, -1), axis=1)
    return first_B, last_B


def share_of(first, last, keys: int, split, splits: int):
    """In a kernel: begin and end of the blocks of `keys` slots that one of `splits` programs takes.

    first, last: of `seen_by_one`; where nothing is seen the share is empty.
    """
    first_block, end = first // keys, (last + keys) // keys  # -1: 0
    share = pl.cdiv(jnp.maximum(end - first_block, 0), splits)
    begin = first_block + split * share
    return begin, jnp.minimum(begin + share, end)


def _blocks(pos_BX, size):
    pad = -pos_BX.shape[1] % size
    pos_BX = jnp.pad(pos_BX.astype(jnp.int32), [(0, 0), (0, pad)], constant_values=-1)
    return pos_BX.reshape(pos_BX.shape[0], -1, size)
