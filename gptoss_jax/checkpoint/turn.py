"""Packed experts in the layout that a backend reads."""

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..kernels import device
from ..kernels.expert_matmul import ExpertWeights, layout_for
from ..model import GptOss
from ..sharding import axis_sizes, relayout


def check_backend(
    backend: str | None, dtype: np.dtype, experts: str | None, mesh: Mesh | None
) -> str | None:
    """The backend that was named, or None, which chooses at each call, or "xla" where no kernel
    fits: asked before 13 GB are read.

    Raises NotImplementedError where the named one cannot run: on this device, in this dtype, or
    with dense experts.
    """
    layout = layout_on(mesh, backend)
    if backend is None:
        return None if layout != "checkpoint" and dtype == jnp.bfloat16 else "xla"
    if backend in ("triton", "mosaic") and dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"backend {backend!r} computes in bfloat16, not {dtype}. Use backend='xla'."
        )
    if backend in ("triton", "mosaic") and experts == "dense":
        raise NotImplementedError(
            f"backend {backend!r} reads packed experts, not dense ones. Use backend='xla'."
        )
    return backend


def layout_on(mesh: Mesh | None, backend: str | None, experts: ExpertWeights | None = None) -> str:
    """`layout_for` on a mesh: for its devices, and for experts that its tensor axis may cut."""
    cut = mesh is not None and axis_sizes(mesh)["tensor"] > 1
    with device.placed_on(mesh):
        return layout_for(backend, experts, cut=cut)


def turn_experts(model: GptOss, backend: str | None) -> None:
    """Turns every layer's experts from the checkpoint's layout into the backend's, layer by layer,
    so that one layer at most is on the device twice."""
    for block in model.blocks:
        weights = block.moe.experts.weights()
        layout = layout_on(model.mesh, backend, weights)
        if layout != weights.layout:
            block.moe.experts.replace(relayout(weights, layout, model.mesh))
