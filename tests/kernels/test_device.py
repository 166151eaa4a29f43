"""Kernels are for the device that computes, which a host with a GPU may choose to be its CPU."""

import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from gptoss_jax import make_mesh
from gptoss_jax.config import Config
from gptoss_jax.kernels import device
from gptoss_jax.model import GptOss

GPU = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


@pytest.fixture
def first_is_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: [GPU])


def test_the_first_device_unless_the_mesh_or_the_default_says_otherwise(first_is_a_gpu):
    cpu = jax.devices("cpu")[0]
    assert device.nvidia()
    with device.placed_on(make_mesh(devices=[cpu])):
        assert not device.nvidia()
        with pytest.raises(NotImplementedError, match="triton needs an NVIDIA GPU; this is cpu"):
            device.require_nvidia("triton")
    with jax.default_device(cpu):
        assert not device.nvidia()
    with device.placed_on(None):
        assert device.nvidia()


def test_compiling_ahead_is_for_the_absent_gpu():
    with device.placed_on(make_mesh(devices=jax.devices("cpu")[:1])), device.ahead_of_time():
        assert device.nvidia()


def test_a_model_on_a_mesh_of_cpus_runs_there_though_a_gpu_is_first(first_is_a_gpu):
    mesh = make_mesh(expert=2, devices=jax.devices("cpu")[:2])
    config = Config(
        vocab=50, embed=64, layers=2, q_per_kv=2, kv_heads=2, head_width=32, experts=4,
        experts_per_token=3, ffn=96, window=8,
    )  # fmt: skip
    model = GptOss(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, experts="packed", mesh=mesh)
    assert jnp.isfinite(model([[1, 2, 3]])).all()
