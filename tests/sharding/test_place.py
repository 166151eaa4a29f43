"""Slices go from files to their devices: each read once, nothing else read."""

import jax
import jax.numpy as jnp
import meshed
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gptoss_jax as gj
from gptoss_jax import sharding
from gptoss_jax.checkpoint import count_bytes


class Recorded:
    """An array that remembers what was asked of it."""

    def __init__(self, array):
        self.array, self.reads = array, []
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, index):
        part = self.array[index]
        self.reads.append(part.nbytes)
        return part


@pytest.mark.parametrize(
    "spec, reads",
    [
        (P("expert", None, "tensor"), [12] * 4),  # two copies over data: one read each
        (P(("data", "expert"), "tensor"), [6] * 8),
        (P(None, "tensor"), [24] * 2),
        (P(), [48]),  # eight copies, one read
    ],
)
def test_every_slice_is_read_once(spec, reads):
    values = Recorded(np.arange(48, dtype=np.uint8).reshape(4, 2, 6))
    cut = NamedSharding(sharding.make_mesh(data=2, expert=2, tensor=2), spec)
    placed = sharding.place(values, cut)
    np.testing.assert_array_equal(placed, values.array)
    assert placed.sharding == cut and placed.dtype == np.uint8
    assert values.reads == reads
    assert sharding.bytes_to_read(values.shape, values.dtype, cut) == sum(reads)


def test_dtype_and_a_reader_that_reads_something_else():
    cut = NamedSharding(sharding.make_mesh(expert=2), P("expert"))
    values = Recorded(np.arange(8, dtype=np.float32))
    assert sharding.place(values, cut, jnp.bfloat16).dtype == jnp.bfloat16
    values.array = values.array[:5]
    with pytest.raises(ValueError, match=r"reading \(\(4, 8\),\) of shape \(8,\) gave \(1,\)"):
        sharding.place(values, cut)


def test_loading_reads_every_byte_once_whatever_the_mesh():
    # One process with all the devices of the mesh needs all of the checkpoint, once.
    with count_bytes() as alone:
        gj.load(meshed.folder(layers=1))
    with count_bytes() as meshed_:
        gj.load(meshed.folder(layers=1), mesh=sharding.make_mesh(data=2, expert=2, tensor=2))
    assert meshed_.bytes_read == alone.bytes_read > 0


def test_loaded_twice_on_meshes_that_share_devices():
    # In another order of devices too; neither load disturbs the other.
    devices = jax.devices()
    meshes = [
        sharding.make_mesh(expert=2, tensor=2),
        sharding.make_mesh(expert=2, tensor=2),
        sharding.make_mesh(tensor=4, devices=devices[3:] + devices[:3]),
    ]
    states = [nnx.state(gj.load(meshed.folder(layers=1), mesh=mesh)) for mesh in meshes]
    for one, same, other in zip(*map(jax.tree.leaves, states), strict=True):
        assert same.sharding == one.sharding
        assert np.asarray(one).tobytes() == np.asarray(same).tobytes()
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_saved_on_one_mesh_restored_on_another_bit_for_bit(tmp_path):
    sizes = [dict(expert=4), dict(data=2, expert=2, tensor=2)]
    first, second = (
        gj.load(meshed.folder(layers=1), mesh=sharding.make_mesh(**axes)) for axes in sizes
    )
    saved, wanted = nnx.state(first), nnx.state(second)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted
        )
        restored = checkpointer.restore(tmp_path / "state", like)
    for got, before, after in zip(*map(jax.tree.leaves, (restored, saved, wanted)), strict=True):
        assert got.sharding == after.sharding and got.dtype == before.dtype
        assert np.asarray(got).tobytes() == np.asarray(before).tobytes()
