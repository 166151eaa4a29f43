"""One layer of experts to send tokens to, and what must come back, in float64 NumPy."""

import functools

import jax.numpy as jnp
import numpy as np

from gptoss_jax.kernels.expert_matmul import ExpertWeights, expert_matmul

D, F, X = 64, 96, 3  # F has 3 blocks of 32: whole on tensor=2; 2 F = 192 is not D * X either
LIMIT, ALPHA = 2.0, 1.702  # a clamp that random activations reach

compute = functools.partial(
    expert_matmul, limit=LIMIT, alpha=ALPHA, backend="xla", out_dtype=jnp.float32
)


def make(layout: str, experts: int = 8, ffn: int = 128, seed: int = 0) -> ExpertWeights:
    """Random experts; biases as large as what they are added to."""
    r = np.random.default_rng(seed)
    biases = {
        "gate_up_bias": _array(r.normal(size=(experts, 2 * ffn))),
        "down_bias": _array(r.normal(size=(experts, D))),
    }
    if layout == "dense":
        return ExpertWeights(
            layout="dense",
            gate_up=_array(r.normal(size=(experts, 2 * ffn, D)) / D**0.5),
            down=_array(r.normal(size=(experts, D, ffn)) / ffn**0.5),
            **biases,
        )
    leaves = {}
    for name, out, inner in (("gate_up", 2 * ffn, D), ("down", D, ffn)):
        shape = (experts, out, inner // 32)
        leaves[f"{name}_blocks"] = jnp.asarray(r.integers(0, 256, (*shape, 16), dtype=np.uint8))
        leaves[f"{name}_scales"] = jnp.asarray(r.integers(121, 126, shape, dtype=np.uint8))
    return ExpertWeights(layout="checkpoint", **leaves, **biases)


def expected(x_ND, ids_NX, weights_NX, experts: ExpertWeights) -> np.ndarray:
    """Token by token, choice by choice; an id that is no expert's adds nothing."""
    whole = experts.dense(jnp.dtype("float32"))
    gate_up, down, up_bias, down_bias = (
        np.asarray(leaf, np.float64)
        for leaf in (whole.gate_up, whole.down, whole.gate_up_bias, whole.down_bias)
    )
    x_ND, out_ND = np.asarray(x_ND, np.float64), np.zeros(x_ND.shape)
    for n, (ids, weights) in enumerate(
        zip(np.asarray(ids_NX), np.asarray(weights_NX), strict=True)
    ):
        for i, weight in zip(ids, weights, strict=True):
            if 0 <= i < len(down):
                hidden = gate_up[i] @ x_ND[n] + up_bias[i]
                gate, up = np.minimum(hidden[::2], LIMIT), np.clip(hidden[1::2], -LIMIT, LIMIT)
                hidden = gate / (1 + np.exp(-ALPHA * gate)) * (up + 1)
                out_ND[n] += weight * (down[i] @ hidden + down_bias[i])
    return out_ND


def tokens(count: int, seed: int = 1):
    r = np.random.default_rng(seed)
    return _array(r.normal(size=(count, D))), _array(r.uniform(0.1, 1, size=(count, X)))


def routings(count: int, experts: int = 8, seed: int = 2) -> dict[str, jnp.ndarray]:
    """Ids [count, X] by name: even, skewed, and wrong in every way a padded row can be."""
    r = np.random.default_rng(seed)
    even = np.stack([r.permutation(experts)[:X] for _ in range(count)])
    holes = np.where(r.random((count, X)) < 0.4, r.choice([-1, experts, 99, -7], (count, X)), even)
    holes[::3] = -1  # whole rows that are padding
    return {
        name: jnp.asarray(ids, jnp.int32)
        for name, ids in {
            "even": even,
            "one expert": np.full((count, X), experts - 1),
            "one device": np.broadcast_to(np.arange(X) % 2 + experts - 2, (count, X)),
            "upper half": even % (experts // 2) + experts // 2,
            "holes": holes,
            "nobody": np.full((count, X), -1),
        }.items()
    }


def _array(values) -> jnp.ndarray:
    return jnp.asarray(np.asarray(values, np.float32))
