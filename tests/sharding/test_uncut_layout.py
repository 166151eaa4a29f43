"""A layout that a tensor axis cannot cut lies whole on its devices, and is summed once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import ALPHA, LIMIT, random_experts

from gptoss_jax import sharding
from gptoss_jax.kernels.expert_matmul import expert_matmul


@pytest.mark.parametrize("how", ["all_reduce", "all_to_all"])
def test_mosaic_tiles_over_tensor(how):
    experts = random_experts(experts=4, embed=128, ffn=64).to_layout("mosaic")
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((8, 128)), jnp.float32)
    ids = jnp.asarray([rng.permutation(4)[:2] for _ in range(8)], jnp.int32)
    weights = jnp.asarray(rng.random(ids.shape), jnp.float32)
    compute = functools.partial(expert_matmul, limit=LIMIT, alpha=ALPHA, backend="xla")
    mesh = sharding.make_mesh(expert=2, tensor=2, devices=jax.devices()[:4])
    alone = compute(x, ids, weights, experts)
    spread = sharding.dispatch(x, ids, weights, experts, mesh=mesh, compute=compute, how=how)
    np.testing.assert_allclose(spread, alone, rtol=0, atol=2e-5 * np.abs(alone).max())
