"""Every plan of the real layers through XLA's own Triton for an H200 that is not there."""

import h200
import jax
import jax.numpy as jnp
import pytest

from gptoss_jax.kernels import device, explore, shapes
from gptoss_jax.kernels.expert_matmul import AXES, ExpertWeights, triton
from gptoss_jax.kernels.expert_matmul.weights import _shapes

pytestmark = pytest.mark.aot


def compiled(problem: shapes.Experts, plan: triton.Plan | None):
    where = h200.sharding()

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    e, d, f = problem.experts, problem.embed, problem.ffn
    leaves = {n: struct(s, jnp.uint16) for n, s in _shapes("triton", e, d, f).items()}
    leaves["gate_up_bias"] = struct((e, 2 * f), jnp.bfloat16)
    leaves["down_bias"] = struct((e, d), jnp.bfloat16)
    assert leaves.keys() == AXES["triton"].keys()

    def layer(x, logits, live, experts):
        given = x, logits, live, experts, x
        how = dict(chosen=problem.chosen, limit=7.0, alpha=1.702, plan=plan)
        return triton.mixture(*given, **how)

    x = struct((problem.tokens, d), jnp.bfloat16)
    logits = struct((problem.tokens, e), jnp.float32)
    live = struct((problem.tokens,), jnp.int32)
    with device.ahead_of_time():
        args = x, logits, live, ExpertWeights(layout="triton", **leaves)
        return jax.jit(layer).lower(*args).compile()


@pytest.mark.parametrize("problem", shapes.EXPERTS, ids=lambda p: p.name)
def test_the_plan_in_use_compiles(problem):
    # Too much shared memory, or a layout that Triton cannot make, is an error of the compiler.
    assert compiled(problem, None).memory_analysis().temp_size_in_bytes < 2**30


@pytest.mark.parametrize("tokens", [1, 32, 128, 2048])
def test_candidates_compile(tokens):
    """What `bench --explore` tries at most; a refusal there costs time on the GPU."""
    problem = shapes.experts("20b", tokens)
    for plan in explore.candidates(problem, "NVIDIA H200"):
        compiled(problem, plan)
