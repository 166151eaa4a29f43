"""Every plan of the real layers through XLA's own Triton for an H200 that is not there."""

import h200
import jax
import jax.numpy as jnp
import pytest

from gptoss_jax.kernels import device, explore, shapes
from gptoss_jax.kernels.expert_matmul import AXES, ExpertWeights, triton
from gptoss_jax.kernels.expert_matmul.weights import _shapes

pytestmark = pytest.mark.aot

LAYOUTS = ["triton", "mosaic"]


def compiled(problem: shapes.Experts, layout: str, plan: triton.Plan | None):
    where = h200.sharding()

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    e, d, f = problem.experts, problem.embed, problem.ffn
    scales = {"triton": jnp.uint16, "mosaic": jnp.uint32}[layout]
    leaves = {
        name: struct(shape, scales if name.endswith("scales") else jnp.uint16)
        for name, shape in _shapes(layout, e, d, f).items()
    }
    leaves["gate_up_bias"] = struct((e, 2 * f), jnp.bfloat16)
    leaves["down_bias"] = struct((e, d), jnp.bfloat16)
    assert leaves.keys() == AXES[layout].keys()

    def layer(x, logits, live, experts):
        given = x, logits, live, experts, x
        how = dict(chosen=problem.chosen, limit=7.0, alpha=1.702, plan=plan)
        return triton.mixture(*given, **how)

    x = struct((problem.tokens, d), jnp.bfloat16)
    logits = struct((problem.tokens, e), jnp.float32)
    live = struct((problem.tokens,), jnp.int32)
    with device.ahead_of_time():
        args = x, logits, live, ExpertWeights(layout=layout, **leaves)
        return jax.jit(layer).lower(*args).compile()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("problem", shapes.EXPERTS, ids=lambda p: p.name)
def test_the_plan_in_use_compiles(problem, layout):
    # Too much shared memory, or a layout that Triton cannot make, is an error of the compiler.
    # Rows take up to 100 KB a token; no weight is copied, down's being half a byte each.
    down = problem.experts * problem.embed * problem.ffn / 2
    most = problem.tokens * 100e3 + down / 2
    assert compiled(problem, layout, None).memory_analysis().temp_size_in_bytes < most


# One number of tokens for every case of `explore.candidates`; 120b's are those of a quarter.
@pytest.mark.parametrize(
    "layout, tokens",
    [(layout, n) for layout in LAYOUTS for n in (1, 4, 32, 64, 128)] + [("triton", 2048)],
)
def test_candidates_compile(layout, tokens):
    """What `bench --explore` tries at most; a refusal there costs time on the GPU."""
    problem = shapes.experts("20b", tokens)
    for plan in explore.candidates(problem, "NVIDIA H200", layout):
        compiled(problem, layout, plan)
