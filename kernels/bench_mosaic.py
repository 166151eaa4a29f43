"""Mosaic plans at the named shapes: python -m gptoss_jax.kernels.bench_mosaic [--json FILE]

    build     the candidate plans of every shape are compiled side by side, 8 at a time
    measure   alone, one after another

Each is checked against float64 by a row and against the shape's first candidate by all, run again
for equal bits, and timed: us of one whole MoE layer from logits on, several layers with weights of
their own in rotation, and us of its kernels by the profiler. A candidate that fails says why and
the next one runs. What has not begun to compile after half of --seconds is left out, and so is what
has not been measured after all of them; the table is written after each.
"""

import argparse
import concurrent.futures
import functools
import json
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from . import bench, shapes
from .expert_matmul import mosaic
from .profile import kernel_times
from .routing import top_k

# The order is that of what one would want to know first. Below 64 tokens the Triton form is faster:
# 50, 116 and 154 us at 1, 8 and 32 tokens of 20b, where this one took 58, 143 and 206.
SHAPES = "20b/2048,20b/512,20b/128,20b/256,20b/8192,120b/2048,120b/512,120b/1024,120b/128,120b/8192"
LAYERS = {"20b": 4, "120b": 2}
ROUNDS = 6  # of them in a program, whose start is 180 us
BUILD = 0.5  # of the seconds: when no more is compiled
THREADS = 8


@functools.cache
def _inputs(model: str):
    problem = shapes.experts(model, 1)
    make = jax.jit(functools.partial(bench.random_experts, problem=problem))
    turn = jax.jit(lambda experts: experts.to_layout("mosaic"))
    host = jax.tree.map(np.asarray, make(jax.random.key(0)))
    return host, [turn(make(jax.random.key(i))) for i in range(LAYERS[model])]


@functools.cache
def _rows(problem: shapes.Experts):
    """x, logits of each layer, and the first layer's last row in float64."""
    host, layers = _inputs(problem.model)
    keys = jax.random.split(jax.random.key(1000 + problem.tokens), len(layers) + 1)
    x_ND = jax.random.normal(keys[0], (problem.tokens, problem.embed), jnp.bfloat16)
    logits = [jax.random.normal(k, (problem.tokens, problem.experts)) for k in keys[1:]]
    ids_NX, weights_NX = top_k(logits[0], problem.chosen, backend="xla")
    want_D = bench.expected(x_ND[-1], ids_NX[-1], weights_NX[-1], host)
    return x_ND, logits, want_D


def difference(got, want) -> float:
    got, want = (np.asarray(a).astype(np.float64) for a in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def compiled_layers(problem: shapes.Experts, plan: mosaic.Plan, where=None):
    """A program that goes round the layers, one after another, as bench.compiled_layers; where:
    shapes to compile for, no arrays."""
    how = dict(limit=bench.LIMIT, alpha=bench.ALPHA, out_dtype=jnp.dtype(jnp.bfloat16), plan=plan)

    def run(x_ND, logits, layers):
        def layer(x_ND, logits_NE, experts):
            return mosaic.expert_matmul(x_ND, *top_k(logits_NE, problem.chosen), experts, **how)

        def round_(_, x_ND):
            for each in zip(logits, layers, strict=True):
                x_ND = layer(x_ND, *each)
            return x_ND

        first_ND = layer(x_ND, logits[0], layers[0])
        return first_ND, jax.lax.fori_loop(0, ROUNDS, round_, first_ND)

    if where is not None:
        return jax.jit(run).lower(*where).compile()
    x_ND, logits, _ = _rows(problem)
    args = (x_ND, logits, _inputs(problem.model)[1])
    return jax.jit(run).lower(*args).compile(), args


def measure(problem: shapes.Experts, plan: mosaic.Plan, program, first: dict) -> dict:
    """One row of the table, as a dict. first: {problem: result} of the first candidates."""
    compiled, args = program
    got = np.asarray(compiled(*args)[0])
    error = difference(got[-1], _rows(problem)[-1])
    others = difference(got, first.setdefault(problem, got))
    same = all(np.array_equal(got, np.asarray(compiled(*args)[0])) for _ in range(3))
    calls = 1 + ROUNDS * LAYERS[problem.model]
    us = bench.time_us(compiled, args, calls, rounds=5)
    kernels = kernel_times(lambda: jax.block_until_ready(compiled(*args)), calls)
    return {
        "shape": problem.name,
        "plan": described(plan),
        "us": round(us, 1),
        "floor_us": round(problem.floor_us(), 1),
        "tflop_per_s": round(problem.flop() / us * 1e-6, 1),
        "relative_error": error,
        "difference": others,
        "same_bits": same,
        "right": bool(max(error, others) < bench.MOST_ERROR and same),
        "kernels": kernels[:12],
    }


def built(jobs: list, build: Callable, seconds: float) -> dict:
    """build(*job) of each, or the exception that says why there is none; nothing compiles after.

    XLA tries variants of its own kernels on the GPU while it compiles; beside that a layer of about
    690 us took 13,305. So what has begun in time is waited for, and the rest is left out.
    """
    begun = time.monotonic()

    def one(job):
        if time.monotonic() - begun > seconds:
            return TimeoutError(f"left out: not begun to compile after {seconds:.0f} s")
        try:
            return build(*job)
        except Exception as error:  # noqa: BLE001 - one bad candidate must not cost the others
            return error

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(jobs, pool.map(one, jobs), strict=True))


def described(plan: mosaic.Plan) -> str:
    """widths / warpgroups x stages of gate_up, of down / dtype of the partial rows."""
    cuts = (f"{s.warpgroups}x{s.stages}" for s in (plan.gate_up, plan.down))
    return f"{','.join(map(str, plan.widths))}/{'/'.join(cuts)}/{plan.partial}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m gptoss_jax.kernels.bench_mosaic")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    parser.add_argument("--seconds", type=float, default=600, help="stop after this long")
    parser.add_argument("--most", type=int, default=8, help="candidates a shape, at most")
    parser.add_argument("--shapes", default=SHAPES, help="model/tokens,...; default %(default)s")
    options = parser.parse_args(argv)
    start = time.monotonic()
    names = [name.split("/") for name in options.shapes.split(",")]
    problems = [shapes.experts(model, int(tokens)) for model, tokens in names]
    jobs = []
    for problem in problems:
        plans = mosaic.candidates(problem.tokens, problem.chosen, problem.experts)
        jobs += [(rank, problem, plan) for rank, plan in enumerate(plans[: options.most])]
    # Every shape's first candidate before anybody's second.
    jobs.sort(key=lambda job: (job[0], problems.index(job[1])))
    for model in dict.fromkeys(p.model for p in problems):
        _inputs(model)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(_rows, problems))
    left = BUILD * options.seconds - (time.monotonic() - start)
    programs = built([job[1:] for job in jobs], compiled_layers, left)
    print(f"built after {time.monotonic() - start:.0f} s", flush=True)
    rows, first = [], {}
    for (problem, plan), program in programs.items():
        try:
            if isinstance(program, Exception):
                raise program
            if time.monotonic() - start > options.seconds:
                raise TimeoutError(f"left out: not measured after {options.seconds:.0f} s")
            row = measure(problem, plan, program, first)
        except Exception as e:  # noqa: BLE001 - nor must one that fails when it runs
            row = {"shape": problem.name, "plan": described(plan), "failed": repr(e)[:400]}
        rows.append(row)
        if "failed" in row:
            print(f"{row['shape']:>10}  failed: {row['failed']}  {row['plan']}", flush=True)
        else:
            parts = {}
            for kernel in row["kernels"]:
                for name in ("experts_gate_up", "experts_down", "experts_combine", "experts_sort"):
                    if name in kernel["name"]:
                        parts[name] = round(parts.get(name, 0) + kernel["us"], 1)
            print(
                f"{row['shape']:>10} {row['us']:9.1f} us, floor {row['floor_us']:7.1f}"
                f" {row['tflop_per_s']:6.1f} TFLOP/s error {row['relative_error']:.1e}"
                f" {'' if row['right'] else 'WRONG '} {row['plan']} {parts}",
                flush=True,
            )
        if options.json:
            text = json.dumps(bench.header() | {"rows": rows}, indent=1)
            pathlib.Path(options.json).write_text(text)


if __name__ == "__main__":
    main()
