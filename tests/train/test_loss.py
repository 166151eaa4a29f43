"""Cross entropy and load balance against loops in float64, and what must not matter to them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_jax.train.loss import balance, cross_entropy


def test_cross_entropy_is_the_weighted_mean():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 5, 7)) * 4
    targets = rng.integers(0, 7, (2, 5))
    weights = np.array([[1, 0, 1, 1, 0], [0, 0, 1, 0, 1]], float)
    total = 0.0
    for b in range(2):
        for t in range(5):
            row = logits[b, t]
            total += weights[b, t] * (np.log(np.exp(row).sum()) - row[targets[b, t]])
    got = cross_entropy(
        jnp.asarray(logits, jnp.float32), jnp.asarray(targets), jnp.asarray(weights, jnp.float32)
    )
    # float32 sums of 7 terms near e^10, then of 5: a few units in the last place.
    assert float(got) == pytest.approx(total / weights.sum(), rel=1e-6)


def test_masked_positions_cannot_matter_even_as_nan():
    logits = jnp.zeros((1, 3, 4)).at[0, 1].set(jnp.nan)
    weights = jnp.array([[1.0, 0.0, 1.0]])
    targets = jnp.zeros((1, 3), jnp.int32)
    value, gradient = jax.value_and_grad(cross_entropy)(logits, targets, weights)
    assert float(value) == pytest.approx(np.log(4))
    assert np.isfinite(np.asarray(gradient)).all() and not np.asarray(gradient)[0, 1].any()
    assert float(cross_entropy(logits, targets, jnp.zeros((1, 3)))) == 0.0


def by_loops(logits, ids, live):
    """E · Σ f_e P_e in float64."""
    N, E = logits.shape
    f, P, tokens = np.zeros(E), np.zeros(E), 0
    for n in range(N):
        if live[n]:
            tokens += 1
            exps = np.exp(logits[n] - logits[n].max())
            P += exps / exps.sum()
            for e in ids[n]:
                f[e] += 1 / ids.shape[1]
    return E * float((f / tokens) @ (P / tokens))


def chosen(logits, k):
    return np.argsort(-logits, axis=1, kind="stable")[:, :k].astype(np.int32)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.floats(0.01, 100))
def test_balance_equals_loops_and_is_never_negative(seed, spread):
    # RT12: raw logits in place of probabilities would go far below zero here.
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1.0, spread, (12, 6)).astype(np.float32)
    live = np.r_[True, rng.random(11) < 0.6]
    ids = chosen(logits, 3)
    got = float(balance(jnp.asarray(logits), jnp.asarray(ids), jnp.asarray(live)))
    assert got == pytest.approx(by_loops(logits.astype(float), ids, live), rel=1e-5)
    assert got >= 0


def test_uniform_routing_gives_one_and_collapse_gives_E():
    # Switch convention: independent of how many experts a token chooses.
    E = 6
    ids = np.array([[n % E, (n + 1) % E] for n in range(E)], np.int32)
    live = jnp.ones(E, bool)
    assert float(balance(jnp.zeros((E, E)), jnp.asarray(ids), live)) == pytest.approx(1.0)
    one = np.zeros((E, E), np.float32)
    one[:, 2] = 50
    got = balance(jnp.asarray(one), jnp.full((E, 1), 2, jnp.int32), live)
    assert float(got) == pytest.approx(E)


def test_padding_does_not_count():
    # RT13: 30 padding tokens change nothing, not even with NaN logits or ids of -1.
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(9, 5)).astype(np.float32)
    ids = chosen(logits, 2)
    alone = balance(jnp.asarray(logits), jnp.asarray(ids), jnp.ones(9, bool))
    padded = balance(
        jnp.asarray(np.r_[logits, np.full((30, 5), np.nan, np.float32)]),
        jnp.asarray(np.r_[ids, np.full((30, 2), -1, np.int32)]),
        jnp.asarray(np.arange(39) < 9),
    )
    assert float(alone) == float(padded)


def test_its_gradient_evens_the_router_out():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(size=(64, 4)) + np.array([3.0, 0, 0, 0]), jnp.float32)
    ids, live = jnp.asarray(chosen(np.asarray(logits), 1)), jnp.ones(64, bool)
    gradient = jax.grad(balance)(logits, ids, live)
    assert float(gradient[:, 0].sum()) > 0 > float(gradient[:, 1:].sum())
