"""Plans of the expert kernels worth trying, and which of them is the fastest that is right.

    build   every shape's candidates are compiled side by side, the most promising first
    time    alone, one after another: each kernel by itself, by the profiler
    choose  gate_up and down from the candidates that agree on everything else

A run is given its seconds: what has not begun to compile when a part of them is over is left out.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable

from . import shapes
from .expert_matmul import triton
from .expert_matmul.grouped import Shape
from .expert_matmul.triton import Plan, summing

BUILD, TIME = 0.45, 0.7  # of the seconds: when no more is built, and no more is timed


def candidates(problem: shapes.Experts, device_kind: str, layout: str = "triton") -> list[Plan]:
    """The heuristic's plan, then others, the most promising first.

    What decides is bytes under way and warps that decode: about 32 KB and 12 warps a processor
    keep an H200 reading; more than 7 programs of 4 warps and 71 registers do not fit.
    """
    tokens, chosen = problem.tokens, problem.chosen
    first = triton.heuristic(tokens, chosen, problem.experts, device_kind, layout)
    mean = tokens * chosen / problem.experts
    if layout == "mosaic":
        return list(dict.fromkeys([first, *_of_fragments(tokens, chosen, mean)]))
    if tokens <= 4:
        found = [first, *_of_a_row(chosen)]
        if tokens > 1:
            found.append(Plan(rows=8, direct=False, gate_up=Shape(), down=Shape()))
    elif mean <= 4:
        found = [first, *_tiles((8,), FEW)]
    elif mean <= 32:
        found = [first, *_tiles((32, 16) if mean > 8 else (16, 8), FEW)]
    else:
        found = [first, *_many()]
    return list(dict.fromkeys(found))


def _of_fragments(tokens: int, chosen: int, mean: float) -> list[Plan]:
    found = []
    if tokens <= 4:
        usual = summing(chosen, cols=8)
        gate_up = (
            Shape(cols=32, parts=4, groups=8, warps=8, stages=2),
            Shape(cols=16, parts=4, groups=4, stages=4),
            Shape(cols=32, parts=4, groups=2, warps=8, stages=4),
            Shape(cols=32, parts=4, groups=4, warps=4),
            Shape(cols=64, parts=2, groups=4, warps=8),
            Shape(cols=32, parts=2, groups=8),
        )
        down = (
            dataclasses.replace(usual, groups=8, stages=2),
            dataclasses.replace(usual, groups=4, stages=4),
            dataclasses.replace(usual, cols=16),
            dataclasses.replace(usual, warps=max(1, usual.warps // 2)),
            dataclasses.replace(usual, groups=8, stages=4),
            dataclasses.replace(usual, groups=4, stages=3),
        )
        for g, d in zip(gate_up, down, strict=True):
            found.append(Plan(rows=8, direct=True, gate_up=g, down=d, order="fragment"))
        if tokens <= 2:
            return found
    few = (
        Shape(groups=8),
        Shape(groups=8, stages=2),
        Shape(groups=4, stages=4),
        Shape(groups=8, cols=32, warps=2),
        Shape(groups=4, stages=3),
    )
    for rows in (8,) if mean <= 4 else (16, 8) if mean <= 8 else (32, 16, 64):
        found += [Plan(rows=rows, direct=False, gate_up=s, down=s, order="fragment") for s in few]
    return found


def _of_a_row(chosen: int) -> list[Plan]:
    gate_up = (
        Shape(cols=32, parts=4, warps=8),  # 360 programs of 8 warps
        Shape(cols=16, parts=4, stages=2),  # 24 KB, so that all 720 are there at once
        Shape(cols=16, parts=4, warps=2),  # 32 rows a warp: 2.7 instructions a weight, not 2.95
        Shape(cols=32, parts=2),
        Shape(cols=16, parts=4, groups=4, lanes=8),
        Shape(cols=64),  # 180 programs
    )
    usual = summing(chosen)
    down = (
        dataclasses.replace(usual, stages=4),
        dataclasses.replace(usual, warps=max(1, usual.warps // 2)),
        dataclasses.replace(usual, groups=4, lanes=8, stages=5),
        dataclasses.replace(usual, parts=2 * usual.parts, warps=2 * usual.warps),
        dataclasses.replace(usual, parts=1, warps=max(1, usual.warps // usual.parts), stages=5),
        dataclasses.replace(usual, groups=4, lanes=8, stages=4, warps=max(1, usual.warps // 2)),
    )
    pairs = zip(gate_up, down, strict=True)
    return [Plan(rows=8, direct=True, gate_up=g, down=d) for g, d in pairs]


# Of a tile of few rows; 49, 24, 28, 28 and 42 KB of shared memory in the first five.
FEW = (
    Shape(groups=8, lanes=4, stages=3),
    Shape(groups=8, lanes=4, stages=2),
    Shape(groups=4, lanes=8, stages=3),
    Shape(groups=4, lanes=4, stages=3),
    Shape(groups=4, lanes=8, stages=4),
    Shape(groups=8, lanes=4, stages=3, cols=128),
)


def _tiles(rows: tuple[int, ...], few: tuple[Shape, ...]) -> list[Plan]:
    return [Plan(rows=r, direct=False, gate_up=s, down=s) for s in few for r in rows]


def _many() -> list[Plan]:
    found = []
    for rows, cols, warps, groups, stages, order in (
        (128, 128, 8, 4, 3, "chunked"),
        (64, 64, 4, 2, 3, "joined"),
        (128, 128, 8, 2, 4, "joined"),
        (64, 64, 4, 4, 2, "joined"),
        (64, 128, 8, 4, 3, "chunked"),
        (128, 64, 4, 2, 3, "joined"),
        (64, 64, 4, 2, 4, "chunked"),
    ):
        shape = Shape(cols=cols, warps=warps, groups=groups, lanes=8, stages=stages)
        found.append(Plan(rows=rows, direct=False, gate_up=shape, down=shape, order=order))
    return found


@dataclasses.dataclass(frozen=True)
class Timed:
    """One candidate as it was measured; kernels: us of one layer by part, see `parts_of`."""

    plan: Plan
    kernels: dict[str, float]
    error: float  # relative, of one row against float64

    @property
    def us(self) -> float:
        return sum(self.kernels.values())


def parts_of(kernels: list[dict]) -> dict[str, float]:
    """us by gate_up, down and rest, of what `profile.kernel_times` found."""
    found = {"gate_up": 0.0, "down": 0.0, "rest": 0.0}
    for kernel in kernels:
        part = next((p for p in ("gate_up", "down") if f"experts_{p}" in kernel["name"]), "rest")
        found[part] += kernel["us"]
    return found


def choose(timed: list[Timed], most_error: float) -> Plan | None:
    """The fastest whole made of gate_up of one and down of another right candidate, or None."""
    right = [t for t in timed if t.error < most_error]  # NaN is not
    families: dict[tuple, list[Timed]] = {}
    for t in right:
        key = (t.plan.rows, t.plan.direct, t.plan.order, t.plan.partial)
        families.setdefault(key, []).append(t)
    best = None
    for family in families.values():
        gate_up = min(family, key=lambda t: t.kernels.get("gate_up", t.us))
        down = min(family, key=lambda t: t.kernels.get("down", t.us))
        rest = min(sum(us for p, us in t.kernels.items() if p[0] not in "gd") for t in family)
        us = rest + gate_up.kernels.get("gate_up", 0) + down.kernels.get("down", 0)
        if best is None or us < best[0]:
            best = us, dataclasses.replace(gate_up.plan, down=down.plan.down)
    return best and best[1]


def explore(
    problems: list[shapes.Experts],
    device_kind: str,
    build: Callable,
    measure: Callable,
    *,
    seconds: float,
    most: int,
    most_error: float,
    layout: str = "triton",
    threads: int = 16,
) -> dict[shapes.Experts, Plan]:
    """The plan chosen for each problem; none where no candidate was right.

    build(problem, plan) compiles, and may raise; measure(problem, program) gives (kernels, error).
    most: candidates a problem.
    """
    begun = time.monotonic()
    plans = {problem: candidates(problem, device_kind, layout)[:most] for problem in problems}
    tasks = [(p, plans[p][i]) for i in range(most) for p in problems if i < len(plans[p])]

    def compiled(task):
        if time.monotonic() - begun > BUILD * seconds:
            return TimeoutError("left out")
        try:
            return build(*task)
        except Exception as error:  # too much shared memory, or a shape the compiler refuses
            return error

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        programs = dict(zip(tasks, pool.map(compiled, tasks), strict=True))
    print(f"built {len(tasks)} in {time.monotonic() - begun:.0f} s", flush=True)
    found: dict[shapes.Experts, list[Timed]] = {}
    for (problem, plan), program in programs.items():
        late = time.monotonic() - begun > TIME * seconds
        if late or isinstance(program, Exception):
            print(f"  {problem.name}: {plan}: {'late' if late else repr(program)[:300]}")
            continue
        try:
            kernels, error = measure(problem, program)
        except Exception as error:  # the others are still to be timed
            print(f"  {problem.name}: {plan}: {error!r:.300}")
            continue
        timed = Timed(plan, kernels, error)
        found.setdefault(problem, []).append(timed)
        by_part = ", ".join(f"{part} {us:.1f}" for part, us in kernels.items())
        print(f"  {problem.name}: {timed.us:.1f} us ({by_part}), {error:.1e}: {plan}", flush=True)
    chosen = {problem: choose(timed, most_error) for problem, timed in found.items()}
    return {problem: plan for problem, plan in chosen.items() if plan is not None}
