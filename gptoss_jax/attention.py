"""Attention of one layer: fused projection, rotary positions, sinks, and the cache it reads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from . import cache as caches
from . import rope, sharding
from .config import Config
from .kernels.attention import append_and_attend, attention
from .kernels.linear import linear
from .layers import RMSNorm, dense_backend, normal


class Attention(nnx.Module):
    """Grouped-query attention with one learned sink per query head.

    The projection keeps what one key/value head needs together, M = G queries, one key, one value,
    so that a shard of K is whole heads and nothing else.
    """

    def __init__(self, config: Config, layer: int, *, rngs: nnx.Rngs, dtype):
        c = config
        self.window = c.window_of(layer)
        kmh = (c.kv_heads, c.q_per_kv + 2, c.head_width)
        kgh = (c.kv_heads, c.q_per_kv, c.head_width)
        self.qkv_KMHD = nnx.Param(normal(rngs, (*kmh, c.embed), c.embed, dtype))
        self.qkv_bias_KMH = nnx.Param(jnp.zeros(kmh, dtype))
        self.sinks_KG = nnx.Param(jnp.zeros(kgh[:2], jnp.float32))
        self.out_DKGH = nnx.Param(normal(rngs, (c.embed, *kgh), c.q_heads * c.head_width, dtype))
        self.out_bias_D = nnx.Param(jnp.zeros(c.embed, dtype))

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        norm: RMSNorm,
        turn: tuple[Array, Array],
        positions_BT: Int[Array, "B T"],
        past: "Past | None" = None,
        *,
        mesh: Mesh | None = None,
        backend: str | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[Array, Array]]:
        """Returns x + attention(norm(x)) and the layer's keys and values: the cache's, updated,
        where there is a past; else this call's own as [B, K, T, H].

        turn: cos and sin of the positions (rope.table). positions: -1 is padding, which writes
        nothing and sees nothing.
        """
        T = x_BTD.shape[1]
        dense = functools.partial(linear, backend=dense_backend(backend))
        qkv_BTKMH = sharding.shard_qkv(
            functools.partial(dense, eps=norm.eps),
            x_BTD,
            self.qkv_KMHD[...],
            self.qkv_bias_KMH[...],
            norm.scale_D[...],
            mesh=mesh,
        )
        # Only the experts have a Mosaic form.
        how = dict(window=self.window, backend=None if backend == "mosaic" else backend)
        sinks_KG = self.sinks_KG[...]
        if past is not None and T == 1:
            out_BKGH, *kept = sharding.shard_step(
                functools.partial(append_and_attend, **how),
                qkv_BTKMH[:, 0],
                *(t[:, 0] for t in turn),
                past.k_BKSH,
                past.v_BKSH,
                sinks_KG,
                positions_BT[:, 0],
                past.new_pos_BS,
                past.slot_BT[:, 0],
                mesh=mesh,
            )
            out_BTKGH = out_BKGH[:, None]
        else:
            turned_BTKMH = rope.rotate(qkv_BTKMH[:, :, :, :-1], *turn)
            q_BTKGH, k_BTKH = turned_BTKMH[:, :, :, :-1], turned_BTKMH[:, :, :, -1]
            v_BTKH = qkv_BTKMH[:, :, :, -1]
            if past is None:
                seen = kept = (k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2))
                k_pos_BS = positions_BT
            else:
                kept = past.store(k_BTKH, v_BTKH)
                seen, k_pos_BS = past.seen(kept, k_BTKH, v_BTKH, positions_BT)
            attend = functools.partial(attention, **how)
            args = (q_BTKGH, *seen, sinks_KG, positions_BT, k_pos_BS)
            out_BTKGH = sharding.shard_attention(attend, *args, mesh=mesh)
        x_BTD = sharding.shard_out(
            dense, out_BTKGH, self.out_DKGH[...], self.out_bias_D[...], x_BTD, mesh=mesh
        )
        return x_BTD, tuple(kept)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Past:
    """One layer's share of a cache during one step: what is stored where, and what is seen."""

    k_BKSH: Array
    v_BKSH: Array
    slot_BT: Array  # where this step's positions go
    old_pos_BS: Array
    new_pos_BS: Array
    ring: bool = dataclasses.field(kw_only=True, metadata={"static": True})

    def store(self, k_BTKH: Array, v_BTKH: Array) -> tuple[Array, Array]:
        """The slots after this step's keys and values are written."""
        return (
            caches.store(self.k_BKSH, k_BTKH, self.slot_BT),
            caches.store(self.v_BKSH, v_BTKH, self.slot_BT),
        )

    def seen(self, kept, k_BTKH, v_BTKH, positions_BT):
        """Keys, values and their positions that a chunk's queries may look at.

        A chunk may push out of a ring what its own first queries still see: there the ring as it
        was and the chunk are seen side by side.
        """
        if not self.ring:
            return kept, self.new_pos_BS
        side_by_side = [
            jnp.concatenate([old, new.swapaxes(1, 2).astype(old.dtype)], axis=2)
            for old, new in ((self.k_BKSH, k_BTKH), (self.v_BKSH, v_BTKH))
        ]
        return tuple(side_by_side), jnp.concatenate([self.old_pos_BS, positions_BT], axis=1)
