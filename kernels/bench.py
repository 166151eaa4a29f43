"""Times the kernels at the named shapes: python -m gptoss_jax.kernels.bench [experts] [--json FILE]

A time is that of one whole MoE layer after the router's matmul: the choice of experts, schedule,
both matmuls, SwiGLU, the sum and the residual. Several layers with weights of their own run in
rotation inside one compiled program, weights being its arguments: an L2 of 60 MB keeps nothing of
them. Beside it: packed bytes of the experts hit a second, FLOP a second, the share of the floor,
the XLA form, and the error of one row against float64.

With --explore FILE candidates are tried before (see explore); --seconds, --most, --model and
--tokens keep that short.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import json
import pathlib
import statistics
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np

from . import shapes
from .expert_matmul import ExpertWeights, layout_for, mixture, triton
from .explore import explore, parts_of
from .mxfp4 import MAGNITUDES
from .profile import kernel_times
from .routing import top_k

LIMIT, ALPHA = 7.0, 1.702
MOST_ERROR = 4e-3  # bfloat16 hidden values and result; measured 1.6e-3
CALLS = {"20b": 24, "120b": 12}  # layers in one compiled loop
# of it: starting a program takes the host some 180 us, which at 12 layers was 15 us of each
ROUNDS = 8
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


def _times(experts: ExpertWeights, name: str, expert: int, x: np.ndarray) -> np.ndarray:
    """float64 [out]: one matrix times x, by table: shares nothing with the library.

    A block's 32 products of a code and a bfloat16 have at most 11 bits; their sum in float32 is
    right to 1e-7, and ten times faster than a whole matrix in float64.
    """
    table = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)], np.float32)
    pairs = np.stack([table[np.arange(256) & 15], table[np.arange(256) >> 4]], axis=-1)
    scales = np.asarray(getattr(experts, f"{name}_scales")[expert])
    codes = np.take(pairs, np.asarray(getattr(experts, f"{name}_blocks")[expert]), axis=0)
    x_blocks = x.astype(np.float32).reshape(-1, 32)
    sums = np.einsum("rbk,bk->rb", codes.reshape(*scales.shape, 32), x_blocks)
    return (sums * np.exp2(scales.astype(np.float64) - 127)).sum(axis=1)


def expected(x_D, ids_X, weights_X, experts: ExpertWeights) -> np.ndarray:
    """One row's result in float64, the hidden values rounded to x's dtype as the kernels do."""
    x_D, out = np.asarray(x_D), 0.0
    for weight, e in zip(np.asarray(weights_X), np.asarray(ids_X).tolist(), strict=True):
        gate_up_bias, down_bias = (
            np.asarray(bias[e]).astype(np.float64)
            for bias in (experts.gate_up_bias, experts.down_bias)
        )
        h = _times(experts, "gate_up", e, x_D) + gate_up_bias
        gate, up = np.minimum(h[0::2], LIMIT), np.clip(h[1::2], -LIMIT, LIMIT)
        h = (gate / (1 + np.exp(-ALPHA * gate)) * (up + 1)).astype(x_D.dtype)
        out = out + weight * (_times(experts, "down", e, h) + down_bias)
    return out


def _layer(x_ND, logits_NE, live_N, zero_ND, experts, *, chosen, backend, plan=None):
    """plan: of the Triton kernels, whatever the layout; backend None: what a model would run."""
    given = (x_ND, logits_NE, live_N, experts, zero_ND)
    how = dict(chosen=chosen, limit=LIMIT, alpha=ALPHA)
    if plan is not None:
        return triton.mixture(*given, plan=plan, **how)
    return mixture(*given, backend=backend, **how)


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


def compiled_layers(
    problem: shapes.Experts,
    backend: str | None,
    layout: str,
    plan: triton.Plan | None = None,
    *,
    alone: bool = False,
):
    """A compiled program of several layers in rotation, its arguments, and how many calls it is.

    alone: each distinct layer once, and every launch by itself, for the profiler.
    """
    host, layers = _inputs(problem.model, layout)
    x_ND, logits = _problem_inputs(problem, len(layers))
    few = alone or backend == "xla" or problem.tokens > 512
    calls = len(layers) if few else CALLS[problem.model]
    layer = functools.partial(_layer, chosen=problem.chosen, backend=backend, plan=plan)

    rounds = 1 if few else ROUNDS

    def run(x_ND, logits, live_N, zero_ND, layers):
        def chain(_, x_ND):
            # Equal calls on equal arguments would be made once. The residual is zero, so that the
            # error is that of the experts' sum.
            for i in range(calls):
                at = i % len(layers)
                x_ND = layer(x_ND, logits[at], live_N, zero_ND, layers[at])
            return x_ND

        first_ND = layer(x_ND, logits[0], live_N, zero_ND, layers[0])
        # From first_ND on: the loop's own first layer would be that one again, made once for both.
        return first_ND, jax.lax.fori_loop(0, rounds, chain, first_ND)

    args = (x_ND, logits, jnp.ones(problem.tokens, bool), jnp.zeros_like(x_ND), layers)
    options = {"xla_gpu_enable_command_buffer": ""} if alone else None
    program = jax.jit(run, compiler_options=options).lower(*args).compile()
    return program, args, rounds * calls + 1


@functools.cache
def _row_in_float64(problem: shapes.Experts, layout: str) -> np.ndarray:
    host, layers = _inputs(problem.model, layout)
    x_ND, logits = _problem_inputs(problem, len(layers))
    ids_NX, weights_NX = top_k(logits[0], problem.chosen)
    return expected(x_ND[-1], ids_NX[-1], weights_NX[-1], host)


def _error(problem: shapes.Experts, layout: str, compiled, args) -> float:
    """Relative, of the first layer's last row against float64."""
    want = _row_in_float64(problem, layout)
    got = np.asarray(compiled(*args)[0][-1]).astype(np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def measure(problem: shapes.Experts, backend: str, layout: str, program: tuple) -> dict:
    """One row of the table, as a dict."""
    compiled, args, calls = program
    us = time_us(compiled, args, calls)
    return {
        "op": "experts",
        "shape": problem.name,
        "backend": backend,
        "layout": layout,
        "us": round(us, 2),
        "floor_us": round(problem.floor_us(), 1),
        "floor_percent": round(100 * problem.floor_us() / us, 1),
        "tb_per_s": round(problem.weight_bytes() / us * 1e-6, 3),
        "tflop_per_s": round(problem.flop() / us * 1e-6, 1),
        "relative_error": _error(problem, layout, compiled, args),
    }


def _alone(
    problem: shapes.Experts, program: tuple, *, layout: str
) -> tuple[dict[str, float], float]:
    """us of each kernel of one layer, and the error; every configuration is checked, since one that
    Triton lays out badly gives garbage at full speed."""
    compiled, args, calls = program
    error = _error(problem, layout, compiled, args)  # also the first run
    found = kernel_times(lambda: jax.block_until_ready(compiled(*args)), calls)
    return (parts_of(found) if found else {"all": time_us(compiled, args, calls, 3)}), error


def explored(problems: list, seconds: float, most: int, layout: str) -> dict:
    """{problem: plan} of the fastest candidates that are right."""
    for model in {problem.model for problem in problems}:
        _inputs(model, layout)

    def build(problem, plan):
        _row_in_float64(problem, layout)
        return compiled_layers(problem, "triton", layout, plan, alone=True)

    kind = jax.devices()[0].device_kind
    limits = dict(seconds=seconds, most=most, most_error=MOST_ERROR, layout=layout)
    return explore(problems, kind, build, functools.partial(_alone, layout=layout), **limits)


def write_plans(
    file: str | pathlib.Path, plans: dict, rows: list[dict], layout: str = "triton"
) -> None:
    """A table for kernels/tuned: what the file had, and these; with the rows measured so far."""
    path = pathlib.Path(file)
    table = json.loads(path.read_text())["plans"] if path.exists() else {}
    took = {row["shape"]: row["us"] for row in rows}
    for problem, plan in plans.items():
        key = f"{problem.embed},{problem.ffn},{problem.experts},{problem.chosen}"
        entry = dataclasses.asdict(plan) | {"us": took.get(problem.name), "source": "chain"}
        table.setdefault(layout, {}).setdefault(key, {})[str(problem.tokens)] = entry
    table = {
        layout: {
            key: dict(sorted(by_tokens.items(), key=lambda item: int(item[0])))
            for key, by_tokens in by_shape.items()
        }
        for layout, by_shape in table.items()
    }
    path.write_text(json.dumps(header() | {"plans": table}, indent=1) + "\n")


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
    parser.add_argument("--layout", help="of the packed experts; default what a model would have")
    parser.add_argument("--no-xla", action="store_true", help="leave out the XLA form beside it")
    parser.add_argument(
        "--explore", metavar="FILE", help="try candidate plans, write the best as kernels/tuned"
    )
    parser.add_argument("--seconds", type=float, default=600, help="of exploring, at most")
    parser.add_argument("--most", type=int, default=8, help="candidates a shape, at most")
    options = parser.parse_args(argv)
    wanted = {int(n) for n in options.tokens.split(",")} if options.tokens else shapes.TOKENS
    layout = options.layout or layout_for()
    backend = "xla" if layout == "checkpoint" else None
    problems = [
        problem
        for problem in shapes.EXPERTS
        if problem.tokens in wanted and options.model in (None, problem.model)
    ]
    plans = {}
    if options.explore:
        plans = explored(problems, options.seconds, options.most, layout)
        write_plans(options.explore, plans, [], layout)
    for model in {problem.model for problem in problems}:
        _inputs(model, layout)

    def compiled(problem):
        return compiled_layers(problem, backend, layout, plans.get(problem))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # compiled first, then timed alone
        programs = list(pool.map(compiled, problems))
    rows = []
    print(f"{'shape':>10} {'us':>9} {'floor':>7} {'%':>5} {'TB/s':>6} {'TFLOP/s':>8} {'xla us':>9}")
    for problem, program in zip(problems, programs, strict=True):
        row = measure(problem, backend or "kernels", layout, program)
        if backend != "xla" and not options.no_xla:
            by_xla, args, calls = compiled_layers(problem, "xla", "checkpoint")
            row["xla_us"] = round(time_us(by_xla, args, calls, rounds=3), 1)
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
    if options.explore:
        write_plans(options.explore, plans, rows, layout)


if __name__ == "__main__":
    main()
