"""What looks at what."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from .. import rope
from ..config import Config
from ..kernels.attention.reference import visible
from ..layers import einsum
from ..model import GptOss, counted
from . import style


def attention_weights(
    model: GptOss, tokens: Sequence[int], layer: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of one layer and one sequence: float32 weights [K, G, T, S] and the sinks' share [K, G, T].

    Row t sums, with its sink's share, to 1. Worked out from the layer's input in float32, by the
    definition: kernels never hold these numbers. Raises ValueError for a layer that is not there.
    """
    config = model.config
    if not 0 <= layer < config.layers:
        raise ValueError(f"layer must lie in 0..{config.layers - 1}; got {layer}.")
    ids_BT = jnp.asarray([list(tokens)], jnp.int32)
    block = model.blocks[layer]
    if layer:
        x_BTD = jnp.asarray(model.trace(ids_BT)["after"][layer - 1])
    else:
        x_BTD = model.embed.weight_VD[...][ids_BT]
    x_BTD = block.attn_norm(x_BTD)
    bias_KMH = block.attn.qkv_bias_KMH[...].astype(jnp.float32)
    qkv_BTKMH = einsum("BTD,KMHD->BTKMH", x_BTD, block.attn.qkv_KMHD[...]) + bias_KMH
    positions_BT = counted(ids_BT)
    turned = rope.rotate(qkv_BTKMH[:, :, :, :-1], *rope.table(config, positions_BT))
    q_BTKGH, k_BSKH = turned[:, :, :, :-1], turned[:, :, :, -1]
    logits_KGTS = einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH)[0] * config.head_width**-0.5
    seen_TS = visible(positions_BT, positions_BT, config.window_of(layer))[0]
    logits_KGTS = np.where(seen_TS, np.asarray(logits_KGTS), -np.inf)
    sink_KG11 = np.asarray(block.attn.sinks_KG[...])[:, :, None, None]
    top_KGT1 = np.maximum(logits_KGTS.max(axis=-1, keepdims=True), sink_KG11)
    exps_KGTS, sink_KGT1 = np.exp(logits_KGTS - top_KGT1), np.exp(sink_KG11 - top_KGT1)
    total_KGT1 = exps_KGTS.sum(axis=-1, keepdims=True) + sink_KGT1
    return exps_KGTS / total_KGT1, (sink_KGT1 / total_KGT1)[..., 0]


def attention_map(
    weights_KGTS, sink_KGT, *, tokens: Sequence[str] | None = None, title: str = "attention"
) -> Figure:
    """One image a query head; the first column of each, set apart, is the sink.

    Arguments as from `attention_weights`. tokens: the texts, shown where they are few enough.
    """
    weights, sink = np.asarray(weights_KGTS), np.asarray(sink_KGT)
    K, G, T, S = weights.shape
    where = (-2.5, S - 0.5, T - 0.5, -0.5)  # the sink at -2, so that ticks count key positions
    figure = style.figure(1.5 + 2.6 * G, 0.6 + 2.4 * K)
    grid = figure.subplots(K, G, squeeze=False, sharex=True, sharey=True)
    for (k, g), axes in np.ndenumerate(grid):
        gap = np.full((T, 1), np.nan)
        table = np.concatenate([sink[k, g, :, None], gap, weights[k, g]], axis=1)
        # By square root, or the small weights of long rows could not be seen.
        head = f"kv head {k}, query {g}"
        image = style.heat(axes, np.sqrt(table), title=head, vmin=0, vmax=1, extent=where)
        names = None if tokens is None else ["sink", "", *tokens]
        style.name_ticks(axes.xaxis, names, -2, fontsize=5, rotation=90)
        style.name_ticks(axes.yaxis, tokens, fontsize=5)
    figure.supxlabel("key position (the sink at -2)", fontsize="medium")
    figure.supylabel("query position", fontsize="medium")
    figure.suptitle(title)
    bar = figure.colorbar(image, ax=grid, label="weight (a row sums to 1)")
    bar.set_ticks(np.sqrt([0, 0.05, 0.25, 0.5, 1]), labels=["0", ".05", ".25", ".5", "1"])
    return figure


def frequencies(config: Config) -> Figure:
    """Positions for one turn of each rotary channel, plain and stretched by YaRN."""
    half = np.arange(config.head_width // 2)
    plain = 2 * np.pi * config.rope_theta ** (half / len(half))
    turned = 2 * np.pi / rope.inverse_frequencies(config)
    figure = style.figure(6, 3.5)
    axes = figure.subplots()
    axes.plot(half, plain, "o-", color=style.COLOURS[1], label="plain", markersize=3)
    axes.plot(half, turned, "s-", color=style.OURS, label="YaRN", markersize=3)
    for length, name in (
        (config.rope_original_context, "context before stretching"),
        (config.max_context, "context"),
    ):
        axes.axhline(length, color="0.5", linestyle=":", linewidth=1)
        axes.annotate(f"{name}, {length}", (0, length), fontsize="small", va="bottom")
    axes.set(yscale="log", xlabel="channel", ylabel="positions for one turn")
    axes.legend(loc="lower right")
    return figure
