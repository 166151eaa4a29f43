"""The kernel benchmark's table and its JSON, on a problem that a CPU finishes."""

import functools
import json

import pytest

from gptoss_jax.kernels import bench, explore, shapes
from gptoss_jax.kernels.expert_matmul import triton
from gptoss_jax.kernels.expert_matmul.triton import Plan, Shape


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


@pytest.mark.parametrize("layout", ["triton", "mosaic"])
def test_candidates_differ_and_hold_the_heuristic(layout):
    for problem in shapes.EXPERTS:
        plans = explore.candidates(problem, "NVIDIA H200", layout)
        assert len(plans) == len(set(plans)) >= 5
        sizes = (problem.tokens, problem.chosen, problem.experts)
        assert plans[0] == triton.heuristic(*sizes, "NVIDIA H200", layout)


def test_the_fastest_gate_up_and_down_that_are_right_are_joined():
    small, large = Shape(cols=32), Shape(cols=64)
    plan = functools.partial(Plan, rows=8, direct=False)
    kernels = {"gate_up": 9.0, "down": 5.0}
    timed = [
        explore.Timed(plan(gate_up=small, down=small), kernels, 1e-3),
        explore.Timed(plan(gate_up=large, down=large), {"gate_up": 8.0, "down": 7.0}, 1e-3),
        explore.Timed(plan(gate_up=large, down=small), kernels | {"gate_up": 1.0}, 0.5),  # wrong
        explore.Timed(plan(gate_up=large, down=small), kernels | {"down": 1.0}, float("nan")),
        explore.Timed(plan(rows=16, gate_up=large, down=large), kernels | {"gate_up": 8.5}, 1e-3),
    ]
    assert explore.choose(timed, 4e-3) == plan(gate_up=large, down=small)
    assert explore.choose(timed[2:4], 4e-3) is None


def test_exploring_goes_on_after_what_fails_and_stops_in_time():
    problems = [shapes.experts("20b", 1), shapes.experts("20b", 32)]
    first, second, *_ = explore.candidates(problems[0], "NVIDIA H200")

    def build(problem, plan):
        if plan == first:
            raise MemoryError("too much shared memory")
        return plan

    def measure(problem, program):
        if problem.tokens == 32:
            raise RuntimeError("no such kernel")
        return {"all": 1.0 if program == second else 2.0}, 1e-3

    run = functools.partial(explore.explore, problems, "NVIDIA H200", build, measure)
    found = run(seconds=60.0, most=3, most_error=4e-3)
    assert found == {problems[0]: second}
    assert run(seconds=0.0, most=3, most_error=4e-3) == {}


def test_parts_of_kernels_by_name():
    names = ("experts_gate_up_row", "experts_down_row__1", "routing_route", "experts_combine")
    found = [{"name": name, "us": us} for name, us in zip(names, (8, 4, 2, 1), strict=True)]
    assert explore.parts_of(found) == {"gate_up": 8, "down": 4, "rest": 3}


def test_a_table_of_plans_keeps_what_it_had(tmp_path):
    file = tmp_path / "table.json"
    plan = triton.heuristic(1, 4, 32)
    one, two = shapes.experts("20b", 1), shapes.experts("20b", 2)
    bench.write_plans(file, {two: plan}, [])
    bench.write_plans(file, {one: plan}, [{"shape": "20b/1", "us": 20.5}])
    plans = json.loads(file.read_text())["plans"]["triton"]["2880,2880,32,4"]
    assert list(plans) == ["1", "2"] and plans["1"]["us"] == 20.5
    assert triton.plan_from(plans["2"]) == plan
