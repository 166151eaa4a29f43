"""The whole model: parameters in Flax NNX modules, calls that are pure.

A token's way:  embed -> L x (x + attention(norm(x)); x + experts(norm(x))) -> norm -> unembed
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from . import cache as caches
from . import rope
from .attention import Attention, Past
from .cache import Cache
from .config import Config
from .kernels import device
from .layers import RMSNorm, einsum, normal
from .moe import MoE
from .sharding import constrain, shard_lookup


class Embedding(nnx.Module):
    """A row of D for each token; also the unembedding, which has weights of its own."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, dtype):
        shape = (config.vocab, config.embed)
        self.weight_VD = nnx.Param(normal(rngs, shape, config.embed, dtype))


class Block(nnx.Module):
    def __init__(self, config: Config, layer: int, *, rngs: nnx.Rngs, dtype, packed: bool):
        self.attn_norm = RMSNorm(config)
        self.attn = Attention(config, layer, rngs=rngs, dtype=dtype)
        self.moe_norm = RMSNorm(config)
        self.moe = MoE(config, rngs=rngs, dtype=dtype, packed=packed)


class GptOss(nnx.Module):
    """gpt-oss of any size.

    config: the architecture. rngs: random weights (gptoss_jax.load gives trained ones).
    dtype: of the dense weights and activations, float32 or bfloat16. experts: "dense" or "packed"
    (MXFP4). mesh, backend, dispatch: how to run, as in `load`.

    stop_tokens: ids that end a turn. text_vocab: ids from there on stand for no text and are never
    generated (None: all may be).
    """

    def __init__(
        self,
        config: Config,
        *,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        experts: str = "dense",
        mesh: Mesh | None = None,
        backend: str | None = None,
        dispatch: str = "auto",
    ):
        if experts not in ("dense", "packed"):
            raise ValueError(f"experts must be 'dense' or 'packed'; got {experts!r}.")
        self.config = config
        self.mesh, self.backend, self.dispatch = mesh, backend, dispatch
        self.stop_tokens = tuple(config.eos)
        self.text_vocab = None
        self.embed = Embedding(config, rngs=rngs, dtype=dtype)
        self.blocks = nnx.List(
            Block(config, i, rngs=rngs, dtype=dtype, packed=experts == "packed")
            for i in range(config.layers)
        )
        self.norm = RMSNorm(config)
        self.unembed = Embedding(config, rngs=rngs, dtype=dtype)

    @property
    def dtype(self):
        """Of activations and dense weights."""
        return self.embed.weight_VD[...].dtype

    def __call__(self, tokens) -> Float[Array, "B T V"]:
        """float32 logits of every position, unmasked, replicated over the mesh.

        tokens: int [B, T], array-like. Compiled inside; also works inside jax.jit.
        Raises ValueError for ids outside the vocabulary (where they can be seen: not under jit).
        """
        tokens_BT = checked_tokens(tokens, self.config)
        graph, state = nnx.split(self)
        return _logits(graph, state, tokens_BT)

    def hidden(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        cache: Cache | None = None,
        *,
        remat: bool = False,
        taps: list | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """The normed activations before the unembedding, and the cache one chunk on.

        positions: -1 is padding. With a cache, a row's live positions must follow on from
        cache.length_B without gaps. remat: recompute each block in the backward pass.
        taps: a list that receives one dict a layer (see `trace`).
        """
        x_BTD = shard_lookup(self.embed.weight_VD[...], tokens_BT, mesh=self.mesh)
        x_BTD = constrain(x_BTD, self.mesh, "batch", None, None)
        turn = rope.table(self.config, positions_BT)
        step = None if cache is None else Step(self.config, cache, positions_BT)
        kept = []
        run = jax.checkpoint(self._block, static_argnums=(0,)) if remat else self._block
        with device.placed_on(self.mesh):
            for i in range(self.config.layers):
                x_BTD, kv, tap = run(i, x_BTD, turn, positions_BT, step and step.past(i))
                kept.append(kv)
                if taps is not None:
                    taps.append(tap)
        return self.norm(x_BTD), step and step.done(kept)

    def _block(self, i, x_BTD, turn, positions_BT, past):
        block = self.blocks[i]
        after_attention, kv = block.attn(
            x_BTD,
            block.attn_norm,
            turn,
            positions_BT,
            past,
            mesh=self.mesh,
            backend=self.backend,
        )
        after_attention = constrain(after_attention, self.mesh, "batch", None, None)
        x_BTD = block.moe(
            after_attention,
            block.moe_norm,
            positions_BT >= 0,
            mesh=self.mesh,
            backend=self.backend,
            dispatch=self.dispatch,
        )
        x_BTD = constrain(x_BTD, self.mesh, "batch", None, None)
        return x_BTD, kv, {"after_attention": after_attention, "after": x_BTD}

    def logits(self, x_BTD: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """float32, from what `hidden` returned."""
        logits = einsum("...D,VD->...V", x_BTD, self.unembed.weight_VD[...])
        # Said here, or a caller who wants whole logits makes XLA gather the whole unembedding.
        return constrain(logits, self.mesh, "batch", *[None] * (logits.ndim - 2), "vocab")

    def trace(self, tokens) -> dict[str, list[np.ndarray] | np.ndarray]:
        """What parity compares: `after_attention` and `after` of every layer [B, T, D], the
        router's `router_logits` [B, T, E] and `router_ids` [B, T, X], and `logits` [B, T, V]."""
        tokens_BT = checked_tokens(tokens, self.config)
        graph, state = nnx.split(self)
        return jax.tree.map(np.asarray, _trace(graph, state, tokens_BT))


class Step:
    """What one call does to the cache, worked out once for all layers of a kind."""

    def __init__(self, config: Config, cache: Cache, positions_BT):
        self.config, self.cache = config, cache
        full, ring = cache.full_pos_BS, cache.ring_pos_BW
        self.full_slot_BT = caches.full_slots(positions_BT, cache.capacity)
        self.ring_slot_BT = caches.ring_slots(positions_BT, config.window)
        self.full_pos_BS = caches.store_positions(full, positions_BT, self.full_slot_BT)
        self.ring_pos_BW = caches.store_positions(ring, positions_BT, self.ring_slot_BT)
        self.length_B = jnp.maximum(cache.length_B, positions_BT.max(axis=1) + 1)

    def past(self, layer: int) -> Past:
        k, v = self.cache.k[layer], self.cache.v[layer]
        if self.config.sliding[layer]:
            old, new = self.cache.ring_pos_BW, self.ring_pos_BW
            return Past(k, v, self.ring_slot_BT, old, new, ring=True)
        return Past(k, v, self.full_slot_BT, self.cache.full_pos_BS, self.full_pos_BS, ring=False)

    def done(self, kept) -> Cache:
        k, v = zip(*kept, strict=True)
        return Cache(k, v, self.full_pos_BS, self.ring_pos_BW, self.length_B)


def checked_tokens(tokens, config: Config) -> Int[Array, "B T"]:
    """int32 [B, T]; raises ValueError for another rank, for no tokens, and for unknown ids."""
    if not isinstance(tokens, jax.Array):
        try:
            tokens = np.asarray(tokens)
        except ValueError:
            raise ValueError("tokens must be of shape [batch, time]; rows differ.") from None
    if tokens.ndim != 2 or 0 in tokens.shape or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens must be whole numbers of shape [batch, time]; got {tokens.dtype} "
            f"of shape {tokens.shape}."
        )
    if not isinstance(tokens, jax.core.Tracer) and getattr(tokens, "is_fully_addressable", True):
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= config.vocab:
            raise ValueError(f"token ids must lie in 0..{config.vocab - 1}; got {low}..{high}.")
    return jnp.asarray(tokens, jnp.int32)


def counted(tokens_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The positions 0, 1, 2, ... of rows without padding."""
    return jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph, state, tokens_BT):
    model = nnx.merge(graph, state)
    x_BTD, _ = model.hidden(tokens_BT, counted(tokens_BT))
    return constrain(model.logits(x_BTD), model.mesh, None, None, None)


@functools.partial(jax.jit, static_argnums=0)
def _trace(graph, state, tokens_BT):
    model = nnx.merge(graph, state)
    taps = []
    x_BTD, _ = model.hidden(tokens_BT, counted(tokens_BT), taps=taps)
    routed = [
        block.moe.route(tap["after_attention"].reshape(-1, model.config.embed), block.moe_norm)
        for block, tap in zip(model.blocks, taps, strict=True)
    ]
    shape = tokens_BT.shape
    traced = {
        "after_attention": [tap["after_attention"] for tap in taps],
        "after": [tap["after"] for tap in taps],
        "router_logits": [logits.reshape(*shape, -1) for _, logits, _, _ in routed],
        "router_ids": [ids.reshape(*shape, -1) for _, _, ids, _ in routed],
        "logits": model.logits(x_BTD),
    }
    return jax.tree.map(lambda x: constrain(x, model.mesh, None, None, None), traced)
