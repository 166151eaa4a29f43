"""How fast the whole model runs, beside how fast the memory and the tensor cores would let it.

    decode    the compiled loop of `generate`, greedy, from a cache that holds `context` positions
    prefill   one prompt of `context` tokens through the compiled chunks, cache included

Published sizes get random weights of the exact shapes, made on the device: no download is needed.
"""

import dataclasses
import datetime
import functools
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from . import buckets
from .cache import Cache
from .checkpoint.turn import layout_on
from .config import Config
from .decode import RUNNING, Request, Rows, decode, programs
from .floors import decode_floor_ms, prefill_floor_ms
from .kernels import shapes
from .kernels.bench import random_experts
from .kernels.bench_dense import ALONE
from .kernels.profile import kernel_times
from .model import GptOss
from .sampling import Sampler, seed_words
from .sharding import Rules, parameter_sharding

STEPS = 32  # of one decode call, as `stream` makes them
ROUNDS = 3


class Cell(NamedTuple):
    """One measurement: "prefill" (of one row) or "decode"."""

    what: str
    batch: int
    context: int


@dataclasses.dataclass(frozen=True)
class Report:
    """What was measured, where, and one dict a measurement."""

    header: dict
    rows: list[dict]

    def to_json(self) -> dict:
        return self.header | {"rows": self.rows}

    def __str__(self) -> str:
        h = self.header
        lines = [
            f"{h['model']} on {h['device']}, jax {h['jax']}, {h['date']}"
            + (f", commit {h['commit']}" if h["commit"] else ""),
            f"parameters {h['parameters_gb']} GB, ready in {h['ready_s']} s"
            + f", compiled in {h['compile_s']} s"
            + (f", peak {h['peak_gb']} GB" if h["peak_gb"] else ""),
            "floors are those of one H200, on whatever device this is",
            f"{'':8} {'batch':>5} {'context':>7} {'tok/s':>9} {'ms':>9} {'floor ms':>9} {'%':>5}",
        ]
        return "\n".join(lines + [line(row) for row in self.rows])


def line(row: dict) -> str:
    """One row of a report's table."""
    return (
        f"{row['what']:8} {row['batch']:5} {row['context']:7} {row['tokens_per_s']:9.1f}"
        f" {row['ms']:9.3f} {row['floor_ms']:9.3f} {row['floor_percent']:5.1f}"
        + (f"   first token {row['first_token_ms']:.1f} ms" if "first_token_ms" in row else "")
    )


def run(
    model: str = "tiny",
    *,
    batches: list[int] = (1,),
    contexts: list[int] = (1024,),
    cells: list[Cell] | None = None,
    plot: str | None = None,
    mesh: Mesh | None = None,
    kernels: Collection[Cell] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Measures every pair of batch and context, and prefill once a context.

    model: "tiny", "20b" or "120b" (random weights, packed experts), else what `load` takes.
    cells: measure these instead of the pairs.
    plot: file for a picture of speed against the floor. mesh: over which the model lies.
    kernels: decode cells to whose row is added what a step launches (a compilation more for each).
    progress: gets a line of text as each thing is done.
    Floors are those of one H200 whatever the device, so that reports can be compared.

    Raises ValueError for contexts that the model was not made for.
    """
    if cells is None:
        cells = [Cell("prefill", 1, context) for context in contexts]
        cells += [Cell("decode", batch, context) for context in contexts for batch in batches]
    start = time.perf_counter()
    known = {"20b": Config.gpt_oss_20b, "120b": Config.gpt_oss_120b}
    if model in known:
        made = random_model(known[model](), mesh=mesh)
    else:
        from .checkpoint import load

        made = load(model, mesh=mesh)
    longest = made.config.max_context - (ROUNDS + 1) * STEPS
    for cell in cells:
        if not 1 <= cell.context <= longest:
            raise ValueError(f"context must lie in 1..{longest}; got {cell.context}.")
    timed = Timed(made)
    jax.block_until_ready(timed.leaves)
    ready = time.perf_counter() - start
    progress(f"{model} ready in {ready:.1f} s; compiling for {len(cells)} measurements")
    compiled = timed.compile(cells)
    progress(f"compiled in {compiled:.1f} s")
    rows = []
    for cell in cells:
        rows.append(timed.measure(cell))
        progress(line(rows[-1]))
        if cell in kernels:
            rows[-1]["kernels"] = timed.kernels(cell.batch, cell.context)
    report = Report(_header(model, timed, ready, compiled), rows)
    if plot is not None:
        draw(report, plot)
    return report


def random_model(config: Config, *, backend: str | None = None, mesh: Mesh | None = None) -> GptOss:
    """bfloat16, packed experts in the layout that the backend reads, one layer at a time."""
    model = nnx.eval_shape(
        lambda: GptOss(
            config,
            rngs=nnx.Rngs(0),
            dtype=jnp.bfloat16,
            experts="packed",
            backend=backend,
            mesh=mesh,
        )
    )
    layout = layout_on(mesh, backend)
    problem = shapes.Experts(
        model="", tokens=1, embed=config.embed, ffn=config.ffn, experts=config.experts,
        chosen=config.experts_per_token,
    )  # fmt: skip
    make = jax.jit(lambda key: random_experts(key, problem))
    turn = jax.jit(lambda experts: experts.to_layout(layout), donate_argnums=0)
    for i, block in enumerate(model.blocks):
        experts = turn(make(jax.random.key(i)))
        if mesh is not None:
            path = f"blocks.{i}.moe.experts"
            placed = {
                name: jax.device_put(
                    leaf, parameter_sharding(f"{path}.{name}", config, mesh, layout)
                )
                for name, leaf in experts.leaves().items()
            }
            experts = dataclasses.replace(experts, **placed)
        block.moe.experts.replace(experts)

    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    filled = []
    for i, (path, variable) in enumerate(state):
        leaf = variable.get_value()
        if not isinstance(leaf, jax.Array):
            leaf = _random(jax.random.key(1000 + i), str(path[-1]), leaf.shape, leaf.dtype)
            if mesh is not None:
                name = ".".join(map(str, path))
                leaf = jax.device_put(leaf, parameter_sharding(name, config, mesh, layout))
        filled.append((path, variable.replace(leaf)))
    nnx.update(model, nnx.from_flat_state(filled))
    return model


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random(key, name: str, shape: tuple[int, ...], dtype) -> Array:
    """Weights that keep activations of one size; a norm's scales near one."""
    values = jax.random.normal(key, shape, jnp.float32)
    if name.startswith("scale"):
        return (1 + 0.1 * values).astype(dtype)
    width = np.prod(shape[1:]) if name.startswith("out") else shape[-1]
    return (values * (0.1 if "bias" in name else width**-0.5)).astype(dtype)


class Timed:
    """One model's compiled programs, run for the clock."""

    def __init__(self, model: GptOss, *, first_token: bool = True):
        """first_token: time that behind each prefill too, which compiles one more program."""
        self.first_token = first_token
        self.config, self.dtype, self.mesh = model.config, model.dtype, model.mesh
        self.graph, state = nnx.split(model)
        self.leaves, self.tree = jax.tree.flatten(state)
        self.gpu = next(iter(self.leaves[0].devices())).platform == "gpu"
        self.programs = programs(self.graph, self.tree, model.config, model.mesh, gpu=self.gpu)
        sampler = Sampler(temperature=0.0)
        self.plan, self.knobs = sampler.plan(text_vocab=model.text_vocab), sampler.knobs()
        self._compiled: dict[tuple, Callable] = {}

    def compile(self, cells: list[Cell]) -> float:
        """Compiles what the cells run, in threads; returns the seconds it took.

        XLA compiles one program on one core for the most part: about 16 s for 24 layers.
        Nothing runs meanwhile: two programs with collectives, started by two threads, can wait for
        each other for ever.
        """
        start = time.perf_counter()
        wanted = {key for cell in cells for key in self._keys(cell)}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self._program, wanted))
        return time.perf_counter() - start

    def measure(self, cell: Cell) -> dict:
        """Median milliseconds of a prefill, or of one decode step, beside the floor."""
        call = self.ready(cell)
        ms = _median_ms(call)
        if cell.what == "decode":
            floor = decode_floor_ms(self.config, cell.batch, cell.context)
            return _row(cell, cell.batch, ms / STEPS, floor)
        floor = prefill_floor_ms(self.config, cell.context)
        row = _row(cell, cell.context, ms, floor)
        if not self.first_token:
            return row
        return row | {"first_token_ms": round(_median_ms(self._prefill(cell, first=True)), 2)}

    def ready(self, cell: Cell) -> Callable[[], None]:
        """What is timed, run once already: nothing is left to compile."""
        made = self._decode(cell) if cell.what == "decode" else self._prefill(cell)
        made()
        if cell.what == "prefill" and self.first_token:
            self._prefill(cell, first=True)()
        return made

    def _prefill(self, cell: Cell, *, first: bool = False) -> Callable[[], None]:
        """One prompt into a cache of its own; first: and its first token to the host."""
        context, slots = cell.context, self._slots(cell.context)
        prompt = np.random.default_rng(0).integers(0, self.config.vocab, (1, 2 * context + 64))

        def call():
            cache = self.programs.empty(1, slots, self.dtype)
            for start, size in self._chunks(context):
                part = prompt[:, start : start + size].astype(np.int32)
                length = np.array([context], np.int32)
                prefill = self._program(("prefill", slots, size))
                cache = prefill(self.leaves, cache, part, np.int32(start), length)
            if first:
                np.asarray(self._step(slots, cache, self._rows(1), 1)[2].token_BR)
            else:
                jax.block_until_ready(cache)

        return call

    def _decode(self, cell: Cell) -> Callable[[], None]:
        """STEPS tokens for each row, one call behind the other on the same cache."""
        slots = self._slots(cell.context)
        held = [self._filled(cell.batch, slots, cell.context), self._rows(cell.batch)]

        def call():
            held[0], held[1], drawn = self._step(slots, *held, STEPS)
            np.asarray(drawn.token_BR)

        return call

    def kernels(self, batch: int, context: int) -> list[dict]:
        """What one step of the decoding loop launches, per step: name, us, launches.

        Compiled without CUDA graphs, in which the profiler does not see every kernel.
        """

        def steps(leaves, cache, rows, request, n):
            model = nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))
            room = buckets.room(STEPS)
            return decode(model, cache, rows, request, n, plan=self.plan, room=room)

        run = jax.jit(steps, donate_argnums=1, compiler_options=ALONE if self.gpu else None)
        held = [self._filled(batch, self._slots(context), context), self._rows(batch)]

        def call():
            held[:] = run(self.leaves, *held, self._request(batch), np.int32(8))[:2]
            jax.block_until_ready(held)

        call()
        return kernel_times(call, 8)

    def _keys(self, cell: Cell) -> Iterator[tuple]:
        """The programs that a cell runs: ("decode", slots, batch), ("prefill", slots, tokens)."""
        slots = self._slots(cell.context)
        if cell.what == "decode" or self.first_token:
            yield "decode", slots, cell.batch
        if cell.what == "prefill":
            yield from {("prefill", slots, size) for _, size in self._chunks(cell.context)}

    def _program(self, key: tuple) -> Callable:
        """Compiled on the first call, without a cache at hand."""
        if key not in self._compiled:
            what, slots, n = key
            batch = n if what == "decode" else 1
            cache = self._alike(jax.eval_shape(lambda: self._filled(batch, slots)))
            if what == "prefill":
                tokens_BT, length_B = np.zeros((1, n), np.int32), np.zeros(1, np.int32)
                args = (tokens_BT, np.int32(0), length_B)
                lowered = self.programs.prefill.lower(self.leaves, cache, *self._alike(args))
            else:
                args = self._alike((self._rows(n), self._request(n), np.int32(STEPS)))
                how = self.plan, buckets.room(STEPS)
                lowered = self.programs.decode.lower(self.leaves, cache, *args, *how)
            self._compiled[key] = lowered.compile()
        return self._compiled[key]

    def _lies(self, x) -> NamedSharding | None:
        """Keys and values are cut by rows and heads, everything else is whole."""
        if self.mesh is None:
            return None
        spec = Rules.fit(self.config, self.mesh).spec("batch", "kv_heads", "slots", "head")
        return NamedSharding(self.mesh, spec if np.ndim(x) == 4 else PartitionSpec())

    def _like(self, x) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=self._lies(x))

    def _alike(self, tree):
        return jax.tree.map(self._like, tree)

    def _chunks(self, context: int) -> list[tuple[int, int]]:
        tokens = buckets.TOKENS_ON_GPU if self.gpu else buckets.TOKENS_ELSEWHERE
        return list(buckets.chunks(context, 1, tokens))

    def _filled(self, batch: int, slots: int, context: int = 1) -> Cache:
        cache = filled_cache(self.config, batch, slots, context, self.dtype)
        if self.mesh is None:
            return cache
        return jax.tree.map(lambda x: jax.device_put(x, self._lies(x)), cache)

    def _request(self, batch: int) -> Request:
        return Request(
            seeds_B2=seed_words(range(batch)),
            stops=np.full(buckets.stops(1), -1, np.int32),
            knobs=self.knobs,
        )

    def _slots(self, context: int) -> int:
        return buckets.capacity(context + (ROUNDS + 1) * STEPS, self.config.max_context)

    def _rows(self, batch: int) -> Rows:
        return Rows(
            token_B=np.arange(batch, dtype=np.int32) % self.config.vocab,
            status_B=np.full(batch, RUNNING, np.int32),
            step=np.int32(0),
            seen_BV=None,
        )

    def _step(self, slots: int, cache: Cache, rows: Rows, n: int):
        batch = rows.token_B.shape[0]
        decode = self._program(("decode", slots, batch))
        return decode(self.leaves, cache, rows, self._request(batch), np.int32(n))


def filled_cache(config: Config, batch: int, capacity: int, context: int, dtype) -> Cache:
    """Random keys and values of the positions 0 .. context - 1, where the model keeps them."""

    def kv(seed: int) -> tuple[Array, ...]:
        slots = [config.window_of(i) or capacity for i in range(config.layers)]
        heads, width = config.kv_heads, config.head_width
        return tuple(
            _random(jax.random.key(seed + i), "", (batch, heads, slot, width), dtype)
            for i, slot in enumerate(slots)
        )

    slot = np.arange(capacity)
    ring = np.arange(config.window)
    newest = context - 1 - (context - 1 - ring) % config.window  # negative where it is not full
    full_pos, ring_pos = np.where(slot < context, slot, -1), np.maximum(newest, -1)
    return Cache(
        k=kv(0),
        v=kv(1000),
        full_pos_BS=jnp.asarray(np.tile(full_pos, (batch, 1)), jnp.int32),
        ring_pos_BW=jnp.asarray(np.tile(ring_pos, (batch, 1)), jnp.int32),
        length_B=jnp.full(batch, context, jnp.int32),
    )


def _median_ms(call) -> float:
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e3


def _row(cell: Cell, tokens: int, ms: float, floor_ms: float) -> dict:
    return cell._asdict() | {
        "tokens_per_s": round(tokens / ms * 1e3, 1),
        "ms": round(ms, 4),
        "floor_ms": float(f"{floor_ms:.4g}"),
        "floor_percent": round(100 * floor_ms / ms, 1),
    }


def _header(model: str, timed: Timed, ready_s: float, compile_s: float) -> dict:
    memory = jax.devices()[0].memory_stats() or {}
    peak = memory.get("peak_bytes_in_use")
    return {
        "model": model,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "parameters_gb": round(sum(leaf.nbytes for leaf in timed.leaves) / 1e9, 3),
        "ready_s": round(ready_s, 1),
        "compile_s": round(compile_s, 1),
        "peak_gb": None if peak is None else round(peak / 1e9, 2),
    }


def commit() -> str | None:
    try:
        git = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def draw(report: Report, file: str) -> None:
    """Milliseconds of every measurement as a bar, beside its floor on one H200."""
    from .plots import Timing, speed  # matplotlib, only where a picture is asked for

    timings = [
        Timing(f"{r['what']}\nB={r['batch']}\n{r['context']}", r["ms"], r["floor_ms"])
        for r in report.rows
    ]
    speed(timings, title=str(report).splitlines()[0]).savefig(file)
