"""Measures everything that README's table of speed quotes, in one run, into one JSON file.

    python recipes/record_speed.py 20b 120b --json record.json

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
    parser.add_argument("models", nargs="+", choices=CELLS)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", type=int, help="the first so many cells of each model")
    arguments = parser.parse_args()
    reports = []
    for name in arguments.models:
        cells = CELLS[name][: arguments.only]
        report = bench.run(name, cells=cells, kernels=[PROFILED], progress=say)
        reports.append(report.to_json())
        # After each model: a run that is cut short has what it measured.
        arguments.json.write_text(json.dumps(reports, indent=1) + "\n")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
