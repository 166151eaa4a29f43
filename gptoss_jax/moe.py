"""The mixture of experts of one layer: router, and expert weights that stay packed."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from . import sharding
from .config import Config
from .kernels.expert_matmul import ExpertWeights, expert_matmul, mixture
from .kernels.linear import norm_router
from .kernels.mxfp4 import BLOCK
from .kernels.routing import top_k
from .layers import RMSNorm, dense_backend, normal

# Root mean square of the MXFP4 code book 0 .5 1 1.5 2 3 4 6, every code as likely.
_CODE_RMS = math.sqrt(68.5 / 8)


class Experts(nnx.Module):
    """All experts of one layer, E first in every leaf, so that a shard of E is whole experts.

    Packed, the leaves are uint8 blocks and scales in `layout`; dense, weights [E, out, in].
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, dtype, packed: bool):
        c = config
        self.layout = "checkpoint" if packed else "dense"
        for name, out, inner in (("gate_up", 2 * c.ffn, c.embed), ("down", c.embed, c.ffn)):
            if packed:
                blocks, scales = _random_packed(rngs, (c.experts, out, inner))
                setattr(self, f"{name}_blocks", nnx.Param(blocks))
                setattr(self, f"{name}_scales", nnx.Param(scales))
            else:
                weights = normal(rngs, (c.experts, out, inner), inner, dtype)
                setattr(self, name, nnx.Param(weights))
            setattr(self, f"{name}_bias", nnx.Param(jnp.zeros((c.experts, out), dtype)))

    def weights(self) -> ExpertWeights:
        """The same arrays as the kernels take them."""
        leaves = {n: p[...] for n, p in vars(self).items() if isinstance(p, nnx.Param)}
        return ExpertWeights(layout=self.layout, **leaves)

    def replace(self, weights: ExpertWeights) -> None:
        """Takes over other arrays, in whatever layout they are."""
        for name in [n for n, p in vars(self).items() if isinstance(p, nnx.Param)]:
            delattr(self, name)
        for name, leaf in weights.leaves().items():
            setattr(self, name, nnx.Param(leaf))
        self.layout = weights.layout


def _random_packed(rngs: nnx.Rngs, shape: tuple[int, int, int]) -> tuple[Array, Array]:
    """Random codes, and the one scale that gives them a deviation near 1/sqrt(inner)."""
    experts, out, inner = shape
    if inner % BLOCK:
        raise ValueError(f"MXFP4 packs blocks of {BLOCK}; the input width {inner} is no multiple.")
    blocks = jax.random.bits(rngs.params(), (experts, out, inner // BLOCK, BLOCK // 2), jnp.uint8)
    exponent = round(math.log2(inner**-0.5 / _CODE_RMS))
    return blocks, jnp.full(blocks.shape[:-1], 127 + exponent, jnp.uint8)


class MoE(nnx.Module):
    """Chooses X of E experts for each token and sums their outputs by softmax weight."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, dtype, packed: bool):
        self.chosen = config.experts_per_token
        self.limit, self.alpha = config.swiglu_limit, config.swiglu_alpha
        self.router_ED = nnx.Param(
            normal(rngs, (config.experts, config.embed), config.embed, dtype)
        )
        self.router_bias_E = nnx.Param(jnp.zeros(config.experts, jnp.float32))
        self.experts = Experts(config, rngs=rngs, dtype=dtype, packed=packed)

    def route(
        self,
        x_ND: Float[Array, "N D"],
        norm: RMSNorm,
        backend: str | None = None,
        mesh: Mesh | None = None,
    ):
        """norm(x) [N, D], float32 logits [N, E], the chosen ids int32 [N, X], their weights [N, X].

        The references round these logits to bfloat16, which turns near ties into ties: with a bias
        of 512, 511, 510, 509 the weights become .46 .46 .06 .01 where float32 has .64 .24 .09 .03.
        """

        def routed(x_nD, *weights):
            how = dict(eps=norm.eps, backend=dense_backend(backend))
            normed_nD, logits_nE = norm_router(x_nD, *weights, **how)
            return normed_nD, logits_nE, *top_k(logits_nE, self.chosen)

        weights = norm.scale_D[...], self.router_ED[...], self.router_bias_E[...]
        return sharding.shard_rows(routed, x_ND, *weights, mesh=mesh)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        norm: RMSNorm,
        live_BT: Bool[Array, "B T"],
        *,
        mesh: Mesh | None = None,
        backend: str | None = None,
        dispatch: str = "auto",
    ) -> Float[Array, "B T D"]:
        """x + experts(norm(x)).

        live: padding (False) is sent to no expert: its ids are -1, and nothing is added to it.
        """
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        live_N = live_BT.reshape(-1)
        how = dict(limit=self.limit, alpha=self.alpha, backend=backend)
        experts = self.experts.weights()
        if mesh is None or mesh.size == 1:
            router = norm.scale_D[...], self.router_ED[...], self.router_bias_E[...]
            dense = dict(eps=norm.eps, backend=dense_backend(backend))
            normed_ND, logits_NE = norm_router(x_ND, *router, **dense)
            how |= dict(chosen=self.chosen)
            out_ND = mixture(normed_ND, logits_NE, live_N, experts, x_ND, **how)
            return out_ND.reshape(x_BTD.shape)
        normed_ND, _, ids_NX, weights_NX = self.route(x_ND, norm, backend, mesh)
        # Partial sums over a mesh are rounded once, after the last.
        compute = functools.partial(expert_matmul, out_dtype=jnp.float32, **how)
        out_ND = sharding.dispatch(
            normed_ND,
            jnp.where(live_N[:, None], ids_NX, -1),
            weights_NX,
            experts,
            mesh=mesh,
            compute=compute,
            how=dispatch,
        )
        return x_BTD + out_ND.reshape(x_BTD.shape)
