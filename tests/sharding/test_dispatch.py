"""Both ways to bring tokens to their experts, against float64 loops over tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import moe_cases as moe
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from tolerances import FLOAT32_OP

from gptoss_jax import sharding
from gptoss_jax.sharding.experts import _pad_rows as pad_rows
from gptoss_jax.sharding.experts import default_slots

MESHES = {
    "data=2": "dense",
    "tensor=2": "checkpoint",
    "expert=2": "dense",
    "expert=4": "checkpoint",
    "expert=8": "dense",
    "data=2,expert=4": "dense",
    "expert=2,tensor=2": "checkpoint",
    "data=2,expert=2,tensor=2": "dense",
}


def on(mesh: str, how: str, slots: int | None = 3):
    """Compiled once for each mesh, way and shape; routings are values."""
    return _on(mesh, how, slots if how == "all_to_all" else None)


@functools.cache
def _on(mesh: str, how: str, slots: int | None):
    made = sharding.make_mesh(**sharding.parse_mesh(mesh))
    return jax.jit(
        functools.partial(sharding.dispatch, mesh=made, compute=moe.compute, how=how, slots=slots)
    )


def check(run, count: int, experts, names=None):
    x_ND, weights_NX = moe.tokens(count)
    for name, ids_NX in moe.routings(count, experts.count).items():
        if names is None or name in names:
            expected = moe.expected(x_ND, ids_NX, weights_NX, experts)
            actual = np.asarray(run(x_ND, ids_NX, weights_NX, experts), np.float64)
            error = np.abs(actual - expected).max() / max(np.abs(expected).max(), 1)
            assert error <= FLOAT32_OP, f"{name}: {error:.2g}"


@pytest.mark.parametrize("how", ["all_reduce", "all_to_all"])
@pytest.mark.parametrize("mesh, layout", MESHES.items())
def test_every_routing_on_every_mesh(mesh, layout, how):
    # 13 tokens divide by no axis; 3 slots need several rounds for the skewed routings.
    if how == "all_to_all" and "expert" not in mesh:
        pytest.skip("nothing to send: the same program as all_reduce")
    check(on(mesh, how), 13, moe.make(layout))


@pytest.mark.parametrize("how, count", [("all_reduce", 1), ("all_to_all", 1), ("all_to_all", 16)])
def test_one_token_and_a_number_that_divides(how, count):
    check(on("data=2,expert=4", how, None), count, moe.make("dense"))


def test_hidden_rows_that_do_not_divide_stay_whole():
    # 96 = 3 blocks of 32 on tensor=2: each device of tensor has all of them, and one bias each.
    check(on("expert=2,tensor=2", "all_reduce"), 4, moe.make("dense", ffn=moe.F))


@pytest.mark.parametrize(
    "mesh, how, experts, ffn",
    [
        ("expert=3", "all_reduce", 6, 128),
        ("expert=5", "all_to_all", 10, 128),
        ("data=3,expert=2", "all_to_all", 8, 128),
        ("data=7", "all_reduce", 8, 128),
        ("tensor=3", "all_reduce", 8, moe.F),  # 3 blocks of 32, one on each
    ],
)
def test_axes_of_odd_sizes(mesh, how, experts, ffn):
    check(on(mesh, how, 2), 11, moe.make("dense", experts, ffn))


def test_padded_rows_have_no_expert():
    # Else they would take slots and reads of weights from real ones, though they add nothing.
    x_ND, weights_NX = moe.tokens(3)
    ids_NX = jnp.zeros((3, moe.X), jnp.int32)
    for array, fill in zip(pad_rows(x_ND, ids_NX, weights_NX, 4), (0, -1, 0), strict=True):
        assert array.shape[0] == 4 and (array[3] == fill).all()


def test_any_devices_in_any_order():
    # The place on the axis decides, not the device's number.
    devices = [jax.devices()[i] for i in (6, 1, 7, 2)]
    experts, (x_ND, weights_NX) = moe.make("dense"), moe.tokens(9)
    ids_NX = moe.routings(9)["holes"]
    expected = moe.expected(x_ND, ids_NX, weights_NX, experts)
    for how in ("all_reduce", "all_to_all"):
        mesh = sharding.make_mesh(data=2, expert=2, devices=devices)
        run = functools.partial(sharding.dispatch, mesh=mesh, compute=moe.compute, how=how)
        out = jax.jit(run)(x_ND, ids_NX, weights_NX, experts)
        assert out.sharding.device_set == set(devices)
        assert np.abs(out - expected).max() <= FLOAT32_OP * np.abs(expected).max()


def test_slots_that_even_routing_needs():
    # A quarter above even: one round mostly, and no more memory than that.
    assert default_slots(100, 4, 8) == 63  # 50 wanted
    assert default_slots(100, 4, 2) == 100  # each device wanted by nearly all
    assert default_slots(1, 1, 64) == default_slots(0, 4, 8) == 1


def test_slots_change_memory_not_results():
    x_ND, weights_NX = moe.tokens(13)
    experts = moe.make("dense")
    for ids_NX in moe.routings(13).values():
        few, many = (
            on("data=2,expert=4", "all_to_all", slots)(x_ND, ids_NX, weights_NX, experts)
            for slots in (1, 3)
        )
        np.testing.assert_allclose(few, many, rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="at least 1; got 0"):
        on("expert=2", "all_to_all", 0)(x_ND, ids_NX, weights_NX, experts)


@pytest.mark.parametrize("how", ["all_reduce", "all_to_all"])
def test_a_row_does_not_see_its_neighbours(how):
    run, experts = on("data=2,expert=4", how), moe.make("dense")
    x_ND, weights_NX = moe.tokens(13)
    ids_NX = moe.routings(13)["even"]
    first = np.asarray(run(x_ND, ids_NX, weights_NX, experts))
    np.testing.assert_array_equal(first, run(x_ND, ids_NX, weights_NX, experts))
    # Another order: the same bits in that order.
    order = np.random.default_rng(5).permutation(13)
    again = run(x_ND[order], ids_NX[order], weights_NX[order], experts)
    np.testing.assert_array_equal(first[order], again)
    # Other neighbours, NaN among them, all to one expert: row 4 keeps its bits.
    strange = moe.routings(13)["one expert"].at[4].set(ids_NX[4])
    nan_ND = jnp.full_like(x_ND, jnp.nan).at[4].set(x_ND[4])
    np.testing.assert_array_equal(first[4], run(nan_ND, strange, weights_NX, experts)[4])


@pytest.mark.parametrize("mesh", ["tensor=2", "expert=2,tensor=2"])
def test_the_down_bias_is_added_once(mesh):
    # Weights of 0, a bias of 1 and choices that sum to 1: the output is 1 on any mesh.
    experts = jax.tree.map(jnp.zeros_like, moe.make(MESHES[mesh]))
    experts = dataclasses.replace(experts, down_bias=jnp.ones_like(experts.down_bias))
    x_ND, _ = moe.tokens(13)
    quarter = jnp.full((13, moe.X), 0.25).at[:, 0].set(0.5)
    out = on(mesh, "all_reduce")(x_ND, moe.routings(13)["even"], quarter, experts)
    np.testing.assert_array_equal(out, 1)


@pytest.mark.parametrize("how, chosen", [("all_reduce", [0, 1, 2]), ("all_to_all", [0, 2, 4])])
def test_bfloat16_is_added_in_float32(how, chosen):
    # Weights of 0 and biases 256, 1, 1: 258, and 256 where bfloat16 holds a sum on the way. Experts
    # 0 and 1 are on one device, 2 and 4 on others.
    experts = jax.tree.map(lambda a: jnp.zeros_like(a, jnp.bfloat16), moe.make("dense"))
    bias_ED = jnp.ones_like(experts.down_bias).at[0].set(256)
    experts = dataclasses.replace(experts, down_bias=bias_ED)
    x_ND = jnp.ones((8, moe.D), jnp.bfloat16)
    ids_NX = jnp.tile(jnp.asarray(chosen, jnp.int32), (8, 1))
    out = on("expert=4", how)(x_ND, ids_NX, jnp.ones(ids_NX.shape, jnp.float32), experts)
    np.testing.assert_array_equal(out.astype(jnp.float32), 258)


@pytest.mark.parametrize("mesh", ["data=2,expert=2,tensor=2"])
def test_gradients_of_all_reduce_are_those_of_one_device(mesh):
    made = sharding.make_mesh(**sharding.parse_mesh(mesh))
    x_ND, weights_NX = moe.tokens(13)
    ids_NX, experts = moe.routings(13)["holes"], moe.make("dense")

    def loss(x_ND, weights_NX, experts, mesh):
        out = sharding.dispatch(
            x_ND, ids_NX, weights_NX, experts, mesh=mesh, compute=moe.compute, how="all_reduce"
        )
        return jnp.sum(jnp.sin(out))

    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)
    alone, meshed = (grad(x_ND, weights_NX, experts, mesh) for mesh in (None, made))
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(meshed), strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(a).max())
    assert (np.asarray(meshed[0])[::3] == 0).all()  # padded rows have no gradient


def test_experts_that_do_not_divide_are_refused_with_the_numbers():
    x_ND, weights_NX = moe.tokens(4)
    for how in ("all_reduce", "all_to_all"):
        with pytest.raises(ValueError, match="expert=4 does not divide the 6 experts"):
            on("expert=4", how)(x_ND, moe.routings(4)["even"], weights_NX, moe.make("dense", 6))
    check(on("expert=4", "all_to_all"), 13, moe.make("dense", 12), ["even", "holes"])


def test_all_reduce_says_how_many_experts_there_are_in_all():
    """Each device sees all rows of its row of the mesh, which most of its experts do not want."""
    x_ND, weights_NX = moe.tokens(8)
    ids_NX, experts, said = moe.routings(8)["even"], moe.make("dense"), []

    def compute(*args, total=None):
        said.append((args[3].count, total))
        return moe.compute(*args)

    mesh = sharding.make_mesh(data=2, expert=4)
    given = x_ND, ids_NX, weights_NX, experts
    sharding.dispatch(*given, mesh=mesh, compute=compute, how="all_reduce")
    assert set(said) == {(experts.count // 4, experts.count)}


def test_no_mesh_and_one_device_call_straight_through():
    x_ND, weights_NX = moe.tokens(4)
    ids_NX, experts = moe.routings(4)["even"], moe.make("dense")
    direct = moe.compute(x_ND, ids_NX, weights_NX, experts)
    for mesh in (None, sharding.make_mesh()):
        out = sharding.dispatch(
            x_ND, ids_NX, weights_NX, experts, mesh=mesh, compute=moe.compute, how="all_to_all"
        )
        np.testing.assert_array_equal(out, direct)
    for mesh in (None, sharding.make_mesh(), sharding.make_mesh(data=2, expert=4)):
        nobody = (x_ND[:0], ids_NX[:0], weights_NX[:0])
        for how in ("all_reduce", "all_to_all"):
            out = sharding.dispatch(*nobody, experts, mesh=mesh, compute=moe.compute, how=how)
            assert out.shape == (0, moe.D)
    with pytest.raises(ValueError, match="got 'ring'"):
        on("expert=2", "ring")(x_ND, ids_NX, weights_NX, experts)


def test_auto_sends_only_large_batches():
    def chosen(tokens, **sizes):
        mesh = AbstractMesh(tuple(sizes.get(axis, 1) for axis in sharding.AXES), sharding.AXES)
        return sharding.choose(tokens, mesh)

    assert chosen(1, expert=8) == chosen(2047, expert=8) == "all_reduce"
    assert chosen(2048, expert=4) == chosen(65536, expert=8) == "all_to_all"
    assert chosen(4095, data=2, expert=8) == "all_reduce"  # 2047.5 a row of data
    assert chosen(65536, expert=2) == chosen(65536, data=8) == "all_reduce"


def test_each_device_turns_its_own_experts_into_another_layout():
    mesh = sharding.make_mesh(expert=2, tensor=2)
    experts = moe.make("checkpoint")
    specs = sharding.expert_specs("checkpoint", experts.ffn, mesh)
    placed = {
        leaf: jax.device_put(array, jax.NamedSharding(mesh, specs[leaf]))
        for leaf, array in experts.leaves().items()
    }
    placed = dataclasses.replace(experts, **placed)
    turned = sharding.relayout(placed, "triton", mesh)
    whole = experts.to_layout("triton").leaves()
    for leaf, array in turned.leaves().items():
        np.testing.assert_array_equal(array, whole[leaf], err_msg=leaf)
        spec = sharding.expert_specs("triton", experts.ffn, mesh)[leaf]
        assert array.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), array.ndim), leaf
    check(on("expert=2,tensor=2", "all_reduce"), 4, turned, ["even"])
    back = sharding.relayout(turned, "checkpoint", mesh).leaves()
    for leaf, array in experts.leaves().items():
        np.testing.assert_array_equal(back[leaf], array, err_msg=leaf)


def test_all_reduce_is_one_collective_and_moves_no_weights():
    mesh = sharding.make_mesh(data=2, expert=2, tensor=2)
    experts = moe.make("checkpoint")
    specs = sharding.expert_specs("checkpoint", experts.ffn, mesh)
    placed = {
        leaf: jax.device_put(array, jax.NamedSharding(mesh, specs[leaf]))
        for leaf, array in experts.leaves().items()
    }
    x_ND, weights_NX = moe.tokens(16)
    run = jax.jit(
        lambda x, ids, weights, leaves: sharding.all_reduce(
            x, ids, weights, dataclasses.replace(experts, **leaves), mesh=mesh, compute=moe.compute
        )
    )
    lowered = run.lower(x_ND, moe.routings(16)["even"], weights_NX, placed)
    text = lowered.compile().as_text()
    collectives = [
        name
        for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute")
        for _ in range(text.count(f" {name}(") + text.count(f" {name}-start("))
    ]
    assert collectives == ["all-reduce"]
