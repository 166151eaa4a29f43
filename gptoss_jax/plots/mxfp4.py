"""What four bits a weight mean."""

from collections.abc import Mapping
from math import prod

import numpy as np
from matplotlib.figure import Figure

from .. import sharding
from ..config import Config
from ..kernels.mxfp4 import BLOCK, MAGNITUDES, decode, encode
from . import style

_FLOAT32 = ("scale_D", "sinks_KG", "router_bias_E")


def code_book(blocks, scales, *, title: str = "MXFP4") -> Figure:
    """How often weights use each of the 16 codes, and each power of two as their scale.

    blocks uint8 [..., 16], scales uint8 [...]: as in checkpoints.
    """
    blocks, scales = np.asarray(blocks), np.asarray(scales)
    codes = np.bincount(np.stack([blocks & 15, blocks >> 4]).reshape(-1), minlength=16)
    values = [*(-m for m in reversed(MAGNITUDES)), *MAGNITUDES]
    shares = 100 * np.concatenate([codes[15:7:-1], codes[:8]]) / codes.sum()
    figure = style.figure(9, 3.2)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    left.bar(range(16), shares, color=[style.LIMIT] * 8 + [style.OURS] * 8)
    left.set_xticks(range(16), [f"{v:g}" for v in values], rotation=60)
    left.set(xlabel="value of the code, in scales", ylabel="share of the weights (%)", title=title)
    powers, counts = np.unique(scales.astype(int) - 127, return_counts=True)
    right.bar(powers, 100 * counts / counts.sum(), color=style.COLOURS[3])
    right.xaxis.get_major_locator().set_params(integer=True)
    right.set(xlabel="scale, power of two", ylabel="share of the blocks (%)", title="scales")
    return figure


def rounding_stairs() -> Figure:
    """What MXFP4 makes of the numbers from -8 to 8 in a block whose largest is 6 (scale 1)."""
    x = np.linspace(-8, 8, 1601, dtype=np.float32)
    # One number a block, beside a 6 that keeps the scale at 1 (a larger number clips at 6).
    block = np.zeros((len(x), BLOCK), np.float32)
    block[:, 0], block[:, 1] = np.clip(x, -7.99, 7.99), 6
    y = np.asarray(decode(*encode(block), np.float32))[:, 0]
    figure = style.figure(5, 4)
    axes = figure.subplots()
    axes.plot(x, x, color="0.6", linestyle=":", label="exact")
    axes.step(x, y, where="mid", color=style.OURS, label="MXFP4")
    axes.set(xlabel="weight, in scales", ylabel="stored value, in scales")
    axes.legend()
    return figure


def parameter_bytes(config: Config, *, packed: bool) -> dict[str, int]:
    """Bytes of "experts" and "rest", dense weights in bfloat16; packed: experts in MXFP4."""
    total = {"experts": 0, "rest": 0}
    shapes = sharding.parameter_shapes(config, "checkpoint" if packed else "dense")
    for name, shape in shapes.items():
        width = 4 if name.endswith(_FLOAT32) else 1 if name.endswith(("blocks", "scales")) else 2
        copies = config.layers if ".N." in name else 1
        total["experts" if ".experts." in name else "rest"] += copies * width * prod(shape)
    return total


def memory(configs: Mapping[str, Config], *, limit_gb: int | float | None = None) -> Figure:
    """Stacked bars of `parameter_bytes`, packed beside bfloat16, for each named model.

    limit_gb: a line, such as the memory of one GPU (in 10^9 bytes).
    """
    bars = {
        f"{name}\n{how}": parameter_bytes(config, packed=packed)
        for name, config in configs.items()
        for how, packed in (("MXFP4", True), ("bfloat16", False))
    }
    figure = style.figure(2 + 1.1 * len(bars), 3.5)
    axes = figure.subplots()
    base = np.zeros(len(bars))
    for kind, colour in (("rest", style.COLOURS[2]), ("experts", style.OURS)):
        height = np.array([sizes[kind] / 1e9 for sizes in bars.values()])
        axes.bar(list(bars), height, bottom=base, color=colour, label=kind)
        base += height
    for at, top in enumerate(base):
        axes.annotate(f"{top:.3g}", (at, top), ha="center", va="bottom")
    if limit_gb is not None:
        axes.axhline(limit_gb, color=style.LIMIT, linestyle="--", label=f"{limit_gb:g} GB")
    axes.set(ylabel="parameters (GB)")
    axes.margins(y=0.12)
    axes.legend()
    return figure
