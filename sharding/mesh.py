"""Meshes: three axes with fixed names, and what each of them must divide.

    data    copies of the model; rows of a batch
    expert  the experts of a layer, E / expert on each; attention heads may share these devices
    tensor  the heads of attention and the hidden rows of each expert

A mesh is the only thing that turns expert parallelism on. How many processes run, and which of them
this is, is never asked: the same code runs on 8 devices of one process and on 8 processes of one.
"""

from collections.abc import Mapping, Sequence
from math import prod

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "expert", "tensor")


def make_mesh(
    *,
    data: int = 1,
    expert: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh of `data * expert * tensor` devices with axes ("data", "expert", "tensor").

    Takes the first devices of `devices`, or of `jax.devices()`; `tensor` neighbours are next to
    each other in that order, then `expert`, so that the axes that talk most stay on one host.
    With several processes the sizes must use every device, or `devices` must be given: otherwise
    some processes would own no part of the mesh and their first computation would fail far from
    here.

    Raises ValueError for a size below 1, for too few devices, and for the case above.
    """
    sizes = {"data": data, "expert": expert, "tensor": tensor}
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
            raise ValueError(
                f"mesh axis {name} must be a whole number of at least 1; got {size!r}."
            )
    chosen = list(jax.devices() if devices is None else devices)
    count = prod(sizes.values())
    named = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if count > len(chosen):
        kinds = sorted({device.platform for device in chosen})
        hint = (
            f" With XLA_FLAGS=--xla_force_host_platform_device_count={count} a CPU stands for them."
            if kinds == ["cpu"]
            else ""
        )
        raise ValueError(
            f"a mesh of {named} needs {count} devices; this has {len(chosen)} "
            f"({', '.join(kinds)}).{hint}"
        )
    if devices is None and count != len(chosen) and jax.process_count() > 1:
        raise ValueError(
            f"a mesh of {named} uses {count} of the {len(chosen)} devices of {jax.process_count()} "
            "processes. Choose sizes whose product is the number of devices, or pass devices= "
            "(devices=jax.local_devices() gives every process a model of its own)."
        )
    grid = np.array(chosen[:count], dtype=object).reshape(tuple(sizes.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def parse_mesh(text: str) -> dict[str, int]:
    """`"data=2,expert=4"` -> `{"data": 2, "expert": 4}`, the keywords of `make_mesh`.

    Raises ValueError for an unknown axis, a repeated one, or a size that is not a whole number.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES or not equals or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"mesh {text!r}: {part!r} is not one of {', '.join(f'{axis}=N' for axis in AXES)} "
                "with N at least 1."
            )
        if name in sizes:
            raise ValueError(f"mesh {text!r} gives {name} twice.")
        sizes[name] = int(size)
    return sizes


def axis_sizes(mesh) -> dict[str, int]:
    """Sizes by name, in the order of `AXES`, of a Mesh or an AbstractMesh.

    Raises ValueError if the mesh's axes are not exactly those of `make_mesh`.
    """
    if tuple(mesh.axis_names) != AXES:
        raise ValueError(
            f"a mesh here has the axes {AXES} in that order; got {tuple(mesh.axis_names)}. "
            "Use gptoss_jax.make_mesh."
        )
    return {name: int(mesh.shape[name]) for name in AXES}


def is_shared(mesh: Mesh | None) -> bool:
    """Whether devices of more than one process are in the mesh."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


def check_mesh(config, mesh) -> None:
    """Raises one ValueError naming every size of the model that the mesh cannot divide.

    `config` has `experts`, `kv_heads` and `ffn` (a `Config` does); all but these may be anything.
    The hidden width F is not among the refusals: where `tensor` does not divide its blocks of 32,
    experts stay whole on every device of `tensor` (see `rules.ffn_axis`).
    """
    sizes = axis_sizes(mesh)
    problems = [
        f"{name}={sizes[name]} does not divide the {total} {what} "
        f"(it must be one of {_divisors(total)})"
        for name, total, what in (
            ("expert", config.experts, "experts"),
            ("tensor", config.kv_heads, "key/value heads"),
        )
        if total % sizes[name]
    ]
    if problems:
        raise ValueError(f"mesh {_named(sizes)} does not fit this model: {'; '.join(problems)}.")


def _divisors(total: int) -> list[int]:
    return [size for size in range(1, total + 1) if total % size == 0]


def _named(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())
