"""How fast the published sizes run on meshes of the GPUs at hand, and what their collectives take.

    python -m gptoss_jax.bench_mesh 20b 120b --json FILE      measures (several GPUs)
    python -m gptoss_jax.bench_mesh --show FILE [FILE...] [--picture FILE.png]

Random weights of the exact shapes, a layer at a time straight to its devices. Each cell is one
compiled program on one mesh with one dispatch. `collectives_ms` is the time of NCCL's kernels in a
profile of the program that is timed, the mean over GPUs: it holds what a GPU waits for the others,
and is no part of a step that overlaps with nothing else.

Parts of the table can be measured by processes side by side, `--turns FOLDER:N` in each of N: they
compile at the same time and then run one after the other, so that no clock sees another's work.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from . import bench
from .bench import Cell
from .config import Config
from .kernels.profile import kernel_times
from .sharding import make_mesh, parse_mesh

MODELS = {"20b": Config.gpt_oss_20b, "120b": Config.gpt_oss_120b, "tiny": None}
# What is worth most first: a run that is cut short has measured it.
CELLS = [
    Cell("decode", 1, 1024),
    Cell("prefill", 1, 8192),
    Cell("decode", 32, 1024),
    Cell("decode", 128, 1024),
    Cell("prefill", 1, 2048),
    Cell("decode", 8, 1024),
]


def meshes(gpus: int) -> list[str]:
    """One GPU; all of them on each axis that fits; and rows over half of them."""
    if gpus == 1:
        return ["none"]
    mixed = [f"data=2,expert={gpus // 2}", f"expert={gpus // 2},tensor=2"] if gpus > 2 else []
    return ["none", f"expert={gpus}", *(mixed or ["tensor=2", "data=2"])]


def dispatches(mesh: str, cell: Cell) -> list[str]:
    """Both where tokens could be sent; for a decoding step only the one that `auto` takes."""
    sends = parse_mesh("" if mesh == "none" else mesh).get("expert", 1) > 1
    return ["all_reduce", "all_to_all"] if sends and cell.what == "prefill" else ["all_reduce"]


@dataclasses.dataclass
class Turns:
    """Processes that compile side by side and run one after the other. folder None: one process."""

    folder: Path | None = None
    parts: int = 1

    @classmethod
    def of(cls, text: str | None) -> "Turns":
        """From FOLDER:N. Raises ValueError for anything else."""
        if text is None:
            return cls()
        folder, _, parts = text.rpartition(":")
        if not folder or not parts.isdecimal() or not int(parts):
            raise ValueError(f"turns are FOLDER:N, N processes that share a folder; got {text!r}.")
        Path(folder).mkdir(parents=True, exist_ok=True)
        return cls(Path(folder), int(parts))

    def compiled(self, name: str, timeout_s: int | float = 240) -> None:
        """Returns when all have come here, or after timeout_s: one that died stops nobody."""
        if self.folder is None:
            return
        (self.folder / f"{name}.compiled").touch()
        end = time.monotonic() + timeout_s
        while len(list(self.folder.glob("*.compiled"))) < self.parts and time.monotonic() < end:
            time.sleep(0.1)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Alone among them."""
        if self.folder is None:
            yield
            return
        with (self.folder / "turn").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # given back when the file is closed, or by dying
            yield


def measure(
    model: str,
    mesh: str,
    cells: Iterable[Cell],
    *,
    turns: Turns = Turns(),  # noqa: B008 (never changed)
    until_s: int | float = float("inf"),
    say=print,
) -> Iterator[dict]:
    """A row for each cell and dispatch on one mesh ("none" is one GPU); a failure is a row too.

    until_s: time.monotonic() after which no more cells are begun.
    """
    name = f"{model} {mesh}"
    axes = None if mesh == "none" else parse_mesh(mesh)
    made_on = None if axes is None else make_mesh(**axes)
    begun = time.monotonic()
    made = _made(model, made_on)
    data = 1 if axes is None else axes.get("data", 1)
    wanted = [(how, cell) for cell in cells for how in dispatches(mesh, cell)]
    wanted = [(how, cell) for how, cell in wanted if cell.batch % data == 0]
    timed, failed = {}, {}
    try:
        for how in dict.fromkeys(how for how, _ in wanted):
            made.dispatch = how
            timed[how] = bench.Timed(made, first_token=False)
        say(f"{name}: made in {time.monotonic() - begun:.0f} s")
        for how, run in timed.items():
            failed |= _compiled(run, how, [cell for h, cell in wanted if h == how])
        say(f"{name}: compiled after {time.monotonic() - begun:.0f} s, {len(failed)} failed")
    finally:
        turns.compiled(name.replace(" ", "-"), min(240.0, until_s - time.monotonic()))
    gpus = 1 if made_on is None else made_on.size
    for how, cell in wanted:
        row = {"model": model, "mesh": mesh, "gpus": gpus, "dispatch": how, **cell._asdict()}
        problem = failed.get((how, cell))
        if problem is None and time.monotonic() > until_s:
            problem = "out of time"
        if problem is None:
            try:
                with turns.turn():
                    row |= timed[how].measure(cell)
                    row |= _collectives(timed[how], cell, gpus)
            except Exception as error:  # one cell must not end the table
                problem = repr(error)[:300]
        yield row if problem is None else row | {"error": problem}


def _made(model: str, mesh):
    if MODELS[model] is not None:
        return bench.random_model(MODELS[model](), mesh=mesh)
    from .checkpoint import load

    return load(model, mesh=mesh)


def _compiled(timed: bench.Timed, how: str, cells: list[Cell]) -> dict[tuple[str, Cell], str]:
    """Compiles all in threads; what cannot be is found again, one by one."""
    try:
        timed.compile(cells)
        return {}
    except Exception:
        failed = {}
        for cell in cells:
            try:
                timed.compile([cell])
            except Exception as error:
                failed[how, cell] = repr(error)[:300]
        return failed


def _collectives(timed: bench.Timed, cell: Cell, gpus: int) -> dict:
    """Time and number of NCCL's kernels, on each GPU, of one prefill or decoding step."""
    if gpus == 1:
        return {"collectives_ms": 0.0, "collectives": 0}
    call = timed.ready(cell)
    steps = bench.STEPS if cell.what == "decode" else 1
    found = [k for k in kernel_times(call, steps * gpus) if "nccl" in k["name"].lower()]
    return {
        "collectives_ms": round(sum(k["us"] for k in found) / 1e3, 4),
        "collectives": round(sum(k["launches"] for k in found), 1),
    }


def record(rows: Iterable[dict]) -> dict:
    """What the JSON holds: where and when, and the rows."""
    import datetime

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "gpus": len(jax.devices()),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": bench.commit(),
        "rows": list(rows),
    }


def merged(records: list[dict]) -> dict:
    """One record of several that processes wrote: all must be of one device kind and commit."""
    first = records[0]
    for key in ("device", "jax", "commit"):
        if any(other[key] != first[key] for other in records):
            raise ValueError(f"records differ in {key}: {[other[key] for other in records]}.")
    return first | {
        "gpus": max(other["gpus"] for other in records),
        "rows": [row for other in records for row in other["rows"]],
    }


def compared(rows: list[dict]) -> list[dict]:
    """The rows that were measured, each with `speedup` against one GPU (None if that is not
    there) and `share`, the collectives' part of its time."""
    alone = {_group(r): r["ms"] for r in rows if r["gpus"] == 1 and "ms" in r}
    out = []
    for row in rows:
        if "ms" in row:
            base = alone.get(_group(row))
            speedup = None if base is None else base / row["ms"]
            out.append(row | {"speedup": speedup, "share": row["collectives_ms"] / row["ms"]})
    return out


def _group(row: dict) -> tuple:
    return row["model"], row["what"], row["batch"], row["context"]


def table(rows: list[dict]) -> str:
    """Markdown, a line for each row that was measured, in an order that puts rivals together."""
    lines = [
        "| model | what | mesh | dispatch | ms | tok/s | against one GPU | in collectives |",
        "|" + "---|" * 8,
    ]

    def order(row):
        return row["model"], row["what"], row["context"], row["batch"], row["gpus"], row["mesh"]

    for r in sorted(compared(rows), key=order):
        what = f"prefill {r['context']}" if r["what"] == "prefill" else f"decode B={r['batch']}"
        cells = [
            r["model"],
            what,
            "one GPU" if r["gpus"] == 1 else r["mesh"],
            "-" if r["gpus"] == 1 else r["dispatch"],
            f"{r['ms']:.2f}",
            f"{r['tokens_per_s']:,.0f}",
            "-" if r["speedup"] is None or r["gpus"] == 1 else f"{r['speedup']:.2f} x",
            "-" if r["gpus"] == 1 else f"{r['collectives_ms']:.2f} ms, {r['share']:.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[dict], title: str = "", path: str | Path | None = None):
    """Bars of speed against one GPU, one group a measurement, one bar a mesh and dispatch, the
    collectives' share hatched. Returns the figure."""
    from .plots import style

    rows = [r for r in compared(rows) if r["speedup"] is not None and r["gpus"] > 1]
    groups = list(dict.fromkeys(map(_group, rows)))
    kinds = list(dict.fromkeys((r["mesh"], r["dispatch"]) for r in rows))
    figure = style.figure(3 + 1.1 * max(len(groups), 1), 3.5)
    axes = figure.subplots()
    width = 0.8 / max(len(kinds), 1)
    for k, (mesh, how) in enumerate(kinds):
        here = [r for r in rows if (r["mesh"], r["dispatch"]) == (mesh, how)]
        at = [
            groups.index((r["model"], r["what"], r["batch"], r["context"]))
            + (k + 0.5) * width
            - 0.4
            for r in here
        ]
        colour = style.COLOURS[1:][k % 7]  # hatched in black
        high = [r["speedup"] for r in here]
        axes.bar(at, high, width, color=colour, label=f"{mesh}, {how}")
        lost = [r["speedup"] * r["share"] for r in here]
        base = [h - part for h, part in zip(high, lost, strict=True)]
        axes.bar(at, lost, width, bottom=base, color="none", edgecolor="black", hatch="////")
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    names = [
        f"{model}\n" + (f"prefill\n{context}" if what == "prefill" else f"decode\nB={batch}")
        for model, what, batch, context in groups
    ]
    axes.set_xticks(range(len(groups)), names, fontsize="small")
    axes.set(ylabel="one GPU = 1; hatched: in collectives")
    axes.set_title(title, fontsize="small")
    if kinds:
        axes.legend(fontsize="small")
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--mesh", action="append", help="none, or like expert=2; repeat")
    parser.add_argument("--cells", type=int, help="the first so many of the cells")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then no more cells")
    parser.add_argument("--turns", metavar="FOLDER:N")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.models if name not in MODELS]:
        parser.error(f"no model {unknown}; there are {', '.join(MODELS)}.")
    if given.show:
        whole = merged([json.loads(file.read_text()) for file in given.show])
        title = f"{whole['gpus']} x {whole['device']}, jax {whole['jax']}, {whole['date']}"
        print(f"{title}\n\n{table(whole['rows'])}")
        if given.json:
            given.json.write_text(json.dumps(whole, indent=1) + "\n")
        if given.picture:
            draw(whole["rows"], title, given.picture)
        return

    def say(text: Any) -> None:
        print(f"[{time.monotonic() - begun:5.0f} s] {text}", flush=True)

    begun = time.monotonic()
    turns, rows = Turns.of(given.turns), []
    for model in given.models:
        for mesh in given.mesh or meshes(len(jax.devices())):
            until = begun + given.seconds
            cells = CELLS[: given.cells]
            for row in measure(model, mesh, cells, turns=turns, until_s=until, say=say):
                rows.append(row)
                done = row.get("error") or f"{bench.line(row)} collectives {row['collectives_ms']}"
                say(f"{model} {mesh} {row['dispatch']}: {done}")
                if given.json:  # after each: a run that is cut short has what it measured
                    given.json.write_text(json.dumps(record(rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
