"""Measures everything that README's table of speed quotes, in one run, into one JSON file.

    python recipes/record_speed.py 20b 120b --json record.json
    python recipes/record_speed.py --draw docs/measured/h200-2026-11-30.json speed.png

Random weights of the published shapes. For each model: decoding and prefill at the batches and
contexts below, each beside its floor; and the kernels of one decoding step, by JAX's profiler.
Most of the time is compilation, which runs on all of the host's cores.
"""

import argparse
import json
from pathlib import Path

from gptoss_jax import bench
from gptoss_jax.bench import Cell

LONG = 131_072 - 128  # the whole context, less the tokens that are timed
CELLS = {
    "20b": [
        Cell("decode", 1, 1024),
        Cell("decode", 8, 1024),
        Cell("decode", 32, 1024),
        Cell("decode", 128, 1024),
        Cell("prefill", 1, 2048),
        Cell("prefill", 1, 8192),
        Cell("decode", 1, 32768),
        Cell("decode", 1, LONG),
        Cell("decode", 4, LONG),
        Cell("prefill", 1, LONG),
    ],
    "120b": [
        Cell("decode", 1, 1024),
        Cell("decode", 8, 1024),
        Cell("decode", 32, 1024),
        Cell("decode", 128, 1024),
        Cell("prefill", 1, 2048),
        Cell("prefill", 1, 8192),
        Cell("decode", 1, LONG),
    ],
}
PROFILED = Cell("decode", 1, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(CELLS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", type=int, help="the first so many cells of each model")
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("RECORD", "PICTURE"))
    arguments = parser.parse_args()
    if arguments.draw:
        record, file = arguments.draw
        picture(json.loads(record.read_text())).savefig(file, dpi=72)
        return
    if not arguments.models or not set(arguments.models) <= set(CELLS) or not arguments.json:
        parser.error(f"name models of {', '.join(CELLS)}, and --json FILE.")
    reports = []
    for name in arguments.models:
        cells = CELLS[name][: arguments.only]
        report = bench.run(name, cells=cells, kernels=[PROFILED], progress=say)
        reports.append(report.to_json())
        # After each model: a run that is cut short has what it measured.
        arguments.json.write_text(json.dumps(reports, indent=1) + "\n")


def picture(record: dict):
    """Time and floor of every measurement but a few between others. record: docs/measured."""
    from gptoss_jax.plots import Timing, speed

    timings = []
    for report in record["models"]:
        for row in report["rows"]:
            what, batch, context = row["what"], row["batch"], f"{row['context'] // 1000}k"
            if (report["model"], batch) in (("20b", 4), ("120b", 8), ("120b", 128)):
                continue
            of = f"B={batch}, {context}" if what == "decode" else f"{context} tokens"
            name = f"{report['model']}\n{what}\n{of}"
            timings.append(Timing(name, row["ms"], row["floor_ms"]))
    where = f"{record['device']}, jax {record['jax']}, {record['date']}"
    return speed(timings, title=f"a decoding step or a prefill, and its floor ({where})")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
