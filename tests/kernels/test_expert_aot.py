"""Every plan of the real layers through XLA's own Triton for an H200 that is not there."""

import h200
import jax
import jax.numpy as jnp
import pytest

from gptoss_jax.kernels import bench, device, shapes
from gptoss_jax.kernels.expert_matmul import AXES, ExpertWeights, triton
from gptoss_jax.kernels.expert_matmul.weights import _shapes
from gptoss_jax.kernels.routing import top_k

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

    def layer(x, logits, experts):
        return triton.expert_matmul(
            x,
            *top_k(logits, problem.chosen),
            experts,
            limit=7.0,
            alpha=1.702,
            out_dtype=jnp.dtype(jnp.bfloat16),
            plan=plan,
        )

    x = struct((problem.tokens, d), jnp.bfloat16)
    logits = struct((problem.tokens, e), jnp.float32)
    with device.ahead_of_time():
        traced = jax.jit(layer).lower(x, logits, ExpertWeights(layout="triton", **leaves))
        return traced.compile()


@pytest.mark.parametrize("problem", shapes.EXPERTS, ids=lambda p: p.name)
def test_the_plan_in_use_compiles(problem):
    # Too much shared memory, or a layout that Triton cannot make, is an error of the compiler.
    assert compiled(problem, None).memory_analysis().temp_size_in_bytes < 2**30


def test_activations_in_joined_order_compile():
    problem = shapes.experts("20b", 2048)
    plans = [plan for plan in bench.candidates(problem) if plan.order == "joined"]
    compiled(problem, plans[-1])
