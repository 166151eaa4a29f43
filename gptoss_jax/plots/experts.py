"""Where tokens go."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from jax.sharding import Mesh
from matplotlib.figure import Figure

from .. import sharding
from . import style


def expert_load(ids, experts: int, mesh: Mesh | None = None) -> Figure:
    """`sharding.draw_load` in colours that everybody can tell apart: tokens of each expert.

    ids: the router's choices, any shape; those outside [0, experts) are nobody's.
    """
    colours = matplotlib.cycler(color=style.COLOURS[1:])
    with matplotlib.rc_context({"axes.prop_cycle": colours}):
        figure = sharding.draw_load(ids, experts, mesh)
    (axes,) = figure.axes
    if axes.get_legend() is not None:  # beside the bars: with few experts it would hide them
        axes.get_legend().remove()
        figure.set_figwidth(figure.get_figwidth() + 2)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    return figure


def routing(
    ids_TX, weights_TX, experts: int, *, tokens: Sequence[str] | None = None, title: str = "routing"
) -> Figure:
    """A row for each token, a column for each expert; the colour is the expert's weight.

    ids, weights: of one layer, [T, X]. tokens: the T texts, shown where they are few enough.
    Raises ValueError where the shapes differ.
    """
    ids, weights = np.asarray(ids_TX), np.asarray(weights_TX, np.float64)
    if ids.ndim != 2 or ids.shape != weights.shape:
        raise ValueError(f"ids and weights are both [T, X]; got {ids.shape}, {weights.shape}.")
    table = np.full((len(ids), experts), np.nan)  # not chosen is not the same as weight 0
    here = (ids >= 0) & (ids < experts)
    rows = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
    table[rows[here], ids[here]] = weights[here]
    figure = style.figure(2.5 + 0.25 * experts, 1.2 + 0.17 * len(ids))
    axes = figure.subplots()
    image = style.heat(axes, table, title=title, vmin=0, vmax=1)
    axes.set(xlabel="expert", ylabel="token")
    style.name_ticks(axes.yaxis, tokens, fontsize="small")
    figure.colorbar(image, label="weight (a row sums to 1)")
    return figure


def exchanged(ids_NX, experts: int, mesh: Mesh) -> np.ndarray:
    """Rows that device i sends to device j of `expert` in one all_to_all: [expert, expert].

    Tokens are dealt out over data and expert in order; a token goes once to each device that holds
    any of its experts, to its own for free. Summed over data.
    """
    ids = np.asarray(ids_NX)
    sizes = sharding.axis_sizes(mesh)
    ranks = sizes["expert"]
    sources = sizes["data"] * ranks
    each = -(-len(ids) // sources)
    holder = np.where((ids >= 0) & (ids < experts), ids // (experts // ranks), -1)
    sent = np.zeros((ranks, ranks), int)
    for j in range(ranks):
        tokens = np.flatnonzero((holder == j).any(axis=1))
        np.add.at(sent[:, j], tokens // each % ranks, 1)
    return sent


def exchange(ids_NX, experts: int, mesh: Mesh) -> Figure:
    """`exchanged` as a heat map with the numbers written in."""
    sent = exchanged(ids_NX, experts, mesh)
    figure = style.figure(2 + 0.5 * len(sent), 1 + 0.45 * len(sent))
    axes = figure.subplots()
    image = style.heat(axes, sent, title="rows sent, one way", vmin=0)
    for (i, j), rows in np.ndenumerate(sent):
        dark = rows < sent.max() / 2
        axes.text(j, i, str(rows), ha="center", va="center", color="white" if dark else "black")
    axes.set(xlabel="to device", ylabel="from device")
    figure.colorbar(image, label="rows")
    return figure
