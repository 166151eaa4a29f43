"""What was measured: differences, times, losses."""

import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from .. import kernels
from . import style


class Timing(NamedTuple):
    """One measurement and the least time that memory and tensor cores would allow."""

    name: str
    ms: float
    floor_ms: float


def parity_by_layer(report) -> Figure:
    """Largest and mean difference of each layer's activations from PyTorch's, longest sequence.

    report: of `gptoss_jax.parity.parity`. In units of the reference's standard deviation.
    """
    longest = max(report.lengths, key=lambda one: one.length)
    figure = style.figure(7, 3.5)
    axes = figure.subplots()
    steps = [d for layer in longest.layers for d in (layer.attention, layer.experts)]
    steps.append(longest.logits)
    at = np.arange(len(steps))
    for name, mark, colour in (("max", "o", style.LIMIT), ("mean", "s", style.OURS)):
        values = [getattr(d, name) / d.spread for d in steps]
        axes.plot(at, values, mark + "-", color=colour, label=name, markersize=4)
    names = [f"{layer.layer} {part}" for layer in longest.layers for part in ("attn", "moe")]
    axes.set_xticks(at, [*names, "logits"], rotation=60, fontsize="small")
    axes.set(yscale="log", xlabel="after", ylabel="difference (standard deviations)")
    axes.set_title(f"{longest.length} tokens in {report.dtype}, {report.reference}")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    return figure


def recorded(device: str = "nvidia_h200") -> tuple[list[Timing], dict[str, str]]:
    """Times of one layer's experts as `kernels.bench --json` had them, and where they come from.

    Raises ValueError for a device of which nothing is recorded.
    """
    folder = pathlib.Path(kernels.__file__).parent / "tuned"
    file = folder / f"{device}_experts.json"
    if not file.is_file():
        known = sorted(p.stem.removesuffix("_experts") for p in folder.glob("*_experts.json"))
        raise ValueError(f"nothing is recorded of {device!r}; there are {known}.")
    table = json.loads(file.read_text("utf-8"))
    timings = [
        Timing(row["shape"].replace("/", "\n") + " tokens", row["us"] / 1e3, row["floor_us"] / 1e3)
        for row in table["rows"]
    ]
    return timings, {key: table[key] for key in ("device", "jax", "date", "commit")}


def speed(timings: Sequence[Timing], *, title: str = "speed") -> Figure:
    """A bar for each time, its floor as a line in it, and the share of the floor above it."""
    if not timings:
        raise ValueError("there are no timings to draw.")
    figure = style.figure(1.8 + 1.0 * len(timings), 3.6)
    axes = figure.subplots()
    at = np.arange(len(timings))
    axes.bar(at, [t.ms for t in timings], color=style.OURS, label="measured")
    floors = [t.floor_ms for t in timings]
    axes.hlines(floors, at - 0.45, at + 0.45, color=style.LIMIT, linewidth=3, label="floor")
    for x, t in zip(at, timings, strict=True):
        axes.annotate(f"{t.floor_ms / t.ms:.0%}", (x, t.ms), ha="center", va="bottom")
    axes.set_xticks(at, [t.name for t in timings], fontsize="small")
    axes.set(yscale="log", ylabel="time (ms)", title=title)
    axes.margins(y=0.15)
    axes.legend()
    return figure


def loss_curve(metrics: str | pathlib.Path) -> Figure | None:
    """Of a run's metrics.jsonl: `train.picture.losses`. None while no step is written."""
    from ..train import picture  # training needs Orbax, which takes seconds to import

    return picture.losses(metrics)
