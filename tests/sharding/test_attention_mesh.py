"""Attention over rows and heads of a mesh is attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import FLOAT32_OP

from gptoss_jax import sharding
from gptoss_jax.kernels.attention import append_and_attend, attention

K, G, H, S = 4, 3, 10, 7


def inputs(B: int, T: int):
    r = np.random.default_rng(B)

    def normal(*shape):
        return jnp.asarray(r.normal(size=shape).astype(np.float32))

    length_B = jnp.asarray(r.integers(T, S - 1, B), jnp.int32)
    slot = jnp.arange(S, dtype=jnp.int32)
    k_pos_BS = jnp.where(slot <= length_B[:, None], slot, -1)
    q_pos_BT = length_B[:, None] + 1 - T + jnp.arange(T, dtype=jnp.int32)
    cache = normal(B, K, S, H), normal(B, K, S, H)
    return normal, cache, normal(K, G), q_pos_BT, k_pos_BS


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=FLOAT32_OP * np.abs(expected).max())


# 4 rows go round data=2, 3 do not; 4 heads go round expert x tensor of 4, and of 8 only tensor.
@pytest.mark.parametrize("B, mesh", [(4, "data=2,expert=2,tensor=2"), (3, "expert=4,tensor=2")])
def test_attention_and_a_step_as_on_one_device(B, mesh):
    made = sharding.make_mesh(**sharding.parse_mesh(mesh))
    normal, cache, sinks_KG, q_pos_BT, k_pos_BS = inputs(B, 3)
    attend = functools.partial(attention, window=4, backend="xla")
    args = (normal(B, 3, K, G, H), *cache, sinks_KG, q_pos_BT, k_pos_BS)
    run = jax.jit(functools.partial(sharding.shard_attention, attend), static_argnames="mesh")
    close(run(*args, mesh=made), run(*args, mesh=None))

    normal, cache, sinks_KG, q_pos_BT, k_pos_BS = inputs(B, 1)
    step = functools.partial(append_and_attend, window=4, backend="xla")
    turn = normal(B, H // 2), normal(B, H // 2)
    q_pos_B = q_pos_BT[:, 0].at[0].set(-1)  # the first row is padding and stores nothing
    slot_B = jnp.where(q_pos_B < 0, S, q_pos_B)
    args = (normal(B, K, G + 2, H), *turn, *cache, sinks_KG, q_pos_B, k_pos_BS, slot_B)
    run = jax.jit(functools.partial(sharding.shard_step, step), static_argnames="mesh")
    for meshed, alone in zip(run(*args, mesh=made), run(*args, mesh=None), strict=True):
        close(meshed, alone)
