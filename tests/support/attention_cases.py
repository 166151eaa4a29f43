"""Attention inputs that are hard in one way each, and float64 loops that say what is right."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes never coincide. `positions` draws (q_pos [B, T], k_pos [B, S])."""

    name: str
    B: int
    T: int
    K: int
    G: int
    H: int
    S: int
    window: int | None
    positions: object
    sink: float = 0.0

    def make(self, dtype=jnp.float32, seed=0):
        rng = np.random.default_rng(seed)
        B, T, K, G, H, S = self.B, self.T, self.K, self.G, self.H, self.S
        q, k, v = (
            jnp.asarray(rng.standard_normal(shape), dtype)
            for shape in ((B, T, K, G, H), (B, K, S, H), (B, K, S, H))
        )
        sinks = jnp.asarray(rng.standard_normal((K, G)) + self.sink, jnp.float32)
        q_pos, k_pos = (np.asarray(pos, np.int32) for pos in self.positions(rng, B, T, S))
        # Slots that no query sees hold what must not matter.
        seen = [
            [any(sees(i, j, self.window) for i in q_pos[b]) for j in k_pos[b]] for b in range(B)
        ]
        seen = np.asarray(seen)[:, None, :, None]
        k, v = jnp.where(seen, k, jnp.nan), jnp.where(seen, v, jnp.nan)
        return q, k, v, sinks, jnp.asarray(q_pos), jnp.asarray(k_pos)


def sees(q_pos: int, k_pos: int, window: int | None) -> bool:
    return 0 <= k_pos <= q_pos and (window is None or q_pos - k_pos < window)


def loops(q, k, v, sinks, q_pos, k_pos, window):
    """float64, one query head at a time; imports nothing of ours."""
    q, k, v, sinks = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v, sinks))
    out = np.zeros(q.shape)
    B, T, K, G, H = q.shape
    for b in range(B):
        for t in range(T):
            slots = [s for s, p in enumerate(k_pos[b]) if sees(int(q_pos[b, t]), int(p), window)]
            for kv in range(K):
                for g in range(G):
                    scores = [q[b, t, kv, g] @ k[b, kv, s] / math.sqrt(H) for s in slots]
                    top = max([sinks[kv, g], *scores])
                    weights = [math.exp(score - top) for score in scores]
                    total = sum(weights) + math.exp(sinks[kv, g] - top)
                    for s, weight in zip(slots, weights, strict=True):
                        out[b, t, kv, g] += weight / total * v[b, kv, s]
    return out


def causal(rng, B, T, S):
    """A prompt at the start of a cache, rows of different lengths, padding at the end."""
    q_pos, k_pos = np.tile(np.arange(T), (B, 1)), np.tile(np.arange(S), (B, 1))
    for b in range(B):
        q_pos[b, T - 3 * b :] = -1
        k_pos[b, T - 3 * b :] = -1
    return q_pos, k_pos


def left_padded(rng, B, T, S):
    """Padding longer than the window in front: whole blocks in which nothing is visible."""
    q_pos, k_pos = causal(rng, B, T, S)
    q_pos[-1], k_pos[-1] = np.arange(T) - (T - 4), np.arange(S) - (T - 4)
    return np.maximum(q_pos, -1), np.where(np.arange(S) < T, np.maximum(k_pos, -1), -1)


def half_full(rng, B, T, S):
    """A cache with empty slots behind, each row at a length of its own; the last row is padding."""
    q_pos = rng.integers(S // 4, S // 2, (B, 1)) + np.arange(T)
    k_pos = np.tile(np.arange(S), (B, 1))
    k_pos[k_pos > q_pos[:, -1:]] = -1
    q_pos[-1] = -1
    return q_pos, k_pos


def ring(rng, B, T, S):
    """Slot p mod S holds position p; every row has wrapped to another place."""
    last = rng.integers(2 * S, 5 * S, (B, 1))
    held = last - (last - np.arange(S)) % S
    return last, held


def ring_then_chunk(rng, B, T, S):
    """The ring as it was before the chunk, in its own order, then the chunk."""
    last, held = ring(rng, B, T, S - T)
    chunk = last + 1 + np.arange(T)
    return chunk, np.concatenate([held, chunk], axis=1)


def shuffled(rng, B, T, S):
    """Slots in no order, a third of them empty."""
    k_pos = np.stack([rng.permutation(2 * S)[:S] for _ in range(B)])
    k_pos[:, ::3] = -1
    return rng.integers(0, 2 * S, (B, T)), k_pos


# Few shapes, many contents: a shape is compiled once.
ONE = dict(B=3, T=1, K=2, G=3, H=10, S=37)
MANY = ONE | dict(T=19)
DECODE = (
    Case(name="half full", window=None, positions=half_full, **ONE),
    Case(name="ring", window=37, positions=ring, **ONE),
    Case(name="shuffled", window=9, positions=shuffled, **ONE),
    Case(name="large sink", window=None, positions=shuffled, sink=1e4, **ONE),
    Case(name="small sink", window=None, positions=shuffled, sink=-1e4, **ONE),
)
PREFILL = (
    Case(name="causal", window=None, positions=causal, **MANY),
    Case(name="causal window", window=5, positions=causal, **MANY),
    Case(name="left padded", window=5, positions=left_padded, **MANY),
    Case(name="chunk on a cache", window=None, positions=half_full, **MANY),
    Case(name="ring then chunk", window=18, positions=ring_then_chunk, **MANY),
    Case(name="shuffled", window=5, positions=shuffled, **MANY),
    Case(name="large sink", window=None, positions=shuffled, sink=1e4, **MANY),
)
# As wide as the real heads, for bfloat16 and tensor-core tiles.
REAL = Case(
    name="real", B=2, T=33, K=3, G=8, H=64, S=90, window=20, positions=half_full
)  # fmt: skip
REAL_ONE = Case(
    name="real", B=2, T=1, K=3, G=8, H=64, S=150, window=None, positions=half_full
)  # fmt: skip
