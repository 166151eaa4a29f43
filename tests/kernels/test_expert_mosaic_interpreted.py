"""The Mosaic kernel under jax's simulator of shared memory, copies and barriers (jax >= 0.11).

The simulator checks what a race or a wrong count would break: every barrier's completions are
waited for, every copy lands before it is read. It knows no PTX and no left operand in registers:
see test_expert_mosaic for the instructions and test_expert_mosaic_aot for the compiler.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import ALPHA, BIG, LIMIT, in_float64, random_experts, random_rows, relative_error

from gptoss_jax.kernels.expert_matmul import mosaic
from gptoss_jax.kernels.expert_matmul.mosaic import Plan, Shape

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        jax.__version_info__ < (0, 11), reason="jax before 0.11 has no simulator of Mosaic GPU"
    ),
]
BFLOAT16 = 3e-3
SMALL = Plan(
    widths=(8,),
    gate_up=Shape(warpgroups=1, stages=2),
    down=Shape(warpgroups=1, stages=2),
)
# Two and three computing warpgroups, fewer stages than steps and more; tiles in two widths. F = 192
# is 6 tiles of gate_up (3 a piece) and D = 192 three of down: 2 a piece, so the last is done twice.
PLAN = Plan(
    widths=(8, 16),
    gate_up=Shape(warpgroups=3, stages=2),
    down=Shape(warpgroups=2, stages=4),
    partial="float32",
)


@functools.partial(jax.jit, static_argnames="plan")
def interpreted(x, ids, weights, experts, residual=None, *, plan=PLAN):
    return mosaic.expert_matmul(
        x,
        ids,
        weights,
        experts,
        limit=LIMIT,
        alpha=ALPHA,
        out_dtype=jnp.dtype(jnp.float32),
        residual_ND=residual,
        plan=plan,
        interpret=True,
    )


@jax.jit
def fragmented(experts):
    return experts.to_layout("mosaic")


@pytest.fixture(scope="module")
def experts():
    return random_experts(40, embed=192, ffn=192)


def rows(seed):
    return random_rows(seed, 7, embed=192)


def test_the_kernel_equals_float64(experts):
    x, ids, weights = rows(41)
    packed = fragmented(experts)
    assert (
        relative_error(interpreted(x, ids, weights, packed), in_float64(x, ids, weights, experts))
        < BFLOAT16
    )
    # 18 rows of one expert are two tiles; three experts have none.
    crowded = jnp.where(jnp.arange(28).reshape(7, 4) < 18, 3, ids.at[:].set(1))
    assert (
        relative_error(
            interpreted(x, crowded, weights, packed), in_float64(x, crowded, weights, experts)
        )
        < BFLOAT16
    )
    nowhere = jnp.array([[-1, 5, BIG, -BIG]] * 7, jnp.int32)
    out = interpreted(x, nowhere, weights.at[0].set(jnp.nan), packed)
    assert (np.asarray(out) == 0).all()


def test_a_small_batch_and_a_residual(experts):
    x, ids, weights = (a[:3] for a in rows(43))
    residual = x[:, ::-1]
    got = interpreted(x, ids, weights, fragmented(experts), residual, plan=SMALL)
    want = in_float64(x, ids, weights, experts) + np.asarray(residual).astype(np.float64)
    assert relative_error(got, want) < BFLOAT16


def test_a_rows_bits_do_not_depend_on_the_others(experts):
    x, ids, weights = rows(42)
    packed = fragmented(experts)
    ids = ids.at[2].set(jnp.arange(4))
    clean = np.asarray(interpreted(x, ids, weights, packed))
    order = np.array([5, 2, 0, 3, 6, 1, 4])
    moved = np.asarray(interpreted(x[order], ids[order], weights[order], packed))
    np.testing.assert_array_equal(moved, clean[order])
    broken = np.asarray(interpreted(x.at[2].set(jnp.nan), ids, weights, packed))
    assert np.isnan(broken[2]).all()
    np.testing.assert_array_equal(np.delete(broken, 2, axis=0), np.delete(clean, 2, axis=0))
