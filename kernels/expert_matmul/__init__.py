"""The whole expert computation of one layer: gather, gate_up, SwiGLU, down, weighting, combine."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from . import ragged, reference, xla
from .swiglu import swiglu
from .weights import AXES, ExpertWeights, Layout

Backend = Literal["reference", "xla", "ragged"]

__all__ = ["AXES", "Backend", "ExpertWeights", "Layout", "expert_matmul", "swiglu"]


def expert_matmul(
    x_ND: Float[Array, "N D"],
    ids_NX: Int32[Array, "N X"],
    weights_NX: Float[Array, "N X"],
    experts: ExpertWeights,
    *,
    limit: float | None,
    alpha: float,
    backend: Backend | None = None,
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "N D"]:
    """sum over x of weights[n, x] * (down(swiglu(gate_up(row n) + bias)) + bias) of expert ids[n, x].

    An id outside [0, E), E the experts at hand, is not here and adds nothing, whatever it is. Sums
    are float32, the hidden values are cast to x's dtype between the matmuls, the terms are added in
    float32 in the order of x, and the result is cast to out_dtype (None: x's dtype).

    backend: "reference" the definition; "xla" chosen rows only, on any device; "ragged" dense
    weights, differentiable, for training many experts; None chooses.

    Raises:
        ValueError: for shapes that do not belong together, an unknown backend, or a layout that
            the backend does not read.
    """
    experts.check()
    if x_ND.shape[1] != experts.embed:
        raise ValueError(f"x has width {x_ND.shape[1]}, the experts {experts.embed}.")
    backend = backend or "xla"
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}; got {backend!r}.")
    out_dtype = jnp.dtype(out_dtype or x_ND.dtype)
    if backend == "ragged" and experts.layout != "dense":
        raise ValueError("backend 'ragged' reads dense weights; use experts.dense() or 'xla'.")
    form = {"reference": reference, "xla": xla, "ragged": ragged}[backend]
    return form.expert_matmul(
        x_ND, ids_NX, weights_NX, experts, limit=limit, alpha=alpha, out_dtype=out_dtype
    )
