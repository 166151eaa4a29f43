"""The signal that lets the next kernel come up early: where it is given, that it moves nothing."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from gptoss_jax.kernels import device
from gptoss_jax.kernels.overlap import let_next_start


def numbered(*, interpret=False):
    def body(out_ref):
        i = let_next_start(pl.program_id(0), interpret=interpret)
        plt.store(out_ref.at[i * 2 + jnp.arange(2)], 10 * i + jnp.arange(2))

    return pl.pallas_call(
        body,
        grid=(3,),
        out_shape=jax.ShapeDtypeStruct((6,), jnp.int32),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )()


def test_interpreted_it_is_the_index():
    assert numbered(interpret=True).tolist() == [0, 1, 10, 11, 20, 21]


@pytest.mark.parametrize("kind, signals", [("NVIDIA H200", True), ("NVIDIA A100-SXM4-80GB", False)])
def test_only_where_the_assembler_knows_it(kind, signals):
    with device.ahead_of_time(kind):
        lowered = jax.jit(numbered).trace().lower(lowering_platforms=("cuda",))
    assert ("griddepcontrol.launch_dependents" in lowered.as_text()) == signals


@pytest.mark.gpu
def test_on_a_gpu():
    """A chain of kernels that each read what the last wrote, many times over."""

    def body(x_ref, out_ref):
        i = let_next_start(pl.program_id(0))
        at = i * 128 + jnp.arange(128)
        there = 128 * (pl.num_programs(0) - 1 - i) + jnp.arange(128)
        plt.store(out_ref.at[at], plt.load(x_ref.at[there]) + 1)

    def step(x):
        call = pl.pallas_call(
            body,
            grid=(1024,),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        )
        for _ in range(100):
            x = call(x)
        return x

    start = jnp.arange(1024 * 128, dtype=jnp.int32)
    run = jax.jit(step)
    for _ in range(20):
        assert (run(start) == start + 100).all()
