"""One training step as a pure function, and the state that it takes to the next.

Master weights are a flat dict, dotted name -> float32 array; what computes is a model whose dense
leaves are cast to the compute dtype (norms, sinks and router biases stay float32, as in inference).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ..checkpoint import load
from ..config import Config
from ..model import GptOss
from . import optimizer
from .loss import balance, cross_entropy
from .quantise import is_expert_weight, straight_through
from .settings import Settings


@dataclasses.dataclass(frozen=True)
class Network:
    """The model without its weights: how to put weights in and what it computes from a batch."""

    graph: nnx.GraphDef
    treedef: object
    dtypes: dict[str, jnp.dtype]
    remat: bool

    @classmethod
    def of(
        cls, config: Config, *, compute, row: int, remat: bool, mesh: Mesh | None = None
    ) -> "Network":
        """compute: dtype of activations. row: the longest document, and so the largest window.
        mesh: over which experts, heads and vocabulary are cut; rows alone need none."""
        model = nnx.eval_shape(functools.partial(blank, config, compute, row, mesh))
        graph, state = nnx.split(model)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
        return cls(graph, treedef, {named(path): leaf.dtype for path, leaf in leaves}, remat)

    def model(self, params: dict, quantised=False) -> GptOss:
        """A model that computes with these master weights, the experts rounded to MXFP4 where
        `quantised` (a bool, or a traced one)."""
        leaves = []
        for name, dtype in self.dtypes.items():
            leaf = params[name]
            if quantised is not False and is_expert_weight(name):
                leaf = straight_through(leaf, quantised)
            leaves.append(leaf.astype(dtype))
        return nnx.merge(self.graph, jax.tree_util.tree_unflatten(self.treedef, leaves))

    def loss(self, params: dict, batch: dict, *, quantised=False, aux: float = 0.0):
        """(loss to descend, {"loss": cross entropy, "aux": load balance, 0 where it is off})."""
        model = self.model(params, quantised)
        taps = [] if aux else None
        x_BTD, _ = model.hidden(batch["tokens"], batch["positions"], remat=self.remat, taps=taps)
        loss = cross_entropy(model.logits(x_BTD), batch["targets"], batch["weights"])
        if not aux:
            return loss, {"loss": loss, "aux": jnp.float32(0)}
        live_N = batch["positions"].reshape(-1) >= 0
        balances = []
        for block, tap in zip(model.blocks, taps, strict=True):
            x_BTD = tap["after_attention"]
            _, logits_NE, ids_NX, _ = block.moe.route(
                x_BTD.reshape(-1, x_BTD.shape[-1]), block.moe_norm
            )
            balances.append(balance(logits_NE, ids_NX, live_N))
        mean = sum(balances) / len(balances)
        return loss + jnp.float32(aux) * mean, {"loss": loss, "aux": mean}


def blank(config: Config, compute, row: int, mesh: Mesh | None = None) -> GptOss:
    """An untrained model for packed rows: layers that see everything see one document.

    Experts by all_reduce: all_to_all has no gradients.
    """
    how = dict(experts="dense", backend="xla", mesh=mesh, dispatch="all_reduce")
    model = GptOss(config, rngs=nnx.Rngs(0), dtype=compute, **how)
    for block in model.blocks:
        block.attn.window = min(row, block.attn.window or row)
    return model


def named(path) -> str:
    """blocks.3.moe.experts.gate_up from a tree path; the variable's own value adds nothing."""
    keys = [
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path
    ]
    return ".".join(key for key in keys if key != "value")


def initial(config: Config, seed: int, transformation, start: str | None = None) -> dict:
    """{"params", "optimizer", "step"} before the first step.

    start: a checkpoint, whose weights are taken; else they are random, from the seed.
    Raises ValueError where the checkpoint is of another architecture.
    """
    if start is None:
        model = GptOss(config, rngs=nnx.Rngs(seed), dtype=jnp.float32)
    else:
        model = load(start, dtype=jnp.float32, experts="dense")
        if differing := _differing(config, model.config):
            raise ValueError(f"run.start {start} and [model] differ in {', '.join(differing)}.")
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.state(model))
    params = {named(path): jnp.asarray(leaf, jnp.float32) for path, leaf in leaves}
    return {
        "params": params,
        "optimizer": transformation.init(params),
        "step": jnp.zeros((), jnp.int32),
    }


def _differing(config: Config, other: Config) -> list[str]:
    """Fields that matter to what is computed."""
    names = [f.name for f in dataclasses.fields(Config) if f.name not in ("eos", "pad")]
    return [
        f"{name} ({getattr(config, name)} here, {getattr(other, name)} there)"
        for name in names
        if getattr(config, name) != getattr(other, name)
    ]


def make_step(network: Network, settings: Settings, transformation):
    """(state, batch) -> (state, metrics), to be jitted with the state donated.

    Where the loss or the gradient is not finite the state comes back as it was and
    metrics["finite"] is False: a later checkpoint can never hold the damage.
    """
    start = settings.run.quantise_from
    rate = optimizer.schedule(settings.optimizer, settings.run.steps)

    def step(state: dict, batch: dict):
        quantised = False if start < 0 else state["step"] >= start
        loss = functools.partial(network.loss, quantised=quantised, aux=settings.run.router_aux)
        gradients, metrics = jax.grad(loss, has_aux=True)(state["params"], batch)
        norm = optimizer.norm(gradients)
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
        params, moments = optimizer.update(
            transformation, gradients, state["optimizer"], state["params"]
        )
        new = {"params": params, "optimizer": moments, "step": state["step"] + 1}
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        with jax.numpy_dtype_promotion("standard"):
            metrics |= {"rate": rate(state["step"]), "gradient": norm, "finite": finite}
        return new, metrics | {"tokens": jnp.sum(batch["positions"] >= 0)}

    return step
