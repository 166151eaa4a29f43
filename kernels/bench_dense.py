"""Times and checks every form of attention and of the dense layers on the GPU at hand.

    python -m gptoss_jax.kernels.bench_dense [GROUP ...] [--rows 1,8] [--json FILE]

Times are those of the kernels alone (see `profile`), on several sets of weights or caches in turn,
so that an L2 of 60 MB keeps nothing. Each form is compared with float64 at the same shapes: a
configuration that is fast and wrong has happened.
"""

import argparse
import functools
import json
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from .attention import prefill, reference, step, xla
from .bench import header
from .linear import reference as dense_reference
from .linear import router, tile, vector
from .linear import xla as dense_xla
from .profile import kernel_times

SETS = 4
ALONE = {"xla_gpu_enable_command_buffer": ""}  # each launch of its own, for the profiler


def normal(seed: int, shape: tuple[int, ...], dtype=jnp.bfloat16, scale: float = 1.0):
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale).astype(dtype)


def wide(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def measure(problem: str, forms: dict, sets: list[tuple], expected, size_bytes=0, flop=0):
    """A row for every form: f(*args) for each args of `sets`; expected: float64 for sets[0]."""
    with ThreadPoolExecutor(8) as pool:
        compiling = {
            name: pool.submit(
                lambda f=f: jax.jit(f, compiler_options=ALONE).lower(*sets[0]).compile()
            )
            for name, f in forms.items()
        }
        for name, form in compiling.items():
            try:
                yield _row(problem, name, form.result(), sets, expected, size_bytes, flop)
            except Exception as error:  # one that does not compile must not end the table
                yield {"problem": problem, "form": name, "error": repr(error)[:200]}


def _row(problem, name, run, sets, expected, size_bytes, flop) -> dict:
    out = jax.tree.leaves(run(*sets[0]))[0]
    jax.block_until_ready([run(*args) for args in sets])
    found = kernel_times(lambda: jax.block_until_ready([run(*args) for args in sets]), len(sets))
    us = sum(kernel["us"] for kernel in found) or float("nan")
    difference = np.linalg.norm(wide(out) - expected) / np.linalg.norm(expected)
    return {
        "problem": problem,
        "form": name,
        "us": round(us, 2),
        "tb_per_s": round(size_bytes / us * 1e-6, 2),
        "tflop_per_s": round(flop / us * 1e-6, 1),
        "launches": sum(kernel["launches"] for kernel in found),
        "relative_error": float(f"{difference:.2g}"),
    }


def linear_rows(rows=(1, 2, 4, 8, 16, 32, 64)):
    """Both projections of 20b and 120b: with the norm in front, and with the residual behind."""
    for n in rows:
        for name, n_out, n_in, normed in (("qkv", 5120, 2880, True), ("out", 2880, 4096, False)):
            x, norm = normal(0, (n, n_in)), normal(1, (n_in,), jnp.float32)
            residual = normal(2, (n, n_out))
            sets = [
                (x, normal(10 + i, (n_out, n_in), scale=0.02), normal(20 + i, (n_out,)))
                for i in range(SETS)
            ]
            around = {"norm_I": norm} if normed else {"residual_NO": residual}
            forms = {"xla": functools.partial(dense_xla.linear, **around)}
            if n <= 2:
                # Rows a program, of them together, warps, columns. Where a program has turns, x and
                # the norm stay in registers: 21 and 16 loads of 512 bytes a row of qkv, for
                # 4 and 8 rows, where 12 of the weight itself and 18 of x and the norm are 30.
                for per, together, warps, columns in (
                    (2, 2, 1, 256), (4, 2, 2, 512), (4, 1, 2, 512), (4, 1, 1, 256), (8, 2, 2, 512),
                    (1, 1, 1, 256), (4, 4, 2, 256),
                ):  # fmt: skip
                    tiles = dict(rows=per, together=together, warps=warps, columns=columns)
                    form = functools.partial(vector.linear, **around, **tiles)
                    name = f"vector {per} rows {together} together {warps} warps {columns} columns"
                    forms[name] = form
            if n > 1:
                for per, parts, columns, warps, stages in (
                    (16, 4, 64, 4, 5), (16, 4, 128, 4, 4), (32, 2, 128, 4, 4), (16, 2, 128, 2, 4),
                    (32, 2, 64, 4, 5), (64, 1, 128, 4, 4), (16, 1, 128, 1, 5), (32, 1, 128, 4, 4),
                ):  # fmt: skip
                    tiles = dict(rows=per, parts=parts, columns=columns, warps=warps, stages=stages)
                    form = functools.partial(_tile, around, tiles)
                    forms[f"tile {per}x{columns} {parts} parts {warps} warps {stages} stages"] = (
                        form
                    )
            a, w, b = (wide(part) for part in sets[0])
            if normed:
                a = a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-5) * wide(norm)
            expected = a @ w.T + b + (0 if normed else wide(residual))
            yield from measure(f"{name} {n} rows", forms, sets, expected, 2 * n_out * n_in)


def _tile(around, tiles, x, weight, bias):
    if "norm_I" in around:
        x, around = dense_reference.rms_norm(x, around["norm_I"], 1e-5), {}
    return tile.linear(x, weight, bias, **around, **tiles)


def router_rows():
    for experts in (32, 128):
        for n in (1, 8, 32):
            args = (
                normal(0, (n, 2880)),
                normal(1, (2880,), jnp.float32),
                normal(2, (experts, 2880)),
                normal(3, (experts,), jnp.float32),
            )

            def plain(x, norm, weight, bias):
                normed = dense_reference.rms_norm(x, norm, 1e-5)
                return dense_reference.router(normed, weight, bias), normed

            def kernel(*args, **tiles):
                return router.norm_router(*args, **tiles)[::-1]

            forms = {"xla": plain}
            for per, warps, columns in ((4, 4, 256), (1, 4, 1024), (2, 8, 1024), (2, 4, 512)):
                tiles = dict(rows=per, warps=warps, columns=columns)
                name = f"{per} experts {warps} warps {columns} columns"
                forms[name] = functools.partial(kernel, **tiles)
            normed = wide(dense_reference.rms_norm(*args[:2], 1e-5))
            expected = normed @ wide(args[2]).T + wide(args[3])
            yield from measure(f"router {experts}, {n} rows", forms, [args], expected)


def step_rows():
    """Decoding: caches of 1.5 times what is filled; rings."""
    for batch, slots, used, window in (
        (1, 1536, 1024, None), (1, 12288, 8192, None), (1, 49152, 32768, None), (1, 128, 128, 128),
        (8, 1536, 1024, None), (32, 1536, 1024, None), (32, 128, 128, 128),
        (128, 1536, 1024, None), (128, 128, 128, 128),
    ):  # fmt: skip
        qkv = normal(0, (batch, 8, 10, 64))
        cos, sin = normal(1, (batch, 32), jnp.float32), normal(2, (batch, 32), jnp.float32)
        sinks = normal(3, (8, 8), jnp.float32)
        pos = jnp.full(batch, used - 1, jnp.int32)
        held = jnp.where(jnp.arange(slots) < used, jnp.arange(slots), -1).astype(jnp.int32)
        k_pos = jnp.tile(held, (batch, 1))
        sets = [
            (
                *(qkv, cos, sin),
                *(normal(seed + i, (batch, 8, slots, 64)) for seed in (10, 20)),
                *(sinks, pos, k_pos, pos % slots),
            )
            for i in range(SETS if batch < 128 else 2)
        ]
        forms = {"plain": functools.partial(_plain_step, window=window)}
        for keys, splits, warps, stages in (
            (64, None, 4, 3), (64, None, 4, 2), (64, None, 2, 3), (32, None, 2, 3),
            (128, None, 4, 2), (128, None, 8, 3), (64, 1, 4, 3), (64, 8, 4, 3), (64, 32, 4, 3),
        ):  # fmt: skip
            tiles = dict(keys=keys, splits=splits, warps=warps, stages=stages)
            name = f"{keys} keys {splits} splits {warps} warps {stages} stages"
            forms[name] = functools.partial(step.append_and_attend, window=window, **tiles)
        wide_args = [x.astype(jnp.float32) for x in sets[0][:6]]
        expected = wide(_plain_step(*wide_args, *sets[0][6:], window=window)[0])
        read = 2 * batch * 8 * min(used, window or used) * 64 * 2
        yield from measure(f"step {batch} rows at {used}", forms, sets, expected, read)


def _plain_step(qkv, cos, sin, k, v, sinks, pos, k_pos, slot, *, window):
    """Rotate, store, attend; in the dtype of its arguments."""
    turned = reference.turn(qkv[:, :, :-1], cos, sin)
    rows = jnp.arange(pos.size)
    k = k.at[rows, :, slot].set(turned[:, :, -1], mode="drop")
    v = v.at[rows, :, slot].set(qkv[:, :, -1], mode="drop")
    args = (turned[:, None, :, :-1], k, v, sinks, pos[:, None], k_pos)
    return xla.attention(*args, window=window)[:, 0], k, v


def prefill_rows():
    for tokens, window in ((2048, None), (2048, 128), (8192, None), (8192, 128)):
        q, k, v = (
            normal(0, (1, tokens, 8, 8, 64)),
            *(normal(i, (1, 8, tokens, 64)) for i in (1, 2)),
        )
        pos = jnp.arange(tokens, dtype=jnp.int32)[None]
        args = (q, k, v, normal(3, (8, 8), jnp.float32), pos, pos)
        forms = {"xla": functools.partial(xla.attention, window=window)}
        for queries, keys, warps, stages in (
            (16, 64, 4, 3), (16, 64, 8, 3), (16, 32, 4, 4), (8, 64, 4, 3), (8, 128, 4, 2),
            (32, 64, 8, 3),
        ):  # fmt: skip
            tiles = dict(queries=queries, keys=keys, warps=warps, stages=stages)
            name = f"{queries} tokens {keys} keys {warps} warps {stages} stages"
            forms[name] = functools.partial(prefill.attention, window=window, **tiles)
        exact = (*(x.astype(jnp.float32) for x in args[:4]), pos, pos)
        expected = wide(xla.attention(*exact, window=window))
        seen = min(window or tokens, tokens)
        pairs = seen * (seen + 1) / 2 + (tokens - seen) * seen
        flop = 4 * pairs * 64 * 64
        yield from measure(f"prefill {tokens}, window {window}", forms, [args], expected, 0, flop)


GROUPS = {"linear": linear_rows, "router": router_rows, "step": step_rows, "prefill": prefill_rows}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m gptoss_jax.kernels.bench_dense")
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; none: all")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    parser.add_argument("--rows", help="comma-separated numbers of rows of linear")
    options = parser.parse_args(argv)
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    rows = []
    for group in options.groups or GROUPS:
        few = [int(n) for n in options.rows.split(",")] if options.rows else None
        for row in linear_rows(few) if few and group == "linear" else GROUPS[group]():
            rows.append(row)
            print(
                "  ".join(f"{v:>9}" if k != "form" else f"{v:42}" for k, v in row.items()),
                flush=True,
            )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(header() | {"rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
