"""gpt-oss in float64 NumPy, written from the architecture; imports nothing of ours.

Slow and plain on purpose: loops over heads, tokens and experts, no cache, one sequence at a time.

`numbers` is anything with the attributes that `Config` documents (layers, embed, kv_heads,
q_per_kv, head_width, experts, experts_per_token, ffn, vocab, window, norm_eps, swiglu_limit,
swiglu_alpha and the rope_ ones). `weights` is a plain dict of arrays named as in the Hugging Face
checkpoint, except the experts, whose rows are outputs as in the packed files:

    model.layers.N.mlp.experts.gate_up_rows  [E, 2F, D]   row 2i is gate i, row 2i + 1 is up i
    model.layers.N.mlp.experts.down_rows     [E, D, F]
"""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass
class Trace:
    """What the model computed for one sequence of T tokens. Lists hold one entry a layer."""

    logits: np.ndarray  # [T, V]
    embedded: np.ndarray  # [T, D]
    attended: list[np.ndarray]  # [T, D], the residual stream after attention
    hidden: list[np.ndarray]  # [T, D], the residual stream after the experts
    expert_ids: list[np.ndarray]  # [T, X], best first
    expert_weights: list[np.ndarray]  # [T, X]
    clamped: list[float]  # share of the chosen gate and up values beyond the clamp


def rope_range(numbers) -> tuple[float, float]:
    """Channels between which YaRN passes from the original frequency to the stretched one."""

    def channel(turns):
        wavelength = numbers.rope_original_context / (turns * 2 * math.pi)
        return numbers.head_width / 2 * math.log(wavelength) / math.log(numbers.rope_theta)

    return channel(numbers.rope_beta_fast), channel(numbers.rope_beta_slow)


def rope_frequencies(numbers) -> tuple[np.ndarray, float]:
    """Radians a position for each of H/2 channels, and the factor on both cosine and sine."""
    half = numbers.head_width // 2
    original = numbers.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    if numbers.rope_factor <= 1:
        return original, 1.0
    low, high = rope_range(numbers)
    stretched = np.clip((np.arange(half) - low) / (high - low), 0, 1)
    mixed = original * (1 - stretched) + original / numbers.rope_factor * stretched
    return mixed, 0.1 * math.log(numbers.rope_factor) + 1


def rotate(x: np.ndarray, positions: np.ndarray, numbers) -> np.ndarray:
    """Rotate [T, H]: channel i of the first half turns with channel i of the second half."""
    frequencies, concentration = rope_frequencies(numbers)
    angle = positions[:, None].astype(np.float64) * frequencies
    cos, sin = np.cos(angle) * concentration, np.sin(angle) * concentration
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def sink_softmax(scores: np.ndarray, sink: float) -> np.ndarray:
    """Softmax over the scores and one more, `sink`, whose share is then thrown away."""
    top = max(float(np.max(scores, initial=-np.inf)), sink)
    shares = np.exp(scores - top)
    return shares / (shares.sum() + np.exp(sink - top))


def swiglu(gate, up, *, limit: float | None = 7.0, alpha: float = 1.702):
    gate, up = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-alpha * gate)) * (up + 1)


def route(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest of one token's router logits, best first, and the softmax over those k."""
    ids = np.argsort(-logits, kind="stable")[:k]
    shares = np.exp(logits[ids] - logits[ids[0]])
    return ids, shares / shares.sum()


def attention(q, k, v, sinks, positions, window: int | None) -> np.ndarray:
    """q [T, K*G, H] rotated, k and v [T, K, H] -> [T, K*G, H]. Query head h reads head h // G."""
    T, heads, width = q.shape
    group = heads // k.shape[1]
    out = np.zeros_like(q)
    for t in range(T):
        distance = positions[t] - positions
        visible = (distance >= 0) & ((distance < window) if window is not None else True)
        for h in range(heads):
            scores = k[visible, h // group] @ q[t, h] / math.sqrt(width)
            out[t, h] = sink_softmax(scores, float(sinks[h])) @ v[visible, h // group]
    return out


def experts(x, layer: dict, numbers, ids, shares) -> tuple[np.ndarray, float]:
    """Weighted sum over each token's experts, and the share of pre-activations beyond the clamp."""
    limit = numbers.swiglu_limit
    out, beyond, count = np.zeros_like(x), 0, 0
    for t in range(len(x)):
        for e, share in zip(ids[t], shares[t], strict=True):
            rows = layer["mlp.experts.gate_up_rows"][e] @ x[t]
            rows = rows + layer["mlp.experts.gate_up_proj_bias"][e]
            gate, up = rows[0::2], rows[1::2]
            if limit is not None:
                beyond += int((gate > limit).sum() + (np.abs(up) > limit).sum())
            count += rows.size
            inner = swiglu(gate, up, limit=limit, alpha=numbers.swiglu_alpha)
            down = (
                layer["mlp.experts.down_rows"][e] @ inner + layer["mlp.experts.down_proj_bias"][e]
            )
            out[t] += share * down
    return out, beyond / count


def window_of(numbers, layer: int) -> int | None:
    sliding = getattr(numbers, "sliding", None)
    slides = layer % 2 == 0 if sliding is None else sliding[layer]
    return numbers.window if slides else None


def trace(numbers, weights: dict, tokens, positions=None) -> Trace:
    """Run one sequence. `positions` default to 0, 1, 2, ...; attention sees nothing else."""
    tokens = np.asarray(tokens)
    assert tokens.ndim == 1, f"one sequence at a time, got shape {tokens.shape}"
    T, K, G, H = len(tokens), numbers.kv_heads, numbers.q_per_kv, numbers.head_width
    positions = np.arange(T) if positions is None else np.asarray(positions)
    weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    x = weights["model.embed_tokens.weight"][tokens]
    result = Trace(np.empty(0), x, [], [], [], [], [])
    for number in range(numbers.layers):
        prefix = f"model.layers.{number}."
        layer = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}

        y = rms_norm(x, layer["input_layernorm.weight"], numbers.norm_eps)
        q, k, v = (
            (y @ layer[f"self_attn.{n}_proj.weight"].T + layer[f"self_attn.{n}_proj.bias"]).reshape(
                T, heads, H
            )
            for n, heads in (("q", K * G), ("k", K), ("v", K))
        )
        q = np.stack([rotate(q[:, h], positions, numbers) for h in range(K * G)], axis=1)
        k = np.stack([rotate(k[:, h], positions, numbers) for h in range(K)], axis=1)
        sinks = layer["self_attn.sinks"]
        y = attention(q, k, v, sinks, positions, window_of(numbers, number)).reshape(T, K * G * H)
        x = x + y @ layer["self_attn.o_proj.weight"].T + layer["self_attn.o_proj.bias"]
        result.attended.append(x)

        y = rms_norm(x, layer["post_attention_layernorm.weight"], numbers.norm_eps)
        logits = y @ layer["mlp.router.weight"].T + layer["mlp.router.bias"]
        routes = [route(row, numbers.experts_per_token) for row in logits]
        ids, shares = np.stack([i for i, _ in routes]), np.stack([s for _, s in routes])
        y, clamped = experts(y, layer, numbers, ids, shares)
        x = x + y
        result.hidden.append(x)
        result.expert_ids.append(ids)
        result.expert_weights.append(shares)
        result.clamped.append(clamped)
    y = rms_norm(x, weights["model.norm.weight"], numbers.norm_eps)
    result.logits = y @ weights["lm_head.weight"].T
    return result


def logits(numbers, weights: dict, tokens, positions=None) -> np.ndarray:
    """[T, V] for one sequence of T tokens."""
    return trace(numbers, weights, tokens, positions).logits
