import types

import jax
import pytest

from gptoss_jax import sharding
from gptoss_jax.config import Config


def test_axes_are_named_sized_and_automatic():
    mesh = sharding.make_mesh(data=2, expert=2, tensor=2)
    assert mesh.axis_names == ("data", "expert", "tensor")
    assert dict(mesh.shape) == {"data": 2, "expert": 2, "tensor": 2}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert list(mesh.devices.flat) == jax.devices()[:8]


def test_the_first_devices_are_taken_in_order():
    mesh = sharding.make_mesh(expert=2, devices=jax.devices()[5:])
    assert list(mesh.devices.flat) == jax.devices()[5:7]


def test_too_few_devices_and_bad_sizes():
    with pytest.raises(
        ValueError, match=r"data=3, expert=4, tensor=1 needs 12 devices; this has 8.*XLA_FLAGS"
    ):
        sharding.make_mesh(data=3, expert=4)
    for size in (0, -1, True):
        with pytest.raises(ValueError, match="mesh axis expert must be a whole number"):
            sharding.make_mesh(expert=size)


def test_several_processes_must_use_every_device(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="uses 4 of the 8 devices of 2 processes"):
        sharding.make_mesh(expert=4)
    assert sharding.make_mesh(expert=8).size == 8
    assert sharding.make_mesh(expert=4, devices=jax.local_devices()).size == 4


def test_parse_mesh():
    assert sharding.parse_mesh("data=2, expert=4") == {"data": 2, "expert": 4}
    assert sharding.parse_mesh("") == {}
    for text in ("experts=2", "expert", "expert=0", "expert=-2", "expert=two", "expert=2,expert=4"):
        with pytest.raises(ValueError, match="mesh"):
            sharding.parse_mesh(text)


def test_check_mesh_names_every_size_that_does_not_divide():
    config = types.SimpleNamespace(experts=12, kv_heads=2, ffn=64, vocab=53)
    sharding.check_mesh(config, sharding.make_mesh(expert=4, tensor=2))
    with pytest.raises(ValueError) as error:
        sharding.check_mesh(config, sharding.make_mesh(expert=2, tensor=4))
    assert "tensor=4 does not divide the 2 key/value heads (it must be one of [1, 2])" in str(
        error.value
    )
    with pytest.raises(ValueError, match=r"expert=8 does not divide the 12 experts"):
        sharding.check_mesh(config, sharding.make_mesh(expert=8))


def test_foreign_meshes_are_refused():
    foreign = jax.make_mesh((2, 2), ("x", "expert"))
    with pytest.raises(ValueError, match=r"axes \('data', 'expert', 'tensor'\)"):
        sharding.check_mesh(Config.gpt_oss_20b(), foreign)
