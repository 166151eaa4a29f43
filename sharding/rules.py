"""Which axis of which array lies on which mesh axis.

Parameters name logical axes (`PARAMETERS`; for experts, the `AXES` of their kernels' layouts), and
`Rules` maps those to mesh axes. So the whole layout of a model on a mesh can be written down and
reviewed without a device (`tests/sharding/golden/`).

What is cut, and what happens where the mesh does not divide a size:

    experts   over expert                        must divide (check_mesh refuses)
    kv_heads  over expert and tensor together    else over tensor alone, which must divide
    ffn       over tensor, in whole blocks of 32 else whole on each device of tensor
    vocab     over expert and tensor together    else over tensor, else whole
    batch     over data                          else whole (dispatch pads its own rows)

The blocks, scales and bias of one weight carry the same names for experts and rows, so they
cannot be cut differently. The residual stream, the norms and the router are whole on each device
of expert and tensor.
"""

import dataclasses
import re
from collections.abc import Mapping
from math import prod

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gptoss_jax.kernels.expert_matmul import AXES
from gptoss_jax.kernels.mxfp4 import BLOCK
from gptoss_jax.sharding import mesh as meshes
from gptoss_jax.sharding.mesh import axis_sizes, check_mesh

MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Logical axis -> mesh axis, several, or None. `Rules.fit` makes one that a mesh can honour."""

    batch: MeshAxes = "data"
    experts: MeshAxes = "expert"
    kv_heads: MeshAxes = "tensor"
    ffn: MeshAxes = "tensor"
    gate_up: MeshAxes = "tensor"
    vocab: MeshAxes = "tensor"
    # Whole everywhere. `routed` is the router's axis of experts: every device scores all of them.
    embed: MeshAxes = None
    routed: MeshAxes = None
    qkv_rows: MeshAxes = None
    q_per_kv: MeshAxes = None
    head: MeshAxes = None
    time: MeshAxes = None
    slots: MeshAxes = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            for axis in _as_tuple(getattr(self, field.name)):
                if axis not in meshes.AXES:
                    raise ValueError(
                        f"rule {field.name}={axis!r}: no such mesh axis; use {meshes.AXES}."
                    )

    @classmethod
    def fit(cls, config, mesh, *, batch: int | None = None) -> "Rules":
        """The rules of the table above for a model's sizes on a mesh.

        `config` has experts, kv_heads, ffn and vocab; `mesh` is a Mesh or an AbstractMesh;
        `batch` is the number of rows, where it is known. Raises ValueError where `check_mesh`
        does.
        """
        check_mesh(config, mesh)
        hidden = ffn_axis(config.ffn, mesh)
        return cls(
            batch="data" if batch is None else batch_axis(batch, mesh),
            kv_heads=heads_axes(config.kv_heads, mesh),
            ffn=hidden,
            gate_up=hidden,
            vocab=vocab_axes(config.vocab, mesh),
        )

    def spec(self, *axes: str | None) -> PartitionSpec:
        """`Rules().spec("experts", "embed", "ffn") == PartitionSpec("expert", None, "tensor")`.

        Raises ValueError for an unknown name, and for one mesh axis used twice, with both lists.
        """
        names = {field.name for field in dataclasses.fields(self)}
        if unknown := [axis for axis in axes if axis is not None and axis not in names]:
            raise ValueError(f"no logical axis {unknown}; the names are {sorted(names)}.")
        entries = [None if axis is None else getattr(self, axis) for axis in axes]
        used = [axis for entry in entries for axis in _as_tuple(entry)]
        if len(set(used)) < len(used):
            raise ValueError(
                f"a mesh axis is used twice: logical axes {list(axes)} -> mesh axes {entries}."
            )
        return PartitionSpec(*entries)


def heads_axes(kv_heads: int, mesh) -> MeshAxes:
    """Key/value heads: on the devices of expert and tensor together where these divide them.

    So 8 devices of expert=8 hold one of the 8 heads each and attention costs an eighth; where the
    heads do not go round, they stay on tensor and attention is repeated on each device of expert.
    """
    return _first_that_divides(kv_heads, mesh, ("expert", "tensor"), ("tensor",))


def vocab_axes(vocab: int, mesh) -> MeshAxes:
    return _first_that_divides(vocab, mesh, ("expert", "tensor"), ("tensor",))


def ffn_axis(ffn: int, mesh) -> MeshAxes:
    """Hidden rows of an expert, cut between MXFP4 blocks: 2880 = 90 blocks: tensor=2, not 4."""
    return _first_that_divides(ffn // BLOCK, mesh, ("tensor",)) if ffn % BLOCK == 0 else None


def batch_axis(batch: int, mesh) -> MeshAxes:
    return _first_that_divides(batch, mesh, ("data",))


def _first_that_divides(size: int, mesh, *candidates: tuple[str, ...]) -> MeshAxes:
    """Axes of size 1 are left out: a spec says what is really cut, and None where nothing is."""
    sizes = axis_sizes(mesh)
    for axes in candidates:
        if size % prod(sizes[axis] for axis in axes) == 0:
            real = tuple(axis for axis in axes if sizes[axis] > 1)
            return real[0] if len(real) == 1 else (real or None)
    return None


# parameter path -> logical axes; N stands for a block's number.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "embed.weight_VD": ("vocab", "embed"),
    "blocks.N.attn_norm.scale_D": ("embed",),
    "blocks.N.attn.qkv_KMHD": ("kv_heads", "qkv_rows", "head", "embed"),
    "blocks.N.attn.qkv_bias_KMH": ("kv_heads", "qkv_rows", "head"),
    "blocks.N.attn.sinks_KG": ("kv_heads", "q_per_kv"),
    "blocks.N.attn.out_DKGH": ("embed", "kv_heads", "q_per_kv", "head"),
    "blocks.N.attn.out_bias_D": ("embed",),
    "blocks.N.moe_norm.scale_D": ("embed",),
    "blocks.N.moe.router_ED": ("routed", "embed"),
    "blocks.N.moe.router_bias_E": ("routed",),
    "norm.scale_D": ("embed",),
    "unembed.weight_VD": ("vocab", "embed"),
}

CACHE: dict[str, tuple[str, ...]] = {
    "k": ("batch", "kv_heads", "slots", "head"),
    "v": ("batch", "kv_heads", "slots", "head"),
    "full_pos_BS": ("batch", "slots"),
    "ring_pos_BS": ("batch", "slots"),
    "length_B": ("batch",),
}


def logical_axes(path: str, layout: str = "checkpoint") -> tuple[str | None, ...]:
    """Logical axes of the parameter at a dotted path. Raises ValueError for an unknown path."""
    general = re.sub(r"^blocks\.\d+\.", "blocks.N.", path)
    prefix, _, leaf = general.rpartition(".")
    axes = PARAMETERS.get(general)
    if prefix == "blocks.N.moe.experts":
        axes = expert_axes(layout).get(leaf)
    if axes is None:
        raise ValueError(f"no rule for parameter {path!r} (experts in layout {layout!r}).")
    return axes


def expert_axes(layout: str) -> Mapping[str, tuple[str | None, ...]]:
    """Leaf -> logical axes for the experts of one layer. "ffn" is F or its blocks of 32."""
    if layout not in AXES:
        raise ValueError(
            f"no sharding rules for experts in layout {layout!r}; have {sorted(AXES)}."
        )
    return AXES[layout]


def parameter_spec(path: str, rules: Rules, layout: str = "checkpoint") -> PartitionSpec:
    return rules.spec(*logical_axes(path, layout))


def parameter_sharding(path: str, config, mesh: Mesh, layout: str = "checkpoint") -> NamedSharding:
    """Where the parameter at a dotted path lives on a mesh; what the loader asks for each one."""
    return NamedSharding(mesh, parameter_spec(path, Rules.fit(config, mesh), layout))


def expert_specs(layout: str, ffn: int, mesh) -> dict[str, PartitionSpec]:
    """Leaf -> PartitionSpec for the experts of one layer."""
    hidden = ffn_axis(ffn, mesh)
    rules = Rules(ffn=hidden, gate_up=hidden)
    return {leaf: rules.spec(*axes) for leaf, axes in expert_axes(layout).items()}


def constrain(x: jax.Array, mesh: Mesh | None, *axes: str | None) -> jax.Array:
    """Says where an activation lies, by logical axes ("batch", "kv_heads", "vocab", None...).

    A size that the mesh does not divide stays whole. With mesh=None returns x.
    """
    if mesh is None:
        return x
    fits = {"batch": batch_axis, "kv_heads": heads_axes, "vocab": vocab_axes, "ffn": ffn_axis}
    entries = [
        fits[axis](n, mesh) if axis in fits else None for axis, n in zip(axes, x.shape, strict=True)
    ]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))


def _as_tuple(entry: MeshAxes) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
