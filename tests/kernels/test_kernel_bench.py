"""The kernel benchmark's table and its JSON, on a problem that a CPU finishes."""

import json

import pytest

from gptoss_jax.kernels import bench, shapes


@pytest.fixture
def tiny(monkeypatch):
    def experts(model, tokens):
        return shapes.Experts(model=model, tokens=tokens, embed=96, ffn=64, experts=5, chosen=3)

    monkeypatch.setattr(shapes, "experts", experts)
    monkeypatch.setattr(shapes, "EXPERTS", (experts("20b", 1), experts("20b", 3)))
    monkeypatch.setattr(bench, "LAYERS", {"20b": 2})
    bench._inputs.cache_clear()
    yield
    bench._inputs.cache_clear()


def test_bench_prints_and_records_what_it_measured(tiny, tmp_path, capsys):
    file = tmp_path / "rows.json"
    bench.main(["--tokens", "1,3", "--json", str(file)])
    table = json.loads(file.read_text())
    assert [row["shape"] for row in table["rows"]] == ["20b/1", "20b/3"]
    for row in table["rows"]:
        assert row["us"] > 0 and row["floor_us"] >= 0
        assert row["relative_error"] < bench.MOST_ERROR
    assert table["date"] and table["device"]
    assert "20b/3" in capsys.readouterr().out


def test_floors_of_the_named_shapes():
    # Bytes: 4 experts of 24.9 million weights at 17/32 bytes over 4.3 TB/s; FLOP over 790 TFLOP/s.
    assert shapes.experts("20b", 1).floor_us() == pytest.approx(12.3, abs=0.1)
    assert shapes.experts("20b", 8192).floor_us() == pytest.approx(2064, abs=5)
    assert shapes.experts("120b", 128).hit() == pytest.approx(125.8, abs=0.1)


def test_candidates_differ_and_hold_the_heuristic():
    for problem in shapes.EXPERTS:
        plans = bench.candidates(problem)
        assert len(plans) == len(set(plans)) >= 8
        assert plans[0].rows in (8, 16, 32, 64, 128)
