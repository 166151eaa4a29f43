"""Random experts and their answer in float64, sharing nothing with the library but the format."""

import jax.numpy as jnp
import numpy as np

from gptoss_jax.kernels.expert_matmul import ExpertWeights
from gptoss_jax.kernels.mxfp4 import lanes

TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
LIMIT, ALPHA = 7.0, 1.702
BIG = 2**31 - 1


def random_experts(seed=0, *, experts=5, embed=160, ffn=96, low=120, high=126, dtype=jnp.bfloat16):
    """Layout "checkpoint"; scale bytes in [low, high); pre-activations well beyond the clamp."""
    rng = np.random.default_rng(seed)

    def packed(out, inner):
        return (
            jnp.asarray(rng.integers(0, 256, (experts, out, inner // 32, 16)), jnp.uint8),
            jnp.asarray(rng.integers(low, high, (experts, out, inner // 32)), jnp.uint8),
        )

    gate_up, down = packed(2 * ffn, embed), packed(embed, ffn)
    return ExpertWeights(
        layout="checkpoint",
        gate_up_blocks=gate_up[0],
        gate_up_scales=gate_up[1],
        gate_up_bias=jnp.asarray(rng.normal(size=(experts, 2 * ffn)), dtype),
        down_blocks=down[0],
        down_scales=down[1],
        down_bias=jnp.asarray(rng.normal(size=(experts, embed)), dtype),
    )


def random_rows(seed, tokens, embed=160, chosen=4, experts=5, dtype=jnp.bfloat16):
    """x, ids of which some are not here, and weights."""
    rng = np.random.default_rng(seed)
    ids = rng.choice([-1, BIG, experts, *range(experts)], (tokens, chosen))
    return (
        jnp.asarray(rng.normal(size=(tokens, embed)), dtype),
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(rng.random((tokens, chosen)), jnp.float32),
    )


def decoded(blocks, scales):
    """float64 [..., 32 G]."""
    blocks, scales = np.asarray(blocks), np.asarray(scales)
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = TABLE[codes] * 2.0 ** (scales.astype(np.float64)[..., None] - 127)
    return values.reshape(*scales.shape[:-1], -1)


def in_float64(x, ids, weights, experts: ExpertWeights, limit=LIMIT):
    """One row, one choice after another; the hidden values rounded to x's dtype."""
    x64 = np.asarray(x).astype(np.float64)
    gate_up = decoded(experts.gate_up_blocks, experts.gate_up_scales)
    down = decoded(experts.down_blocks, experts.down_scales)
    gate_up_bias = np.asarray(experts.gate_up_bias).astype(np.float64)
    down_bias = np.asarray(experts.down_bias).astype(np.float64)
    out = np.zeros(x64.shape)
    for n, row in enumerate(np.asarray(ids).tolist()):
        for choice, e in enumerate(row):
            if e not in range(len(gate_up)):
                continue
            h = gate_up[e] @ x64[n] + gate_up_bias[e]
            gate, up = h[0::2], h[1::2]
            if limit is not None:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            h = gate / (1 + np.exp(-ALPHA * gate)) * (up + 1)
            y = down[e] @ h.astype(x.dtype).astype(np.float64) + down_bias[e]
            out[n] += float(weights[n, choice]) * y
    return out


def relative_error(got, want):
    """Of the whole array, in the 2-norm; NaN where either has one."""
    got = np.asarray(got).astype(np.float64)
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def every_code_and_scale(wide):
    """Lanes [S, 16], scale pairs [S, 16], and bfloat16 values by plane and place, from decode.

    Lane c of scale s holds the codes c, c + 1, c + 5, c + 10 at places 0 .. 3 (modulo 16), in both
    planes; plane 1 has the scale bytes in reverse order.
    """
    scales = np.arange(255 if wide else 129)
    codes = (np.arange(16) + np.array([0, 1, 5, 10])[:, None]) % 16  # [place, c]
    lane = np.zeros(16, np.int64)
    for place, bits in enumerate(lanes.BITS):
        for source, target in enumerate(bits):
            lane |= (codes[place] >> source & 1) << target
    shape = (len(scales), 16)
    pair = scales[:, None] | scales[::-1, None] << 8
    want = []
    for by_row in (scales, scales[::-1]):
        values = [
            TABLE[codes[place]] * 2.0 ** (by_row[:, None].astype(np.float64) - 127)
            for place in range(4)
        ]
        with np.errstate(over="ignore"):
            want.append([v.astype(np.float32).astype(jnp.bfloat16) for v in values])
    return (
        jnp.asarray(np.broadcast_to(lane, shape), jnp.uint16),
        jnp.asarray(np.broadcast_to(pair, shape), jnp.uint16),
        want,
    )
