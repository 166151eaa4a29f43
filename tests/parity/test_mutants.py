"""Known faults, put into our model one at a time, are seen by the comparison with the oracle.

Each was once in somebody's gpt-oss. A comparison that passes with one of them in place proves
nothing, so every fault must move the logits a hundred times further than tolerances.LOGITS.
Runs uncompiled with the reference backend: nothing is cached, so that a patched function is used.
"""

import dataclasses
import math
import sys

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from checkpoints import decoded, make_weights, write
from flax import nnx

import gptoss_jax as gj
from gptoss_jax import moe, rope
from gptoss_jax.kernels import expert_matmul as mixing
from gptoss_jax.kernels.attention import reference as attention_reference
from gptoss_jax.kernels.expert_matmul import expert_matmul, swiglu

# The package's attribute of that name is the function.
activation = sys.modules["gptoss_jax.kernels.expert_matmul.swiglu"]
TINY, SQUARE = (n.replace(layers=2) for n in (checkpoints.TINY, checkpoints.SQUARE))
T = 40
W = TINY.window
SEEN = 100 * tolerances.LOGITS


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(11).integers(0, TINY.vocab, T)


@pytest.fixture(scope="module")
def stored():
    return {"tiny": make_weights(TINY), "square": make_weights(SQUARE)}


@pytest.fixture(scope="module")
def exact(stored, tokens):
    return {
        "tiny": oracle.logits(TINY, decoded(stored["tiny"]), tokens),
        "square": oracle.logits(SQUARE, decoded(stored["square"]), tokens),
    }


@pytest.fixture(scope="module")
def load(tmp_path_factory, stored):
    """size, changed numbers -> a dense model whose config.json holds them."""

    def load_one(size="tiny", **changes):
        numbers = {"tiny": TINY, "square": SQUARE}[size].replace(**changes)
        folder = write(tmp_path_factory.mktemp("mutant"), numbers, stored[size], "bf16", family=5)
        return gj.load(folder, dtype="float32", backend="reference")

    return load_one


@pytest.fixture(scope="module")
def sound(load):
    return load()


def run(model, tokens):
    ids = jnp.asarray(tokens, jnp.int32)[None]
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    with jax.disable_jit():
        return np.asarray(model.logits(model.hidden(ids, positions)[0])[0])


def rows(got, exact):
    """Largest difference of each position."""
    return np.abs(got - exact).max(axis=-1)


def test_without_a_fault(sound, load, tokens, exact):
    tolerances.assert_logits(run(sound, tokens), exact["tiny"])
    tolerances.assert_logits(run(load("square"), tokens), exact["square"])


@pytest.mark.parametrize(
    "sliding_and_window, first",
    [
        (dict(window=W + 1), W),
        (dict(window=W - 1), W - 1),
        (dict(sliding=(False, True)), W),
        (dict(sliding=(False,) * 2), W),
        (dict(sliding=(True,) * 2), W),
    ],
    ids=["one too many", "one too few", "odd layers slide", "none slides", "all slide"],
)
def test_windows(load, tokens, exact, sliding_and_window, first):
    """Invisible up to the window, plain from the first position that differs."""
    wrong = rows(run(load(**sliding_and_window), tokens), exact["tiny"])
    assert wrong[:first].max() < 1e-4 < 1e-2 < wrong[first]
    assert wrong.max() > 0.5


@pytest.mark.parametrize(
    "changes, least",
    [
        (dict(rope_truncate=True), SEEN),
        (dict(rope_factor=1.0), 1.0),
        (dict(rope_theta=10_000.0), 0.1),
        (dict(swiglu_alpha=1.0), 0.3),
        (dict(swiglu_limit=1e9), 0.3),
        (dict(experts_per_token=3), 0.3),
        (dict(norm_eps=1e-2), SEEN),
    ],
    ids=lambda x: "=".join(map(str, *x.items())) if isinstance(x, dict) else "",
)
def test_settings(load, tokens, exact, changes, least):
    assert tolerances.logit_error(run(load(**changes), tokens), exact["tiny"]) > least


def blocks(model):
    return [(b.attn, b.moe, b.moe.experts) for b in model.blocks]


def change(leaf, function):
    leaf[...] = function(leaf[...])


def every(*names):
    """A fault that sets these parameters of every layer to zero."""

    def fault(model):
        for parts in blocks(model):
            for name in names:
                owner = next(p for p in parts if hasattr(p, name))
                change(getattr(owner, name), jnp.zeros_like)

    return fault


def on_each(name, function):
    def fault(model):
        for parts in blocks(model):
            owner = next(p for p in parts if hasattr(p, name))
            change(getattr(owner, name), function)

    return fault


def halves_for_pairs(rows):
    """Rows [gates, ups] read as though they alternated."""
    return jnp.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1)


def swapped(rows):
    return rows.reshape(rows.shape[0], -1, 2, *rows.shape[2:])[:, :, ::-1].reshape(rows.shape)


def gate_up(function):
    def fault(model):
        for _, _, experts in blocks(model):
            change(experts.gate_up, function)
            change(experts.gate_up_bias, function)

    return fault


def tiled_heads(model):
    """Query head h reads key/value head h % K instead of h // G."""
    for attn, _, _ in blocks(model):
        K, G = attn.sinks_KG[...].shape

        def regroup(x_KG, K=K, G=G):
            return (
                x_KG.reshape(K * G, *x_KG.shape[2:]).reshape(G, K, *x_KG.shape[2:]).swapaxes(0, 1)
            )

        for leaf in (attn.qkv_KMHD, attn.qkv_bias_KMH):
            change(leaf, lambda x, G=G, f=regroup: x.at[:, :G].set(f(x[:, :G])))
        change(attn.sinks_KG, regroup)
        change(attn.out_DKGH, lambda x, f=regroup: jnp.moveaxis(f(jnp.moveaxis(x, 0, -1)), -1, 0))


def tied(model):
    change(model.unembed.weight_VD, lambda _: model.embed.weight_VD[...])


PARAMETERS = {
    "no sinks": (on_each("sinks_KG", lambda x: jnp.full_like(x, -1e9)), 0.3),
    "sinks at zero": (every("sinks_KG"), 0.1),
    "sinks counted twice": (on_each("sinks_KG", lambda x: x + math.log(2)), 0.1),
    "sinks scaled like scores": (on_each("sinks_KG", lambda x: x / math.sqrt(20)), 0.1),
    "no router bias": (every("router_bias_E"), 0.3),
    "no gate and up bias": (every("gate_up_bias"), 0.3),
    "no down bias": (every("down_bias"), 0.3),
    "down bias twice": (on_each("down_bias", lambda x: 2 * x), 0.3),
    "down bias not weighted": (on_each("down_bias", lambda x: 4 * x), 0.5),
    "no attention biases": (every("qkv_bias_KMH", "out_bias_D"), 0.3),
    "gate and up swapped": (gate_up(swapped), 1.0),
    "gate and up in halves": (gate_up(halves_for_pairs), 1.0),
    "heads tiled": (tiled_heads, 0.5),
    "embeddings tied": (tied, 1.0),
    "one expert of one layer at zero": (
        lambda m: change(m.blocks[1].moe.experts.down, lambda x: x.at[7].set(0)),
        0.05,
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(sound, tokens, exact, name):
    fault, least = PARAMETERS[name]
    mutant = nnx.clone(sound)
    fault(mutant)
    assert tolerances.logit_error(run(mutant, tokens), exact["tiny"]) > least


def test_square_down_projection_transposed(load, tokens, exact):
    mutant = load("square")
    on_each("down", lambda x: x.swapaxes(1, 2))(mutant)
    assert tolerances.logit_error(run(mutant, tokens), exact["square"]) > 1.0


def neighbours(x, cos, sin):
    """Rotary turning channel 2i with 2i + 1."""
    cos, sin = (jnp.expand_dims(t, tuple(range(2, x.ndim - 1))) for t in (cos, sin))
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def softmax_over_all(logits, k):
    _, ids = jax.lax.top_k(logits, k)
    return ids, jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), ids, axis=-1)


def renormalised(logits, k):
    ids, weights = softmax_over_all(logits, k)
    return ids, weights / weights.sum(axis=-1, keepdims=True)


def bias_not_in_selection(self, x_BTD, norm, live_BT, **_):
    normed = norm(x_BTD.reshape(-1, x_BTD.shape[-1]))
    plain = jnp.einsum("ND,ED->NE", normed, self.router_ED[...])
    _, ids = jax.lax.top_k(plain, self.chosen)
    logits = jnp.take_along_axis(plain + self.router_bias_E[...], ids, axis=-1)
    weights, how = jax.nn.softmax(logits, axis=-1), dict(limit=self.limit, alpha=self.alpha)
    return x_BTD + expert_matmul(normed, ids, weights, self.experts.weights(), **how).reshape(
        x_BTD.shape
    )


def without_one(gate, up, *, limit, alpha):
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * up


def up_not_clamped(gate, up, *, limit, alpha):
    gate = jnp.minimum(gate, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


def symmetric_gate(gate, up, *, limit, alpha):
    gate, up = jnp.clip(gate, -limit, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


CODE = {
    "no concentration": (rope, "concentration", lambda config: 1.0, 0.5),
    "neighbouring channels turn": (rope, "rotate", neighbours, 0.5),
    "turned twice": (rope, "rotate", lambda x, c, s: _rotate(_rotate(x, c, s), c, s), 0.5),
    "softmax over all experts": (mixing, "top_k", softmax_over_all, 0.3),
    "selection without bias": (moe.MoE, "__call__", bias_not_in_selection, 0.3),
    "swiglu without + 1": (activation, "swiglu", without_one, 0.5),
    "up not clamped": (activation, "swiglu", up_not_clamped, 0.1),
    "everything visible": (
        attention_reference,
        "visible",
        lambda q_pos, k_pos, window: jnp.ones((*q_pos.shape, k_pos.shape[1]), bool),
        0.5,
    ),
}
_rotate = rope.rotate


@pytest.mark.parametrize("name", CODE)
def test_code(monkeypatch, sound, tokens, exact, name):
    where, what, fault, least = CODE[name]
    monkeypatch.setattr(where, what, fault)
    assert tolerances.logit_error(run(sound, tokens), exact["tiny"]) > least


def test_renormalised_softmax_over_all_is_no_fault(monkeypatch, sound, tokens, exact):
    monkeypatch.setattr(mixing, "top_k", renormalised)
    tolerances.assert_logits(run(sound, tokens), exact["tiny"])


def test_symmetric_gate_clamp_shows_only_in_swiglu_itself(monkeypatch, sound, tokens, exact):
    """Logits do not show it; the activation does, five times over."""
    gate, up = jnp.float32([-8, -8, 2]), jnp.float32([1, 0, -8])
    right = oracle.swiglu(np.asarray(gate), np.asarray(up))
    np.testing.assert_allclose(swiglu(gate, up), right, rtol=1e-5)
    assert not np.allclose(symmetric_gate(gate, up, limit=7.0, alpha=1.702), right, rtol=1e-5)
    monkeypatch.setattr(activation, "swiglu", symmetric_gate)
    assert tolerances.logit_error(run(sound, tokens), exact["tiny"]) < SEEN


def test_wrong_absolute_positions_show_in_the_cosines_alone(sound, tokens, exact):
    """Rotary positions are relative: a shift of all of them leaves the logits where they were."""
    ids = jnp.asarray(tokens, jnp.int32)[None]
    shifted = 5 + jnp.arange(T, dtype=jnp.int32)[None]
    with jax.disable_jit():
        logits = sound.logits(sound.hidden(ids, shifted)[0])[0]
    assert tolerances.logit_error(logits, exact["tiny"]) < SEEN
    for offset, position in enumerate((0, 1, 257, 1001, 4097)):
        cos, sin = rope.table(sound.config, jnp.full((1, 1), position, jnp.int32))
        frequencies, concentration = oracle.rope_frequencies(TINY)
        want = concentration * np.cos(position * frequencies)
        np.testing.assert_allclose(cos[0, 0], want, atol=3e-4, err_msg=str(offset))


def test_config_of_the_checkpoint_is_what_was_written(sound):
    for field in dataclasses.fields(TINY):
        if field.name not in ("sliding", "eos"):
            assert getattr(sound.config, field.name) == getattr(TINY, field.name), field.name
    assert sound.config.sliding == (True, False)
