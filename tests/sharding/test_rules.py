"""Where everything lies. The golden files change only on purpose: `GOLDEN=write pytest` here."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiny import MESHED, TINY

from gptoss_jax import sharding
from gptoss_jax.config import Config
from gptoss_jax.kernels.expert_matmul import AXES
from gptoss_jax.model import GptOss

GOLDEN = Path(__file__).parent / "golden"
SIZES = {"20b": Config.gpt_oss_20b(), "120b": Config.gpt_oss_120b()}
# Those that people run: one GPU, one host of 8, two hosts, and each axis alone.
MESHES = [
    (1, 1, 1),
    (1, 8, 1),
    (2, 4, 1),
    (1, 4, 2),
    (1, 1, 2),
    (8, 1, 1),
    (2, 8, 1),
    (1, 8, 4),
]


def abstract(data=1, expert=1, tensor=1):
    return AbstractMesh((data, expert, tensor), sharding.AXES)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_layout_is_as_reviewed(name, sizes):
    drawn = sharding.layout_table(SIZES[name], abstract(*sizes))
    file = GOLDEN / f"{name}-data{sizes[0]}-expert{sizes[1]}-tensor{sizes[2]}.txt"
    if os.environ.get("GOLDEN") == "write":
        file.write_text(drawn)
    assert drawn == file.read_text()


def test_spec_by_logical_axes():
    assert sharding.Rules().spec("experts", "embed", "ffn") == P("expert", None, "tensor")
    assert sharding.Rules().spec("batch", None, "kv_heads") == P("data", None, "tensor")


def test_a_mesh_axis_used_twice_names_both_lists():
    with pytest.raises(ValueError) as error:
        sharding.Rules().spec("ffn", "embed", "kv_heads")
    assert "['ffn', 'embed', 'kv_heads']" in str(error.value)
    assert "['tensor', None, 'tensor']" in str(error.value)
    shared = sharding.Rules(kv_heads=("expert", "tensor"))
    with pytest.raises(ValueError, match="used twice"):
        shared.spec("experts", "kv_heads")


def test_unknown_names():
    with pytest.raises(ValueError, match=r"no logical axis \['expert'\]"):
        sharding.Rules().spec("expert", "embed")
    with pytest.raises(ValueError, match="rule vocab='experts'"):
        sharding.Rules(vocab="experts")
    for path in ("blocks.0.attn.qkv", "blocks.x.attn_norm.scale_D", "blocks.0.moe.experts.gate"):
        with pytest.raises(ValueError, match="no rule for parameter"):
            sharding.parameter_spec(path, sharding.Rules())
    with pytest.raises(ValueError, match="layout 'swizzled'"):
        sharding.parameter_spec("blocks.0.moe.experts.down", sharding.Rules(), "swizzled")


@pytest.mark.parametrize(
    "sizes, heads",
    [
        (dict(), None),
        (dict(tensor=2), "tensor"),
        (dict(expert=4), "expert"),  # heads share the devices of expert
        (dict(expert=2, tensor=2), ("expert", "tensor")),
        (dict(expert=4, tensor=2), "tensor"),  # 8 devices, 4 heads: they stay on tensor
        (dict(expert=8), None),  # and where tensor is 1, every device attends with all
    ],
)
def test_heads_share_the_devices_of_expert_where_they_go_round(sizes, heads):
    assert sharding.Rules.fit(MESHED, abstract(**sizes)).kv_heads == heads


def test_hidden_rows_are_cut_between_blocks_of_32():
    # 2880 = 90 blocks: in halves of 45, but not in quarters.
    fit = {t: sharding.Rules.fit(SIZES["20b"], abstract(tensor=t)) for t in (1, 2, 4, 8)}
    assert {t: rules.ffn for t, rules in fit.items()} == {1: None, 2: "tensor", 4: None, 8: None}


@pytest.mark.parametrize("layout", ["checkpoint", "dense"])
@pytest.mark.parametrize("tensor", [2, 4])
def test_all_parts_of_one_weight_are_cut_alike(layout, tensor):
    specs = sharding.expert_specs(layout, 2880, abstract(expert=2, tensor=tensor))
    axes = AXES[layout]
    assert set(specs) == set(axes)
    for weight in ("gate_up", "down"):
        parts = [leaf for leaf in axes if leaf.startswith(weight)]
        for name in ("experts", "gate_up", "ffn"):
            cuts = {specs[leaf][axes[leaf].index(name)] for leaf in parts if name in axes[leaf]}
            assert len(cuts) <= 1, (weight, name, cuts)
        assert {specs[leaf][0] for leaf in parts} == {"expert"}
    down = next(leaf for leaf in axes if leaf.startswith("down") and "ffn" in axes[leaf])
    assert ("tensor" in specs[down]) == (tensor == 2) == ("tensor" in specs["gate_up_bias"])


@pytest.mark.parametrize("experts", ["packed", "dense"])
def test_every_parameter_of_the_model_has_a_rule_of_its_rank(experts):
    layout = "checkpoint" if experts == "packed" else "dense"
    model = nnx.eval_shape(lambda: GptOss(TINY, rngs=nnx.Rngs(0), experts=experts))
    shapes = sharding.parameter_shapes(TINY, layout)
    seen = set()
    for path, param in nnx.to_flat_state(nnx.state(model)):
        dotted = ".".join(map(str, path))
        general = ".".join("N" if isinstance(part, int) else part for part in path)
        spec = sharding.parameter_spec(dotted, sharding.Rules(), layout)
        assert len(spec) == len(param.shape) and param.shape == shapes[general], dotted
        seen.add(general)
    assert seen == set(shapes)


def test_constrain_keeps_whole_what_does_not_divide():
    mesh = sharding.make_mesh(data=2, expert=2, tensor=2)

    @jax.jit
    def place(x):
        return sharding.constrain(x, mesh, "batch", "kv_heads", None)

    assert place(jnp.zeros((4, 8, 3))).sharding.spec == P("data", ("expert", "tensor"))
    odd = place(jnp.zeros((3, 2, 3)))
    assert odd.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "tensor")), 3)
    x = jnp.zeros((3, 2))
    assert sharding.constrain(x, None, "batch", None) is x
