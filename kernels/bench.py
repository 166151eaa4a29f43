"""Times the kernels at the named shapes: python -m gptoss_jax.kernels.bench [experts] [--json FILE]

A time is that of one whole MoE layer after the router's matmul: top-k, schedule, both matmuls,
SwiGLU, combine. Several layers with weights of their own run in rotation inside one compiled
program, weights being its arguments: an L2 of 60 MB keeps nothing of them. Beside it: packed bytes
of the experts hit a second, FLOP a second, the share of the floor, the XLA form, and the error of a
few rows against float64.
"""

import argparse
import datetime
import functools
import json
import statistics
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np

from . import shapes
from .expert_matmul import ExpertWeights, expert_matmul, layout_for
from .expert_matmul.triton import Plan
from .mxfp4 import MAGNITUDES
from .routing import top_k

LIMIT, ALPHA = 7.0, 1.702
CALLS = {"20b": 24, "120b": 12}  # layers in one compiled program
LAYERS = {"20b": 6, "120b": 3}  # of them distinct: 2.5 and 5 GB


def random_experts(key: jax.Array, problem: shapes.Experts) -> ExpertWeights:
    """Every code as likely, scales that keep sums near 1, biases that matter; checkpoint layout."""
    e, d, f = problem.experts, problem.embed, problem.ffn
    keys = jax.random.split(key, 6)

    def scales(key, shape):
        return jax.random.randint(key, shape, 117, 123, jnp.int32).astype(jnp.uint8)

    return ExpertWeights(
        layout="checkpoint",
        gate_up_blocks=jax.random.bits(keys[0], (e, 2 * f, d // 32, 16), jnp.uint8),
        gate_up_scales=scales(keys[1], (e, 2 * f, d // 32)),
        gate_up_bias=jax.random.normal(keys[2], (e, 2 * f), jnp.bfloat16),
        down_blocks=jax.random.bits(keys[3], (e, d, f // 32, 16), jnp.uint8),
        down_scales=scales(keys[4], (e, d, f // 32)),
        down_bias=jax.random.normal(keys[5], (e, d), jnp.bfloat16),
    )


def _float64(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decoded by table, sharing nothing with the library."""
    table = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = table[codes] * 2.0 ** (scales.astype(np.float64)[..., None] - 127)
    return values.reshape(*scales.shape[:-1], -1)


def expected(x_ND, ids_NX, weights_NX, experts: ExpertWeights, rows: list[int]) -> np.ndarray:
    """float64 results of some rows, the hidden values rounded to bfloat16 as the kernels do."""
    x_ND, ids_NX, weights_NX = (np.asarray(a) for a in (x_ND, ids_NX, weights_NX))
    out = np.zeros((len(rows), experts.embed))
    for i, n in enumerate(rows):
        for x, e in enumerate(ids_NX[n]):
            one = {k: np.asarray(v[int(e)]) for k, v in experts.leaves().items()}
            h = _float64(one["gate_up_blocks"], one["gate_up_scales"]) @ x_ND[n].astype(np.float64)
            h = h + one["gate_up_bias"].astype(np.float64)
            gate, up = np.minimum(h[0::2], LIMIT), np.clip(h[1::2], -LIMIT, LIMIT)
            h = (gate / (1 + np.exp(-ALPHA * gate)) * (up + 1)).astype(x_ND.dtype)
            y = _float64(one["down_blocks"], one["down_scales"]) @ h.astype(np.float64)
            out[i] += weights_NX[n, x] * (y + one["down_bias"].astype(np.float64))
    return out


def _layer(x_ND, logits_NE, experts, *, chosen, backend, plan=None):
    ids_NX, weights_NX = top_k(logits_NE, chosen)
    if plan is not None:
        from .expert_matmul import triton

        return triton.expert_matmul(
            x_ND,
            ids_NX,
            weights_NX,
            experts,
            limit=LIMIT,
            alpha=ALPHA,
            out_dtype=x_ND.dtype,
            plan=plan,
        )
    return expert_matmul(
        x_ND, ids_NX, weights_NX, experts, limit=LIMIT, alpha=ALPHA, backend=backend
    )


@functools.cache
def _inputs(model: str, layout: str):
    problem = shapes.experts(model, 1)
    make = jax.jit(functools.partial(random_experts, problem=problem))
    turn = jax.jit(lambda e: e.to_layout(layout), donate_argnums=0)
    first = make(jax.random.key(0))
    host = jax.tree.map(np.asarray, first)  # for the check
    return host, [turn(make(jax.random.key(i))) for i in range(LAYERS[model])]


def time_us(compiled, args, calls: int, rounds: int = 7) -> float:
    """Median microseconds of one of the calls that a compiled program makes."""
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready([compiled(*args) for _ in range(3)])
        times.append((time.perf_counter() - start) / 3 / calls * 1e6)
    return statistics.median(times)


def _problem_inputs(problem: shapes.Experts, layers: int):
    keys = jax.random.split(jax.random.key(1000 + problem.tokens), layers + 1)
    x_ND = jax.random.normal(keys[0], (problem.tokens, problem.embed), jnp.bfloat16)
    shape = (problem.tokens, problem.experts)
    return x_ND, [jax.random.normal(k, shape, jnp.float32) for k in keys[1:]]


def compiled_layers(problem: shapes.Experts, backend: str, plan: Plan | None = None):
    """A compiled program of several layers in rotation, its arguments, and how many calls it is."""
    host, layers = _inputs(problem.model, layout_for(backend))
    x_ND, logits = _problem_inputs(problem, len(layers))
    calls = len(layers) if backend == "xla" or problem.tokens > 512 else CALLS[problem.model]
    layer = functools.partial(_layer, chosen=problem.chosen, backend=backend, plan=plan)

    def run(x_ND, logits, layers):
        # A chain: equal calls on equal arguments would be made once.
        first_ND = x_ND = layer(x_ND, logits[0], layers[0])
        for i in range(1, calls):
            x_ND = layer(x_ND, logits[i % len(layers)], layers[i % len(layers)])
        return first_ND, x_ND

    args = (x_ND, logits, layers)
    return jax.jit(run).lower(*args).compile(), args, calls


def measure(problem: shapes.Experts, backend: str, plan: Plan | None = None) -> dict:
    """One row of the table, as a dict."""
    compiled, args, calls = compiled_layers(problem, backend, plan)
    x_ND, logits, _ = args
    us = time_us(compiled, args, calls)
    rows = sorted({0, problem.tokens // 2})
    ids_NX, weights_NX = top_k(logits[0], problem.chosen)
    want = expected(x_ND, ids_NX, weights_NX, _inputs(problem.model, layout_for(backend))[0], rows)
    got = np.asarray(compiled(*args)[0])[rows].astype(np.float64)
    return {
        "op": "experts",
        "shape": problem.name,
        "backend": backend,
        "us": round(us, 2),
        "floor_us": round(problem.floor_us(), 1),
        "floor_percent": round(100 * problem.floor_us() / us, 1),
        "tb_per_s": round(problem.weight_bytes() / us * 1e-6, 3),
        "tflop_per_s": round(problem.flop() / us * 1e-6, 1),
        "relative_error": float(np.linalg.norm(got - want) / np.linalg.norm(want)),
    }


def header() -> dict:
    """What the figures belong to."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or None,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m gptoss_jax.kernels.bench")
    parser.add_argument("op", nargs="?", default="experts", choices=["experts"])
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    parser.add_argument("--model", choices=["20b", "120b"], help="one model only")
    parser.add_argument("--tokens", help="comma-separated numbers of tokens")
    parser.add_argument("--no-xla", action="store_true", help="leave out the XLA form beside it")
    options = parser.parse_args(argv)
    wanted = {int(n) for n in options.tokens.split(",")} if options.tokens else shapes.TOKENS
    backend = "triton" if layout_for().startswith("triton") else "xla"
    rows = []
    print(f"{'shape':>10} {'us':>9} {'floor':>7} {'%':>5} {'TB/s':>6} {'TFLOP/s':>8} {'xla us':>9}")
    for problem in shapes.EXPERTS:
        if problem.tokens not in wanted or options.model not in (None, problem.model):
            continue
        row = measure(problem, backend)
        if backend != "xla" and not options.no_xla:
            compiled, args, calls = compiled_layers(problem, "xla")
            row["xla_us"] = round(time_us(compiled, args, calls, rounds=3), 1)
        rows.append(row)
        print(
            f"{row['shape']:>10} {row['us']:9.1f} {row['floor_us']:7.1f}"
            f" {row['floor_percent']:5.1f} {row['tb_per_s']:6.2f} {row['tflop_per_s']:8.1f}"
            f" {row.get('xla_us', '-'):>9}  error {row['relative_error']:.1e}",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(header() | {"rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
