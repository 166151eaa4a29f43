"""What lives where: tables to print, pictures to look at."""

import re
from collections.abc import Mapping, Sequence
from math import prod

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from gptoss_jax.kernels.mxfp4 import BLOCK
from gptoss_jax.sharding.mesh import axis_sizes
from gptoss_jax.sharding.rules import (
    PARAMETERS,
    Rules,
    parameter_spec,
)

_FLOAT32 = ("scale_D", "sinks_KG", "router_bias_E")


def describe(model) -> str:
    """A table of the parameters of a model that is loaded: shape, cut, and bytes on each device.

    Layers are alike and shown as one line; the last lines sum up each device.
    """
    rows: dict[str, list] = {}
    held: dict[jax.Device, int] = {}
    for path, array in _arrays(model).items():
        name = re.sub(r"^blocks\.\d+\.", "blocks.N.", path)
        on = _bytes_by_device(array)
        row = rows.setdefault(name, [0, array, 0, on])
        row[0], row[2] = row[0] + 1, row[2] + array.nbytes
        for device, size in on.items():
            held[device] = held.get(device, 0) + size
    table = [("parameter", "copies", "dtype", "shape", "cut over", "bytes", "on a device")]
    for name, (count, array, size, on) in rows.items():
        cut = getattr(array.sharding, "spec", None)
        table.append(
            (
                name,
                f"x{count}",
                str(array.dtype),
                str(tuple(array.shape)),
                _spelled(cut, array.ndim),
                _size(size),
                _size(count * max(on.values(), default=0)),
            )
        )
    lines = _aligned(table)
    lines += [f"{device}: {_size(size)}" for device, size in sorted(held.items(), key=_by_id)]
    return "\n".join(lines)


def layout_table(config, mesh, layout: str = "checkpoint") -> str:
    """The same for a model that is not loaded, on a mesh that need not exist (an AbstractMesh).

    Dense weights are bfloat16. Used for the golden files.
    """
    rules = Rules.fit(config, mesh)
    sizes = axis_sizes(mesh)
    table = [("parameter", "copies", "shape", "cut over", "bytes on a device")]
    total = 0
    for name, shape in parameter_shapes(config, layout).items():
        spec = parameter_spec(name.replace(".N.", ".0."), rules, layout)
        width = 4 if name.endswith(_FLOAT32) else 1 if name.endswith(("blocks", "scales")) else 2
        cut = prod(sizes[axis] for entry in spec if entry for axis in _tuple(entry))
        count = config.layers if ".N." in name else 1
        size = count * prod(shape) * width // cut
        total += size
        table.append((name, f"x{count}", str(shape), _spelled(spec, len(shape)), f"{size:,}"))
    table.append(("on each device", "", "", "", f"{total:,}"))
    return "\n".join(_aligned(table)) + "\n"


def parameter_shapes(config, layout: str = "checkpoint") -> dict[str, tuple[int, ...]]:
    """Path, with N for a block's number -> shape, for experts as published or dense."""
    sizes = {
        "vocab": config.vocab,
        "embed": config.embed,
        "kv_heads": config.kv_heads,
        "q_per_kv": config.q_per_kv,
        "qkv_rows": config.q_per_kv + 2,
        "head": config.head_width,
        "routed": config.experts,
    }
    shapes = {name: tuple(sizes[axis] for axis in axes) for name, axes in PARAMETERS.items()}
    e, p, d, f = config.experts, 2 * config.ffn, config.embed, config.ffn
    experts = {"gate_up_bias": (e, p), "down_bias": (e, d)}
    for leaf, rows, inner in (("gate_up", p, d), ("down", d, f)):
        if layout == "dense":
            experts[leaf] = (e, rows, inner)
        else:
            experts[f"{leaf}_blocks"] = (e, rows, inner // BLOCK, BLOCK // 2)
            experts[f"{leaf}_scales"] = (e, rows, inner // BLOCK)
    return shapes | {f"blocks.N.moe.experts.{leaf}": shape for leaf, shape in experts.items()}


def draw(model, path=None):
    """Stacked bars: GiB of attention, experts and the rest on each device. Returns the figure.

    path: where to save it as well.
    """
    import matplotlib.pyplot as plt

    kinds: dict[str, dict[jax.Device, int]] = {"experts": {}, "attention": {}, "rest": {}}
    for name, array in _arrays(model).items():
        kind = "experts" if ".experts." in name else "attention" if ".attn." in name else "rest"
        for device, size in _bytes_by_device(array).items():
            kinds[kind][device] = kinds[kind].get(device, 0) + size
    devices = sorted(set().union(*kinds.values()), key=lambda device: device.id)
    figure, axes = plt.subplots(figsize=(1.5 + 0.6 * len(devices), 3), layout="constrained")
    base = np.zeros(len(devices))
    for kind, on in kinds.items():
        height = np.array([on.get(device, 0) / 2**30 for device in devices])
        axes.bar([str(device.id) for device in devices], height, bottom=base, label=kind)
        base += height
    axes.set(xlabel="device", ylabel="GiB", title="parameters")
    axes.legend()
    return _finish(figure, path)


def expert_load(ids, experts: int, mesh: Mesh | None = None) -> np.ndarray:
    """Tokens sent to each expert, [shards of expert, experts of one]; ids outside [0, E) are no
    one's.

    ids: the router's choices, any shape.
    """
    ids = np.asarray(ids).reshape(-1)
    ids = ids[(ids >= 0) & (ids < experts)]
    shards = 1 if mesh is None else axis_sizes(mesh)["expert"]
    return np.bincount(ids, minlength=experts).reshape(shards, experts // shards)


def draw_load(ids, experts: int, mesh: Mesh | None = None, path=None):
    """Bars of `expert_load`, one colour for the experts of each device. Returns the figure."""
    import matplotlib.pyplot as plt

    load = expert_load(ids, experts, mesh)
    figure, axes = plt.subplots(figsize=(2 + 0.12 * experts, 3), layout="constrained")
    for shard, counts in enumerate(load):
        at = shard * load.shape[1] + np.arange(load.shape[1])
        axes.bar(at, counts, label=f"expert={shard}: {counts.sum()}")
    axes.axhline(load.mean(), color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="expert", ylabel="tokens", title="load of the experts")
    if len(load) > 1:
        axes.legend(fontsize="small", ncols=2)
    return _finish(figure, path)


def _finish(figure, path):
    import matplotlib.pyplot as plt

    plt.close(figure)  # the caller keeps it; pyplot's own list of open figures would grow
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _arrays(model) -> dict[str, jax.Array]:
    """Dotted path -> array, of an nnx module or of any tree of arrays."""
    tree = nnx.to_pure_dict(nnx.state(model)) if isinstance(model, nnx.Module) else model
    named, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in named}


def _bytes_by_device(array: jax.Array) -> dict[jax.Device, int]:
    """Of every device, those of other processes too."""
    each = prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return dict.fromkeys(array.sharding.device_set, each)


def _spelled(spec: PartitionSpec | None, ndim: int) -> str:
    entries = list(spec or ())
    entries += [None] * (ndim - len(entries))
    return " ".join("." if entry is None else "+".join(_tuple(entry)) for entry in entries)


def _tuple(entry) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _size(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


def _by_id(item: tuple[jax.Device, int]) -> int:
    return item[0].id


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    right: Mapping[int, bool] = {len(widths) - 1: True}
    return [
        "  ".join(
            cell.rjust(width) if right.get(i) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
