"""The Mosaic layer of the real models through Mosaic's compiler for an H200 that is not there."""

import functools

import h200
import jax
import jax.numpy as jnp
import pytest

from gptoss_jax.kernels import device, shapes
from gptoss_jax.kernels.expert_matmul import ExpertWeights, mosaic

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs jax 0.11's Mosaic GPU"),
]
BOTH = [("20b", 1), ("20b", 256), ("20b", 512), ("20b", 2048), ("20b", 8192), ("120b", 512)]


def compiled(problem: shapes.Experts, plan: mosaic.Plan, layout: str = "mosaic"):
    where = h200.sharding()

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    n, e, d, f = problem.tokens, problem.experts, problem.embed, problem.ffn
    stored = ExpertWeights(
        layout="checkpoint",
        gate_up_blocks=struct((e, 2 * f, d // 32, 16), jnp.uint8),
        gate_up_scales=struct((e, 2 * f, d // 32), jnp.uint8),
        gate_up_bias=struct((e, 2 * f), jnp.bfloat16),
        down_blocks=struct((e, d, f // 32, 16), jnp.uint8),
        down_scales=struct((e, d, f // 32), jnp.uint8),
        down_bias=struct((e, d), jnp.bfloat16),
    )
    turned = jax.eval_shape(lambda experts: experts.to_layout(layout), stored)
    experts = jax.tree.map(lambda leaf: struct(leaf.shape, leaf.dtype), turned)
    layer = functools.partial(
        mosaic.expert_matmul,
        limit=7.0,
        alpha=1.702,
        out_dtype=jnp.dtype(jnp.bfloat16),
        plan=plan,
    )
    rows = (n, problem.chosen)
    with device.ahead_of_time():
        lowered = jax.jit(layer).lower(
            struct((n, d), jnp.bfloat16),
            struct(rows, jnp.int32),
            struct(rows, jnp.float32),
            experts,
        )
        return lowered.compile()


@pytest.mark.parametrize("model, tokens", BOTH)
def test_every_candidate_compiles(model, tokens):
    # Too much shared memory, too many registers or a layout that cannot be is an error here.
    problem = shapes.experts(model, tokens)
    for plan in mosaic.candidates(tokens, problem.chosen, problem.experts):
        program = compiled(problem, plan)
        text = program.as_text()
        assert text.count('custom_call_target="mosaic_gpu_v2"') == 2
        # The schedule in one launch or two, the order of x, the sum; none of XLA's own in between.
        schedule = 1 if tokens * problem.chosen <= 128 else 2
        assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == schedule + 2
        assert "fusion(" not in text
        assert program.memory_analysis().temp_size_in_bytes < 2**30


def test_wide_scales_compile():
    problem = shapes.experts("20b", 2048)
    compiled(problem, mosaic.heuristic(2048, 4, 32), "mosaic_wide")
