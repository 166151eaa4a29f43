"""AdamW against its textbook form in float64, the schedule, and what decays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_cases import SMALL, parameters

from gptoss_jax.train import Optimizer, optimizer

SETTINGS = Optimizer(peak=0.01, warmup=2, floor=0.1, weight_decay=0.3, clip=1.5)


def test_schedule():
    rate = optimizer.schedule(SETTINGS, 10)
    got = [float(rate(step)) for step in (0, 1, 2, 6, 10, 50)]
    assert got == pytest.approx([0, 0.005, 0.01, 0.0055, 0.001, 0.001])


def test_adamw_by_hand():
    rng = np.random.default_rng(0)
    names = (
        "blocks.0.attn.out_DKGH",  # decays, the others do not
        "blocks.0.attn.out_bias_D",
        "blocks.0.attn_norm.scale_D",
        "blocks.0.attn.sinks_KG",
        "blocks.0.moe.experts.down_bias",
        "embed.weight_VD",
    )
    params = {name: rng.normal(size=(3, 4)).astype(np.float32) for name in names}
    chain = optimizer.make(SETTINGS, 10)
    state = chain.init({k: jnp.asarray(v) for k, v in params.items()})
    ours = {k: jnp.asarray(v) for k, v in params.items()}
    x = {k: v.astype(float) for k, v in params.items()}
    m = {k: np.zeros((3, 4)) for k in names}
    v = {k: np.zeros((3, 4)) for k in names}
    step = jax.jit(lambda g, s, p: optimizer.update(chain, g, s, p))
    for t in range(1, 5):
        g = {k: rng.normal(size=(3, 4)).astype(np.float32) for k in names}
        ours, state = step({k: jnp.asarray(a) for k, a in g.items()}, state, ours)
        norm = np.sqrt(sum((a.astype(float) ** 2).sum() for a in g.values()))
        rate = float(optimizer.schedule(SETTINGS, 10)(t - 1))
        for k in names:
            clipped = g[k] * min(1.0, SETTINGS.clip / norm)
            m[k] = 0.9 * m[k] + 0.1 * clipped
            v[k] = 0.95 * v[k] + 0.05 * clipped**2
            adam = m[k] / (1 - 0.9**t) / (np.sqrt(v[k] / (1 - 0.95**t)) + 1e-8)
            decay = SETTINGS.weight_decay if k == names[0] else 0.0
            x[k] -= rate * (adam + decay * x[k])
    for k in names:
        np.testing.assert_allclose(ours[k], x[k], rtol=1e-5)


def test_matrices_alone_decay():
    decaying = {
        name.split(".", 2)[-1].removeprefix("unembed.")
        for name in parameters(SMALL)
        if optimizer.decays(name)
    }
    assert decaying == {
        "attn.qkv_KMHD",
        "attn.out_DKGH",
        "moe.router_ED",
        "moe.experts.gate_up",
        "moe.experts.down",
        "weight_VD",
    }
    assert optimizer.decays("unembed.weight_VD") and not optimizer.decays("embed.weight_VD")


def test_norm_is_of_the_whole_tree():
    tree = {"a": jnp.full((2, 2), 3.0), "b": jnp.full(4, 4.0)}
    assert float(optimizer.norm(tree)) == pytest.approx(10.0)
