"""The floors against the figures they were first worked out to, and a run of the benchmark."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY

from gptoss_jax import bench, floors
from gptoss_jax.cache import make
from gptoss_jax.config import Config

SMALL = dataclasses.replace(TINY, layers=2, sliding=None, head_width=16, max_context=400)


@pytest.mark.parametrize(
    "name, batch, context, gigabytes, tokens_per_s",
    [
        ("20b", 1, 1024, 3.74, 1151),
        ("20b", 1, 8192, 3.91, 1099),
        ("20b", 8, 1024, 9.34, 3682),
        ("20b", 32, 1024, 13.4, 10273),
        ("20b", 128, 8192, 38.8, 14154),
        ("120b", 1, 1024, 5.05, 852),
        ("120b", 32, 1024, 43.4, 3171),
        ("120b", 128, 1024, 68.6, 8024),
    ],
)
def test_decode_floor(name, batch, context, gigabytes, tokens_per_s):
    config = getattr(Config, f"gpt_oss_{name}")()
    assert floors.decode_bytes(config, batch, context) / 1e9 == pytest.approx(gigabytes, rel=0.005)
    speed = batch / floors.decode_floor_ms(config, batch, context) * 1e3
    assert speed == pytest.approx(tokens_per_s, rel=0.01)


def test_decode_bytes_by_hand():
    # Two layers, one sliding; every weight of the four experts that one token chooses.
    experts = 4 * 3 * 96 * 64 * 17 / 32
    dense = 2 * (96 * (6 + 4) * 16 + 96 * 6 * 16 + 8 * 96)
    seen = (5 + 40) * 2 * 16 * 2 * 2
    assert floors.decode_bytes(SMALL, 1, 40) == 2 * (experts + dense) + 2 * 53 * 96 + seen


@pytest.mark.parametrize(
    "name, tokens, ms",
    [("20b", 2048, 16.3), ("20b", 8192, 71), ("120b", 2048, 24.5), ("120b", 8192, 107)],
)
def test_prefill_floor(name, tokens, ms):
    config = getattr(Config, f"gpt_oss_{name}")()
    assert floors.prefill_floor_ms(config, tokens) == pytest.approx(ms, rel=0.01)


def test_a_filled_cache_lies_as_the_model_keeps_it():
    cache = bench.filled_cache(SMALL, 3, 64, 13, jnp.bfloat16)
    empty = make(SMALL, 3, 64)
    assert jax.tree.structure(cache) == jax.tree.structure(empty)
    for mine, model in zip(jax.tree.leaves(cache), jax.tree.leaves(empty), strict=True):
        assert (mine.shape, mine.dtype) == (model.shape, model.dtype)
    assert cache.full_pos_BS[1, :15].tolist() == [*range(13), -1, -1]
    assert cache.ring_pos_BW[2].tolist() == [10, 11, 12, 8, 9]  # position p in slot p mod 5
    assert cache.length_B.tolist() == [13] * 3
    short = bench.filled_cache(SMALL, 1, 64, 3, jnp.bfloat16)
    assert short.ring_pos_BW[0].tolist() == [0, 1, 2, -1, -1]
    # The arrays are donated one by one: none may stand for two.
    assert len({x.unsafe_buffer_pointer() for x in (*cache.k, *cache.v)}) == 4


def test_run(monkeypatch, tmp_path):
    monkeypatch.setattr(bench.Config, "gpt_oss_20b", lambda: SMALL)
    said = []
    report = bench.run(
        "20b",
        batches=[2],
        contexts=[40],
        plot=str(tmp_path / "speed.png"),
        kernels=[bench.Cell("decode", 2, 40)],
        progress=said.append,
    )
    lines = str(report).splitlines()
    assert "one H200" in lines[2] and said[2:] == lines[4:]
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    out = report.to_json()
    assert [(r["what"], r["batch"]) for r in out["rows"]] == [
        ("prefill", 1),
        ("decode", 2),
    ]
    for row in out["rows"]:
        tokens = row["batch"] if row["what"] == "decode" else 40
        assert row["tokens_per_s"] == pytest.approx(tokens / row["ms"] * 1e3, rel=0.01)
    assert out["rows"][0]["first_token_ms"] > 0
    assert str(report).count("decode") == 1
    assert out["compile_s"] > 0
    assert out["rows"][1]["kernels"] == [] or jax.default_backend() == "gpu"
    with pytest.raises(ValueError, match="context must lie in 1..272; got 300"):
        bench.run("20b", contexts=[300])


def test_cells_are_measured_as_named(monkeypatch):
    monkeypatch.setattr(bench.Config, "gpt_oss_20b", lambda: SMALL)
    cells = [bench.Cell("decode", 2, 40), bench.Cell("decode", 1, 7)]
    rows = bench.run("20b", cells=cells).rows
    assert [(r["what"], r["batch"], r["context"]) for r in rows] == [
        ("decode", 2, 40),
        ("decode", 1, 7),
    ]


def test_random_model_is_whole_and_finite():
    model = bench.random_model(SMALL)
    logits = model(np.arange(6).reshape(1, 6))
    assert np.isfinite(logits).all() and np.std(logits) > 0.1
    assert dataclasses.asdict(model.config) == dataclasses.asdict(SMALL)
