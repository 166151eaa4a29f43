"""The numbers in the pictures are right, and every axis says what it shows."""

import itertools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import TINY

from gptoss_jax import plots
from gptoss_jax.config import Config
from gptoss_jax.kernels.mxfp4 import encode
from gptoss_jax.model import GptOss
from gptoss_jax.parity import difference
from gptoss_jax.plots import style
from gptoss_jax.sharding import make_mesh

TOKENS = [3, 1, 4, 15, 9, 26, 5, 35, 8]  # more than the window of 5


def checked(figure, tmp_path):
    """Draws the figure, and returns its axes that show data."""
    file = tmp_path / "picture.png"
    figure.savefig(file)
    assert file.stat().st_size > 2000
    axes = [a for a in figure.axes if a.get_label() != "<colorbar>"]
    for one in axes:
        assert one.lines or one.patches or one.images or one.collections
        words = [tick.get_text() for tick in one.get_xticklabels()]
        assert one.get_xlabel() or figure.get_supxlabel() or any(map(str.strip, words))
        assert one.get_ylabel() or figure.get_supylabel()
    return axes


@pytest.fixture(scope="module")
def model():
    model = GptOss(TINY, rngs=nnx.Rngs(0))
    for i, block in enumerate(model.blocks):
        shape = block.attn.sinks_KG.shape
        block.attn.sinks_KG[...] = jax.random.normal(jax.random.key(i), shape)
        bias = block.attn.qkv_bias_KMH.shape
        block.attn.qkv_bias_KMH[...] = 0.3 * jax.random.normal(jax.random.key(9 + i), bias)
    return model


@pytest.fixture(scope="module")
def trace(model):
    return model.trace([TOKENS])


@pytest.mark.parametrize("layer", [0, 1])  # a window, then none
def test_attention_weights_are_the_models(model, trace, layer):
    """Applied to the values, they give what the layer adds to the stream."""
    weights_KGTS, sink_KGT = plots.attention_weights(model, TOKENS, layer)
    np.testing.assert_allclose(weights_KGTS.sum(-1) + sink_KGT, 1, atol=1e-6)

    attn = model.blocks[layer].attn
    embedded = np.asarray(model.embed.weight_VD[...])[TOKENS]
    before_TD = embedded if layer == 0 else trace["after"][layer - 1][0]
    normed_TD = np.asarray(model.blocks[layer].attn_norm(jnp.asarray(before_TD)))
    value_KHD = np.asarray(attn.qkv_KMHD[...])[:, -1]
    v_TKH = np.einsum("TD,KHD->TKH", normed_TD, value_KHD) + np.asarray(attn.qkv_bias_KMH)[:, -1]
    out_TKGH = np.einsum("KGTS,SKH->TKGH", weights_KGTS, v_TKH)
    after_TD = before_TD + np.einsum("TKGH,DKGH->TD", out_TKGH, np.asarray(attn.out_DKGH))
    np.testing.assert_allclose(after_TD, trace["after_attention"][layer][0], atol=2e-5)


def test_attention_map(model, tmp_path):
    weights, sink = plots.attention_weights(model, TOKENS, 0)
    axes = checked(plots.attention_map(weights, sink, tokens=[str(t) for t in TOKENS]), tmp_path)
    assert len(axes) == TINY.q_heads
    shown = np.asarray(axes[1].images[0].get_array())
    np.testing.assert_allclose(shown[:, 0] ** 2, sink[0, 1], rtol=1e-5)
    assert np.isnan(shown[:, 1]).all()
    # Below the diagonal and within the window of 5, and nothing else.
    seen = np.tri(9) - np.tri(9, k=-5)
    assert ((shown[:, 2:] > 0) == (seen > 0)).all()
    below = axes[-1]  # only the lowest row has words
    ticks = zip(below.get_xticks().tolist(), below.get_xticklabels(), strict=True)
    words = {at: tick.get_text() for at, tick in ticks}
    assert (words[-2], words[0], words[8]) == ("sink", "3", "8")
    with pytest.raises(ValueError, match="0..2; got 3"):
        plots.attention_weights(model, TOKENS, 3)


def test_frequencies(tmp_path):
    (axes,) = checked(plots.frequencies(Config.gpt_oss_20b()), tmp_path)
    plain, yarn = (line.get_ydata() for line in axes.lines[:2])
    assert yarn[0] == pytest.approx(2 * np.pi)  # the fastest channel is left alone
    assert yarn[-1] == pytest.approx(32 * plain[-1])  # the slowest is stretched whole


def test_routing(trace, tmp_path):
    ids = np.array([[2, 0], [1, 7], [-1, 3]])  # -1: sent nowhere
    weights = np.array([[0.75, 0.25], [0.5, 0.5], [0.9, 0.1]])
    (axes,) = checked(plots.routing(ids, weights, 8, tokens=["a", " b", "$"]), tmp_path)
    table = np.ma.filled(axes.images[0].get_array(), np.nan)
    assert table[0, 2] == 0.75 and table[0, 0] == 0.25 and table[1, 7] == 0.5
    assert table[2, 3] == 0.1 and np.isfinite(table).sum() == 5
    assert axes.get_yticklabels()[1].get_text() == "·b"
    with pytest.raises(ValueError, match=r"\(3, 2\), \(3, 1\)"):
        plots.routing(ids, weights[:, :1], 8)


def test_expert_load_is_coloured_by_device(tmp_path):
    mesh = make_mesh(expert=4, devices=jax.devices("cpu"))
    (axes,) = checked(plots.expert_load([0, 0, 5, -1], 8, mesh), tmp_path)
    assert [bar.get_height() for bar in axes.patches] == [2, 0, 0, 0, 0, 1, 0, 0]
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert colours[0] == colours[1] != colours[2] and len(set(colours)) == 4


# Viénot, Brettel and Mollon 1999: what eyes without green or red cones see, in linear RGB.
NO_GREEN = ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1))
NO_RED = ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1))


@pytest.mark.parametrize("eyes", [NO_GREEN, NO_RED])
def test_colours_differ_for_all_eyes(eyes):
    """At least 0.14 apart in RGB of 0..1; of matplotlib's own first eight two are 0.09 and 0.04."""
    rgb = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in style.COLOURS])
    seen = np.clip(rgb**2.2 @ np.transpose(eyes), 0, 1) ** (1 / 2.2)
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 0.14


def test_exchanged(tmp_path):
    mesh = make_mesh(data=2, expert=2, devices=jax.devices("cpu"))
    ids = np.random.default_rng(0).integers(-1, 6, (11, 3))
    expected = np.zeros((2, 2), int)
    for n, row in enumerate(ids.tolist()):
        source = n // 3 % 2  # 11 tokens over 4 devices: 3 each, the last has 2
        for j in range(2):
            expected[source, j] += any(3 * j <= i < 3 * j + 3 for i in row)
    np.testing.assert_array_equal(plots.exchanged(ids, 6, mesh), expected)
    (axes,) = checked(plots.exchange(ids, 6, mesh), tmp_path)
    assert [t.get_text() for t in axes.texts] == [str(n) for n in expected.reshape(-1)]


def test_code_book(tmp_path):
    values = np.tile(np.float32([6, 6, -0.5, 0]), 16)  # two blocks
    values[32:] *= 4
    left, right = checked(plots.code_book(*encode(values)), tmp_path)
    heights = [bar.get_height() for bar in left.patches]
    names = [tick.get_text() for tick in left.get_xticklabels()]
    assert {n: h for n, h in zip(names, heights, strict=True) if h} == {
        "6": 50,
        "-0.5": 25,
        "0": 25,
    }
    assert {bar.get_x() + 0.4: bar.get_height() for bar in right.patches} == {0: 50, 2: 50}


def test_rounding_stairs(tmp_path):
    (axes,) = checked(plots.rounding_stairs(), tmp_path)
    x, y = axes.lines[1].get_data()
    for value, stored in ((-8, -6), (0.2, 0), (0.8, 1), (2.4, 2), (3.6, 4), (5.2, 6), (8, 6)):
        assert y[np.abs(x - value).argmin()] == stored
    assert len(set(y.tolist())) == 15


def test_memory(tmp_path):
    published = plots.parameter_bytes(Config.gpt_oss_20b(), packed=True)
    # The published files are 13,761,264,768 bytes of tensors: 12.8 GiB.
    assert sum(published.values()) / 2**30 == pytest.approx(12.8, abs=0.03)
    bars = plots.memory({"20b": Config.gpt_oss_20b()}, limit_gb=24)
    (axes,) = checked(bars, tmp_path)
    assert [t.get_text() for t in axes.texts] == ["13.8", "41.8"]


def test_parity_by_layer(tmp_path):
    rng = np.random.default_rng(0)
    theirs = rng.normal(size=(6, 4))
    gaps = [difference(theirs + 10.0**-i, theirs) for i in range(1, 6)]
    layers = [
        SimpleNamespace(layer=i, attention=gaps[2 * i], experts=gaps[2 * i + 1]) for i in (0, 1)
    ]
    one = SimpleNamespace(length=6, layers=layers, logits=gaps[4])
    report = SimpleNamespace(lengths=[one], dtype="float32", reference="PyTorch")
    (axes,) = checked(plots.parity_by_layer(report), tmp_path)
    worst = axes.lines[0].get_ydata()
    np.testing.assert_allclose(worst * theirs.std(), 10.0 ** -np.arange(1, 6), rtol=1e-6)


def test_recorded_times_and_speed(tmp_path):
    timings, about = plots.recorded()
    assert about["device"] == "NVIDIA H200" and about["commit"]
    assert all(0 < t.floor_ms < t.ms for t in timings), "nothing beats its floor"
    names = [t.name for t in timings]
    assert len(set(names)) == len(names) and "120b\n8192 tokens" in names
    one = next(t for t in timings if t.name == "20b\n8 tokens")
    # 8 tokens choose 32 (1 - (28/32)^8) experts of 3·2880² weights at 17/32 bytes, 4.3 TB/s.
    hit = 32 * (1 - (28 / 32) ** 8)
    assert one.floor_ms == pytest.approx(hit * 3 * 2880**2 * 17 / 32 / 4.3e9, rel=2e-3)
    (axes,) = checked(plots.speed(timings), tmp_path)
    assert [bar.get_height() for bar in axes.patches] == [t.ms for t in timings]
    with pytest.raises(ValueError, match="'abacus'"):
        plots.recorded("abacus")
    with pytest.raises(ValueError, match="no timings"):
        plots.speed([])


def test_loss_curve(tmp_path):
    lines = [{"step": i, "loss": 5 / i} for i in (1, 2, 3)] + [{"step": 3, "valid_loss": 2.0}]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (axes,) = checked(plots.loss_curve(metrics), tmp_path)
    assert axes.lines[0].get_ydata().tolist() == [5, 2.5, 5 / 3]
