"""What all pictures share."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito 2008, "Color Universal Design": black, then seven hues of different lightness.
COLOURS = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
OURS, LIMIT = "#0072B2", "#D55E00"
SCALE = "viridis"  # lightness grows with the value, so it survives print without colour
MOST_LABELS = 48  # words along an axis; with more of them they would overlap


def figure(width: int | float, height: int | float) -> Figure:
    """inches. Not pyplot's: it would keep every figure alive."""
    return Figure(figsize=(width, height), layout="constrained")


def heat(axes: Axes, values, *, title: str, colours: str = SCALE, **limits):
    """An image with one cell a value, row 0 on top."""
    image = axes.imshow(np.asarray(values), cmap=colours, aspect="auto", **limits)
    axes.set_title(title, fontsize="medium")
    return image


def name_ticks(axis, names: Sequence[str] | None, first: int = 0, **text) -> None:
    """Words instead of the numbers first, first + 1, ..., where they fit."""
    if names is not None and len(names) <= MOST_LABELS:
        axis.set_ticks(range(first, first + len(names)), [shown(n) for n in names], **text)


def shown(text: str) -> str:
    """A token as a label: spaces and line ends made visible, dollars kept out of mathtext."""
    return text.replace(" ", "\u00b7").replace("\n", "\u23ce").replace("$", r"\$") or "\u2205"
