"""One model, every mesh, both dispatches, packed and dense: the same logits, the same tokens."""

import functools

import jax
import jax.numpy as jnp
import meshed
import numpy as np
import oracle
import pytest
from checkpoints import decoded, make_weights
from flax import nnx
from tolerances import BFLOAT16_ROW, assert_logits, clear_choices, row_difference, spread

import gptoss_jax as gj
from gptoss_jax import sharding

MESHES = [
    "data=2",
    "tensor=2",
    "expert=2",
    "expert=4",
    "expert=8",
    "data=2,expert=4",
    "expert=2,tensor=2",
    "data=2,expert=2,tensor=2",
]
HOW = ["all_reduce", "all_to_all", "auto"]
EXPERTS = ["packed", "dense"]
# Float32 against float64 differs by 1e-5 of the spread; two meshes add in two orders.
MESHED = 5e-5
# By default every mesh with every dispatch once, packed and dense in turn: in one of two ways the
# generated tokens and their log probabilities are compared, in the other the logits. `auto`, which
# for 26 tokens is all_reduce, has one cell. The full product is marked slow.
GREEDY = {(mesh, HOW[m % 2], EXPERTS[m // 2 % 2]) for m, mesh in enumerate(MESHES)}
USUAL = {
    (mesh, HOW[1 - m % 2], EXPERTS[1 - m // 2 % 2])
    for m, mesh in enumerate(MESHES)
    if "expert" in mesh  # else one program
} | {("expert=4", "auto", "packed")}


def cells(usual):
    for cell in ((mesh, how, experts) for mesh in MESHES for how in HOW for experts in EXPERTS):
        yield pytest.param(*cell, marks=[] if cell in usual else pytest.mark.slow)


def load(mesh: str | None = None, how: str = "auto", experts: str = "packed", **keywords):
    made = None if mesh is None else sharding.make_mesh(**sharding.parse_mesh(mesh))
    keywords = {"dtype": jnp.float32, "experts": experts} | keywords
    return gj.load(meshed.folder(), mesh=made, dispatch=how, **keywords)


def greedy(model):
    return gj.generate(
        model,
        meshed.PROMPTS,
        max_new_tokens=meshed.GREEDY,
        sampler=gj.Sampler(temperature=0.0),
        stop_tokens=(),
        logprobs=True,
    )


@functools.cache
def alone():
    """Logits and what one device generates, the former checked against float64."""
    model = load()
    logits = np.asarray(model(meshed.TOKENS))
    weights = decoded(make_weights(meshed.NUMBERS, seed=3))
    expected = [oracle.logits(meshed.NUMBERS, weights, row) for row in meshed.TOKENS]
    assert_logits(logits, np.stack(expected))
    return logits, greedy(model)


@pytest.mark.parametrize("mesh, how, experts", cells(USUAL))
def test_logits(mesh, how, experts):
    assert_logits(load(mesh, how, experts)(meshed.TOKENS), alone()[0], MESHED)


@pytest.mark.parametrize("mesh, how, experts", cells(GREEDY))
def test_greedy_tokens(mesh, how, experts):
    logits, expected = alone()
    out = greedy(load(mesh, how, experts))
    assert [len(tokens) for tokens in out.tokens] == [meshed.GREEDY] * 2
    assert out.tokens == expected.tokens
    difference = np.abs(np.array(out.logprobs) - np.array(expected.logprobs))
    assert difference.max() <= MESHED * spread(logits)


def test_bfloat16_chooses_alike_where_the_choice_is_clear():
    one, many = (
        np.asarray(load(mesh, "all_to_all", dtype=jnp.bfloat16)(meshed.TOKENS))
        for mesh in (None, "data=2,expert=2,tensor=2")
    )
    clear = clear_choices(many, one)
    assert clear.mean() > 0.5
    np.testing.assert_array_equal(many.argmax(-1)[clear], one.argmax(-1)[clear])
    assert np.median(row_difference(many, one)) < BFLOAT16_ROW * spread(one)


def test_gradients_are_those_of_one_device():
    def gradients(mesh):
        model = load(mesh, "all_reduce", "dense")
        graph, state = nnx.split(model)

        @jax.jit
        def grad(state, tokens_BT):
            def loss(state):
                logits = nnx.merge(graph, state)(tokens_BT)
                return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 7])

            return jax.grad(loss)(state)

        return grad(state, jnp.asarray(meshed.TOKENS[:, :7], jnp.int32))

    one, many = gradients(None), gradients("data=2,expert=2,tensor=2")
    named, _ = jax.tree_util.tree_flatten_with_path(one)
    for (path, a), b in zip(named, jax.tree.leaves(many), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        error = np.abs(a - b).max() / np.abs(a).max()
        assert error < 20 * MESHED, (jax.tree_util.keystr(path), error)


def test_parameters_are_really_cut():
    mesh = "data=2,expert=2,tensor=2"
    model = load(mesh)
    experts = model.blocks[1].moe.experts
    leaves = {name: param[...] for name, param in vars(experts).items() if hasattr(param, "shape")}
    assert set(leaves) >= {"gate_up_blocks", "gate_up_scales", "down_blocks", "down_scales"}
    for name, leaf in leaves.items():
        assert leaf.shape[0] == meshed.NUMBERS.experts, name
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {4}, name
    for weight in ("gate_up", "down"):
        # The same experts and rows on each device: blocks have one axis more than scales.
        for a, b in zip(
            leaves[f"{weight}_blocks"].addressable_shards,
            leaves[f"{weight}_scales"].addressable_shards,
            strict=True,
        ):
            assert a.device == b.device and a.index[:3] == b.index
    held = [
        sum(shard.data.nbytes for leaf in leaves.values() for shard in leaf.addressable_shards)
        for leaves in (leaves,)
    ]
    # Each half is on two devices of data; the down bias is not cut over tensor.
    whole = sum(leaf.nbytes for leaf in leaves.values()) - leaves["down_bias"].nbytes
    assert held == [2 * whole + 4 * leaves["down_bias"].nbytes]
    assert model.blocks[0].attn.sinks_KG[...].sharding.spec[0] == ("expert", "tensor")


def test_a_mesh_that_does_not_fit_is_refused_by_load():
    with pytest.raises(ValueError, match=r"tensor=8 does not divide the 4 key/value heads"):
        load("tensor=8")


def test_no_weight_travels_and_layers_have_two_sums():
    mesh = sharding.make_mesh(expert=2, tensor=2)
    model = gj.load(meshed.folder(), mesh=mesh, dtype=jnp.float32, dispatch="all_reduce")
    graph, state = nnx.split(model)

    @jax.jit
    def hidden(state, tokens_BT):
        positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        return nnx.merge(graph, state).hidden(tokens_BT, positions)[0]

    text = hidden.lower(state, jnp.asarray(meshed.TOKENS, jnp.int32)).compile().as_text()
    counts = {
        name: text.count(f" {name}(") + text.count(f" {name}-start(")
        for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    }
    # One after attention and one after the experts of each layer, one for the embedding's rows.
    expected = {"all-reduce": 2 * meshed.NUMBERS.layers + 1}
    assert {name: n for name, n in counts.items() if n} == expected


def test_descriptions(tmp_path):
    model = load("data=2,expert=4")
    text = sharding.describe(model)
    assert "blocks.N.moe.experts.gate_up_blocks  x2      uint8    (8, 256, 3, 16)  expert" in text
    per_device = text.splitlines()[-8:]
    assert len({line.split(": ")[1] for line in per_device}) == 1  # all hold the same amount
    figure = sharding.draw(model, tmp_path / "bytes.png")
    bars = [bar.get_height() * 2**30 for bar in figure.axes[0].patches]
    held = sum(
        s.data.nbytes for x in jax.tree.leaves(nnx.state(model)) for s in x.addressable_shards
    )
    assert sum(bars) == pytest.approx(held)
    # What the table says of one device is an eighth of it.
    number, unit = per_device[0].split(": ")[1].split()
    unit_bytes = 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)
    assert float(number) * unit_bytes == pytest.approx(held / 8, rel=0.01)

    ids = np.array([[0, 1], [7, 1], [-1, -1]])
    load_ES = sharding.expert_load(ids, 8, model.mesh)
    assert load_ES.tolist() == [[1, 2], [0, 0], [0, 0], [0, 1]]
    figure = sharding.draw_load(ids, 8, model.mesh, tmp_path / "load.png")
    assert [bar.get_height() for bar in figure.axes[0].patches] == [1, 2, 0, 0, 0, 0, 0, 1]
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("bytes.png", "load.png"))
