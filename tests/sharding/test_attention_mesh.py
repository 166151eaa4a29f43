"""Attention and its projections over rows and heads of a mesh are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import FLOAT32_OP

from gptoss_jax import sharding
from gptoss_jax.kernels.attention import append_and_attend, attention
from gptoss_jax.kernels.linear import linear, norm_router

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


PROJECTED = [
    (4, "data=2,expert=2,tensor=2"),  # heads over expert and tensor, rows over data
    (3, "data=2,tensor=2"),  # rows that data does not divide
    (2, "expert=8"),  # heads that do not go round: everything whole
]


@pytest.mark.parametrize("B, mesh", PROJECTED)
def test_projections_and_rows_as_on_one_device(B, mesh):
    # Biases and residuals as large as the sums: one too many, or too few, cannot hide.
    D, T, E, M = 14, 2, 6, G + 2
    normal, *_ = inputs(B, T)
    made = sharding.make_mesh(**sharding.parse_mesh(mesh))
    plain = functools.partial(linear, backend="xla")

    def both(f, *args):
        run = jax.jit(functools.partial(f, plain), static_argnames="mesh")
        meshed, alone = run(*args, mesh=made), run(*args, mesh=None)
        close(meshed, alone)
        return alone

    x_BTD, qkv_KMHD, norm_D = normal(B, T, D), normal(K, M, H, D), normal(D)
    qkv = both(sharding.shard_qkv, x_BTD, qkv_KMHD, normal(K, M, H), norm_D)
    assert qkv.shape == (B, T, K, M, H)
    out = both(
        sharding.shard_out, qkv[:, :, :, :G], normal(D, K, G, H), normal(D), 100 + normal(B, T, D)
    )
    assert out.shape == (B, T, D)

    def routed(x_ND, scale_D, router_ED, bias_E):
        normed_ND, logits_NE = norm_router(x_ND, scale_D, router_ED, bias_E, backend="xla")
        return normed_ND, logits_NE, x_ND[:, 0]

    args = (x_BTD.reshape(-1, D), norm_D, normal(E, D), normal(E))
    run = jax.jit(functools.partial(sharding.shard_rows, routed), static_argnames="mesh")
    for meshed, alone in zip(run(*args, mesh=made), run(*args, mesh=None), strict=True):
        close(meshed, alone)


@pytest.mark.parametrize("B, mesh", [*PROJECTED, (3, "expert=2,tensor=2"), (1, "data=8")])
def test_a_row_of_the_embedding_is_found_wherever_it_lies(B, mesh):
    # 24 rows over 8, 4 and 2 devices; first and last of each part among the ids. Bit for bit.
    table_VD = inputs(0, 1)[0](24, 6).astype(jnp.bfloat16)
    ids_BT = jnp.asarray(np.random.default_rng(1).permutation(24)[: B * 6].reshape(B, 6))
    made = sharding.make_mesh(**sharding.parse_mesh(mesh))
    look = jax.jit(functools.partial(sharding.shard_lookup, mesh=made))
    np.testing.assert_array_equal(look(table_VD, ids_BT), table_VD[ids_BT])
    odd_VD = table_VD[:23]  # divides by nothing: whole everywhere
    np.testing.assert_array_equal(look(odd_VD, ids_BT % 23), odd_VD[ids_BT % 23])


def test_sums_over_heads_are_rounded_once():
    # Two heads' shares, 1000 and -1000 + 3/4: in bfloat16 they are 1000 and -1000.
    mesh = sharding.make_mesh(tensor=2)
    x_BTKGH = jnp.asarray([[1000, 0], [-1000, 0.75]], jnp.bfloat16).reshape(1, 1, 2, 1, 2)
    weight_DKGH = jnp.ones((3, 2, 1, 2), jnp.bfloat16)
    zero = jnp.zeros(3, jnp.bfloat16)
    out = sharding.shard_out(linear, x_BTKGH, weight_DKGH, zero, zero[None, None], mesh=mesh)
    np.testing.assert_array_equal(out.astype(jnp.float32), 0.75)
