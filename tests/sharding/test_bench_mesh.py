"""The table and picture of speed on meshes, from rows that are made up here and nowhere else."""

import json
import threading
import time

import pytest

from gptoss_jax import bench_mesh
from gptoss_jax.bench import Cell
from gptoss_jax.bench_mesh import Turns


def row(mesh, gpus, how, what, batch, context, ms, collectives_ms):
    tokens = batch if what == "decode" else context
    return {
        "model": "20b", "mesh": mesh, "gpus": gpus, "dispatch": how, "what": what, "batch": batch,
        "context": context, "ms": ms, "tokens_per_s": round(tokens / ms * 1e3, 1),
        "collectives_ms": collectives_ms, "collectives": 49.0,
    }  # fmt: skip


MADE_UP = [
    row("expert=2", 2, "all_to_all", "prefill", 1, 8192, 100.0, 20.0),
    row("none", 1, "all_reduce", "prefill", 1, 8192, 150.0, 0.0),
    row("expert=2", 2, "all_reduce", "prefill", 1, 8192, 120.0, 30.0),
    row("none", 1, "all_reduce", "decode", 1, 1024, 2.0, 0.0),
    row("expert=2", 2, "all_reduce", "decode", 1, 1024, 1.6, 0.4),
    row("data=2", 2, "all_reduce", "decode", 128, 1024, 8.0, 0.0),  # no row of one GPU beside it
    {"model": "20b", "mesh": "tensor=2", "gpus": 2, "dispatch": "all_reduce", "what": "decode",
     "batch": 8, "context": 1024, "error": "made up"},
]  # fmt: skip


def test_the_table_puts_rivals_together():
    lines = bench_mesh.table(MADE_UP).splitlines()
    assert [line.split("|")[2:6] for line in lines[2:]] == [
        [" decode B=1 ", " one GPU ", " - ", " 2.00 "],
        [" decode B=1 ", " expert=2 ", " all_reduce ", " 1.60 "],
        [" decode B=128 ", " data=2 ", " all_reduce ", " 8.00 "],
        [" prefill 8192 ", " one GPU ", " - ", " 150.00 "],
        [" prefill 8192 ", " expert=2 ", " all_to_all ", " 100.00 "],
        [" prefill 8192 ", " expert=2 ", " all_reduce ", " 120.00 "],
    ]
    assert lines[3].endswith("| 1.25 x | 0.40 ms, 25% |")
    assert lines[4].endswith("| 16,000 | - | 0.00 ms, 0% |")


def test_the_picture_has_a_bar_for_each_that_can_be_compared(tmp_path):
    figure = bench_mesh.draw(MADE_UP, "made up", tmp_path / "speed.png")
    bars = [bar.get_height() for bar in figure.axes[0].patches]
    # One mesh and dispatch after the other: speeds, then what collectives take of each.
    assert bars == pytest.approx([1.5, 0.3, 1.25, 1.25, 1.25 * 0.25, 1.25 * 0.25])
    assert (tmp_path / "speed.png").stat().st_size > 1000
    assert bench_mesh.draw([]).axes  # nothing measured yet


def test_records_of_processes_are_one_record(tmp_path, capsys):
    record = bench_mesh.record(MADE_UP[:3])
    other = record | {"rows": MADE_UP[3:], "gpus": 1}
    files = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "whole.json"]
    files[0].write_text(json.dumps(record))
    files[1].write_text(json.dumps(other))
    show = [*map(str, files[:2]), "--json", str(files[2])]
    bench_mesh.main(["--show", *show, "--picture", str(tmp_path / "p.png")])
    assert bench_mesh.table(MADE_UP) in capsys.readouterr().out
    assert json.loads(files[2].read_text())["rows"] == MADE_UP
    with pytest.raises(ValueError, match="differ in jax"):
        bench_mesh.merged([record, record | {"jax": "0.0.0"}])


def test_what_is_measured_where():
    prefill, step = Cell("prefill", 1, 2048), Cell("decode", 1, 1024)
    assert bench_mesh.meshes(1) == ["none"]
    assert bench_mesh.meshes(2) == ["none", "expert=2", "tensor=2", "data=2"]
    assert bench_mesh.meshes(8) == ["none", "expert=8", "data=2,expert=4", "expert=4,tensor=2"]
    assert bench_mesh.dispatches("expert=2", prefill) == ["all_reduce", "all_to_all"]
    assert bench_mesh.dispatches("expert=2", step) == ["all_reduce"]
    assert bench_mesh.dispatches("tensor=2", prefill) == ["all_reduce"]
    with pytest.raises(SystemExit):
        bench_mesh.main(["7b"])


def test_turns_are_taken_one_after_the_other_when_all_have_compiled(tmp_path):
    turns = [Turns.of(f"{tmp_path / 'turns'}:2") for _ in range(2)]
    inside, most, order = [], [], []

    def process(i):
        order.append("compiled")
        turns[i].compiled(str(i))
        for _ in range(20):
            with turns[i].turn():
                inside.append(i)
                time.sleep(0.002)
                most.append(len(inside))
                order.append("runs")
                inside.remove(i)

    threads = [threading.Thread(target=process, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert max(most) == 1 and order[:2] == ["compiled"] * 2 and len(order) == 42
    Turns.of(f"{tmp_path / 'turns'}:3").compiled("late", timeout_s=0)  # the third never comes
    with pytest.raises(ValueError, match="turns are FOLDER:N"):
        Turns.of("folder")


@pytest.mark.slow
def test_rows_of_a_small_model_on_two_devices():
    cells = [Cell("decode", 2, 40), Cell("prefill", 1, 40)]
    said = []
    rows = list(bench_mesh.measure("tiny", "expert=2", cells, say=said.append))
    assert [(r["dispatch"], r["what"]) for r in rows] == [
        ("all_reduce", "decode"), ("all_reduce", "prefill"), ("all_to_all", "prefill"),
    ]  # fmt: skip
    assert all(r["ms"] > 0 and r["gpus"] == 2 for r in rows), rows
    (late,) = bench_mesh.measure("tiny", "none", cells[:1], say=said.append, until_s=0)
    assert late["error"] == "out of time"
