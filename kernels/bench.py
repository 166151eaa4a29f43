"""Times the kernels at the named shapes: python -m gptoss_jax.kernels.bench [experts] [--json FILE]

A time is that of one whole MoE layer after the router's matmul: top-k, schedule, both matmuls,
SwiGLU, combine. Several layers with weights of their own run in rotation inside one compiled
program, weights being its arguments: an L2 of 60 MB keeps nothing of them. Beside it: packed bytes
of the experts hit a second, FLOP a second, the share of the floor, the XLA form, and the error of
one row against float64.
"""

import argparse
import concurrent.futures
import dataclasses
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
from .expert_matmul import ExpertWeights, expert_matmul, layout_for, triton
from .mxfp4 import MAGNITUDES
from .routing import top_k

LIMIT, ALPHA = 7.0, 1.702
MOST_ERROR = 4e-3  # bfloat16 hidden values and result; measured 1.6e-3
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


def _decoded(experts: ExpertWeights, name: str, expert: int) -> np.ndarray:
    """float32 [out, in], exact, by table: shares nothing with the library."""
    table = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)], np.float32)
    blocks = np.asarray(getattr(experts, f"{name}_blocks")[expert])
    scales = np.asarray(getattr(experts, f"{name}_scales")[expert])
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = table[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return values.reshape(len(scales), -1)


def expected(x_D, ids_X, weights_X, experts: ExpertWeights) -> np.ndarray:
    """One row's result in float64, the hidden values rounded to x's dtype as the kernels do."""
    x_D, out = np.asarray(x_D), 0.0
    for weight, e in zip(np.asarray(weights_X), np.asarray(ids_X).tolist(), strict=True):
        gate_up_bias, down_bias = (
            np.asarray(bias[e]).astype(np.float64)
            for bias in (experts.gate_up_bias, experts.down_bias)
        )
        h = _decoded(experts, "gate_up", e) @ x_D.astype(np.float64) + gate_up_bias
        gate, up = np.minimum(h[0::2], LIMIT), np.clip(h[1::2], -LIMIT, LIMIT)
        h = (gate / (1 + np.exp(-ALPHA * gate)) * (up + 1)).astype(x_D.dtype)
        out = out + weight * (_decoded(experts, "down", e) @ h.astype(np.float64) + down_bias)
    return out


def _layer(x_ND, logits_NE, experts, *, chosen, backend, plan=None):
    chosen = top_k(logits_NE, chosen)
    how = dict(limit=LIMIT, alpha=ALPHA, out_dtype=x_ND.dtype)
    if plan is not None:
        return triton.expert_matmul(x_ND, *chosen, experts, plan=plan, **how)
    return expert_matmul(x_ND, *chosen, experts, backend=backend, **how)


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


def compiled_layers(problem: shapes.Experts, backend: str, plan: triton.Plan | None = None):
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


@functools.cache
def _row_in_float64(problem: shapes.Experts, layout: str) -> np.ndarray:
    host, layers = _inputs(problem.model, layout)
    x_ND, logits = _problem_inputs(problem, len(layers))
    ids_NX, weights_NX = top_k(logits[0], problem.chosen)
    return expected(x_ND[-1], ids_NX[-1], weights_NX[-1], host)


def _error(problem: shapes.Experts, backend: str, compiled, args) -> float:
    """Relative, of the first layer's last row against float64."""
    want = _row_in_float64(problem, layout_for(backend))
    got = np.asarray(compiled(*args)[0][-1]).astype(np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def measure(problem: shapes.Experts, backend: str, plan: triton.Plan | None = None) -> dict:
    """One row of the table, as a dict."""
    compiled, args, calls = compiled_layers(problem, backend, plan)
    us = time_us(compiled, args, calls)
    return {
        "op": "experts",
        "shape": problem.name,
        "backend": backend,
        "us": round(us, 2),
        "floor_us": round(problem.floor_us(), 1),
        "floor_percent": round(100 * problem.floor_us() / us, 1),
        "tb_per_s": round(problem.weight_bytes() / us * 1e-6, 3),
        "tflop_per_s": round(problem.flop() / us * 1e-6, 1),
        "relative_error": _error(problem, backend, compiled, args),
    }


def candidates(problem: shapes.Experts) -> list[triton.Plan]:
    """Plans worth trying at a number of tokens; the heuristic's first."""
    plan, shape = triton.Plan, triton.Shape
    first = triton.heuristic(
        problem.tokens, problem.chosen, problem.experts, jax.devices()[0].device_kind
    )
    found = [first]
    mean = problem.tokens * problem.chosen / problem.experts
    if problem.tokens <= 8:  # too few programs to keep a GPU reading: split K of both
        for gate_split, down_split in ((1, 4), (2, 4), (3, 6), (4, 4)):
            for depth in (dict(groups=8, lanes=4, stages=3), dict(groups=4, lanes=8, stages=4)):
                found.append(
                    plan(
                        rows=8,
                        direct=problem.tokens <= 2,
                        gate_up=shape(split=gate_split, **depth),
                        down=shape(split=down_split, **depth),
                    )
                )
    elif mean <= 32:
        for rows in (8, 16, 32):
            for groups, lanes, stages in ((8, 4, 3), (8, 8, 3), (4, 8, 4), (4, 8, 3)):
                few = shape(groups=groups, lanes=lanes, stages=stages)
                found.append(plan(rows=rows, direct=False, gate_up=few, down=few))
    else:
        for rows in (32, 64, 128):
            for cols, warps, groups, stages in (
                (64, 4, 4, 2),
                (64, 4, 2, 3),
                (64, 4, 2, 4),
                (128, 8, 4, 3),
                (128, 8, 2, 4),
            ):
                many = shape(cols=cols, warps=warps, groups=groups, lanes=8, stages=stages)
                for order in ("chunked", "joined"):
                    found.append(
                        plan(rows=rows, direct=False, gate_up=many, down=many, order=order)
                    )
    return list(dict.fromkeys(found))


def explore(problem: shapes.Experts, threads: int = 12) -> dict | None:
    """The fastest candidate whose numbers are right, in the form of kernels/tuned, or None.

    Every configuration is checked: one that Triton lays out badly gives garbage at full speed.
    """

    def build(plan):
        try:
            return compiled_layers(problem, "triton", plan)
        except Exception as error:  # too much shared memory, or a shape the compiler refuses
            return error

    plans = candidates(problem)
    _inputs(problem.model, layout_for("triton"))
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        built = list(pool.map(build, plans))
    best = None
    for plan, program in zip(plans, built, strict=True):
        if isinstance(program, Exception):
            print(f"  {plan}: {str(program)[:100]}", flush=True)
            continue
        compiled, args, calls = program
        error = _error(problem, "triton", compiled, args)
        us = time_us(compiled, args, calls, rounds=5)
        print(f"  {us:9.1f} us, error {error:.1e}: {plan}", flush=True)
        if error < MOST_ERROR and (best is None or us < best["us"]):
            best = dataclasses.asdict(plan) | {"us": round(us, 1), "source": "chain"}
    return best


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
    parser.add_argument(
        "--explore", metavar="FILE", help="try candidate plans, write the best as kernels/tuned"
    )
    options = parser.parse_args(argv)
    wanted = {int(n) for n in options.tokens.split(",")} if options.tokens else shapes.TOKENS
    backend = "triton" if layout_for().startswith("triton") else "xla"
    rows, plans = [], {}
    print(f"{'shape':>10} {'us':>9} {'floor':>7} {'%':>5} {'TB/s':>6} {'TFLOP/s':>8} {'xla us':>9}")
    for problem in shapes.EXPERTS:
        if problem.tokens not in wanted or options.model not in (None, problem.model):
            continue
        plan = None
        if options.explore and (best := explore(problem)):
            key = f"{problem.embed},{problem.ffn},{problem.experts},{problem.chosen}"
            plans.setdefault(key, {})[str(problem.tokens)] = best
            plan = triton.plan_from(best)
            with open(options.explore, "w") as file:  # again each time: a run may be cut short
                json.dump(header() | {"plans": plans}, file, indent=1)
        row = measure(problem, backend, plan)
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
