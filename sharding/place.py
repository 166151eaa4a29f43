"""Arrays straight from files to the devices that hold them.

A process reads the slices of its own devices and nothing else, so neither a host nor a device ever
holds the whole model. A slice that several of its devices hold (replicas) is read once.
"""

from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from gptoss_jax.kernels.expert_matmul import ExpertWeights
from gptoss_jax.sharding.rules import expert_specs


@runtime_checkable
class Lazy(Protocol):
    """Something with a shape whose elements are read when, and only where, it is indexed."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray: ...


def place(lazy: Lazy, sharding: Sharding, dtype: DTypeLike | None = None) -> jax.Array:
    """A global array of which this process reads `slices_here(lazy.shape, sharding)`.

    Works the same for one process and for many, and without any communication. `dtype` casts on the
    host, slice by slice. Raises ValueError where the sharding does not divide the shape, and
    whatever reading raises: under a mesh of several processes, call it inside `together(mesh)`.
    """
    shape = tuple(lazy.shape)
    parts = []
    for bounds, devices in slices_here(shape, sharding).items():
        part = np.asarray(lazy[tuple(slice(*bound) for bound in bounds)])
        expected = tuple(stop - start for start, stop in bounds)
        if part.shape != expected:
            raise ValueError(f"reading {bounds} of shape {shape} gave {part.shape}.")
        part = part if dtype is None else part.astype(dtype, copy=False)
        parts += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


Bounds = tuple[tuple[int, int], ...]


def slices_here(shape: tuple[int, ...], sharding: Sharding) -> Mapping[Bounds, list[jax.Device]]:
    """Bounds of each different slice held by this process's devices -> the devices that hold it."""
    held: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))
        held.setdefault(bounds, []).append(device)
    return held


def bytes_to_read(shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding) -> int:
    """What `place` reads in this process, in bytes of `dtype`."""
    slices = slices_here(shape, sharding)
    return np.dtype(dtype).itemsize * sum(
        prod(stop - start for start, stop in bounds) for bounds in slices
    )


def relayout(experts: ExpertWeights, layout: str, mesh: Mesh | None = None) -> ExpertWeights:
    """The experts of one layer in another packed layout, each device turning what it holds.

    A shard is a whole layout of its own, so nothing travels. Compiled once for all layers.
    Raises ValueError for layouts that do not turn into each other.
    """
    if layout == experts.layout:
        return experts
    mesh = None if mesh is None or mesh.size == 1 else mesh
    turn = _turning(experts.layout, layout, experts.ffn, mesh)
    return ExpertWeights(layout=layout, **turn(experts.leaves()))


@cache
def _turning(old: str, new: str, ffn: int, mesh: Mesh | None):
    def turn(leaves):
        return ExpertWeights(layout=old, **leaves).to_layout(new).leaves()

    if mesh is not None:
        turn = jax.shard_map(
            turn,
            mesh=mesh,
            in_specs=(expert_specs(old, ffn, mesh),),
            out_specs=expert_specs(new, ffn, mesh),
            check_vma=False,
        )
    return jax.jit(turn)
