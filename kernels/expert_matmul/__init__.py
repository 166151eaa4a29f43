"""The whole expert computation of one layer: gather, gate_up, SwiGLU, down, weighting, combine."""

from typing import Literal, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from .. import device
from ..routing import in_kernel, top_k
from . import mosaic, ragged, reference, triton, xla
from .swiglu import swiglu
from .weights import AXES, ExpertWeights, Layout

Backend = Literal["reference", "xla", "ragged", "triton", "mosaic"]
_FORMS = {"reference": reference, "xla": xla, "ragged": ragged, "triton": triton, "mosaic": mosaic}

__all__ = [
    "AXES",
    "Backend",
    "ExpertWeights",
    "Layout",
    "expert_matmul",
    "layout_for",
    "mixture",
    "swiglu",
]


def expert_matmul(
    x_ND: Float[Array, "N D"],
    ids_NX: Int32[Array, "N X"],
    weights_NX: Float[Array, "N X"],
    experts: ExpertWeights,
    *,
    limit: float | None,
    alpha: float,
    backend: Backend | None = None,
    out_dtype: DTypeLike | None = None,
    total: int | None = None,
) -> Float[Array, "N D"]:
    """sum over x of weights[n, x] * (down(swiglu(gate_up(row n) + bias)) + bias), of ids[n, x].

    An id outside [0, E), E the experts at hand, is not here and adds nothing, whatever it is. Sums
    are float32, the hidden values are cast to x's dtype between the matmuls, the terms are added in
    float32 in the order of x, and the result is cast to out_dtype (None: x's dtype).

    backend: "reference" the definition; "xla" chosen rows only, any layout, any device; "ragged"
    dense weights, differentiable, for training many experts; "triton" layouts "triton", "mosaic"
    and their wide forms, bfloat16, an NVIDIA GPU; "mosaic" layouts "mosaic" and "mosaic_wide",
    bfloat16, a Hopper and jax 0.11. None takes the kernels that read the experts' layout, where all
    of that holds, else "xla"; of layout "mosaic" "triton" for few rows an expert and "mosaic" for
    more (`mosaic.pays`). Which layout a model has is `layout_for`'s choice.

    total: how many experts there are in all, where those at hand are a part of them and other ids
    are another device's: N X / total rows an expert are expected. None: all are here. It decides
    nothing but which kernel and plan run.

    Raises:
        ValueError: for shapes that do not belong together, an unknown backend, or a layout that
            the backend does not read.
        NotImplementedError: for "triton" or "mosaic" on another device or in another dtype.
    """
    total = total or experts.count
    runs = _checked(x_ND, ids_NX.shape[1], experts, backend, total)
    how = dict(limit=limit, alpha=alpha, out_dtype=jnp.dtype(out_dtype or x_ND.dtype))
    if runs in _READS:
        how |= dict(total=total)
    return _FORMS[runs].expert_matmul(x_ND, ids_NX, weights_NX, experts, **how)


def mixture(
    x_ND: Float[Array, "N D"],
    logits_NE: Float[Array, "N E"],
    live_N: Bool[Array, " N"],
    experts: ExpertWeights,
    residual_ND: Float[Array, "N D"],
    *,
    chosen: int,
    limit: float | None,
    alpha: float,
    backend: Backend | None = None,
) -> Float[Array, "N D"]:
    """residual + expert_matmul of the `chosen` largest logits, for one device that has all experts.

    The same as `routing.top_k`, ids of -1 where not live, `expert_matmul` and an addition in
    float32, rounded once to the residual's dtype; "triton" does it in 2 to 6 launches, for a token
    or two without partial results in memory. OpenAI's code rounds the experts' sum to bfloat16
    before it adds: 10 to 29 % of the results then differ by one unit, and the error against
    float64 is 1.68e-3 to 2.15e-3 in place of 1.66e-3 (a sum of .1 to 1 times the residual's size).

    Raises as `expert_matmul` and `routing.top_k`.
    """
    if not 1 <= chosen <= logits_NE.shape[1] == experts.count:
        raise ValueError(
            f"chosen must be between 1 and the {experts.count} experts, each with a logit; got "
            f"{chosen} of {logits_NE.shape[1]} logits."
        )
    how = dict(limit=limit, alpha=alpha)
    runs = _checked(x_ND, chosen, experts, backend, experts.count)
    if runs == "triton":
        given = (x_ND, logits_NE, live_N, experts, residual_ND)
        return triton.mixture(*given, chosen=chosen, **how)
    if runs == "mosaic":
        ranked = in_kernel.top_k(logits_NE, chosen, live_N.astype(jnp.int32), interpret=False)
        how |= dict(residual_ND=residual_ND, out_dtype=residual_ND.dtype)
        return mosaic.expert_matmul(x_ND, *ranked, experts, **how)
    ids_NX, weights_NX = top_k(logits_NE, chosen)
    ids_NX = jnp.where(live_N[:, None], ids_NX, -1)
    how |= dict(backend=backend, out_dtype=jnp.float32)
    sum_ND = expert_matmul(x_ND, ids_NX, weights_NX, experts, **how)
    return (residual_ND.astype(jnp.float32) + sum_ND).astype(residual_ND.dtype)


def _checked(
    x_ND: Array, chosen: int, experts: ExpertWeights, backend: str | None, total: int
) -> str:
    """The backend that computes it; raises where one asked for cannot."""
    experts.check()
    if x_ND.shape[1] != experts.embed:
        raise ValueError(f"x has width {x_ND.shape[1]}, the experts {experts.embed}.")
    packed_for = experts.layout.removesuffix("_wide")
    if backend is None:
        fits = x_ND.dtype == jnp.bfloat16 and device.nvidia()
        backend = packed_for if fits and packed_for in ("triton", "mosaic") else "xla"
        if backend == "mosaic" and not mosaic.pays(x_ND.shape[0], chosen, total):
            backend = "triton"
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}; got {backend!r}.")
    if backend == "ragged" and experts.layout != "dense":
        raise ValueError("backend 'ragged' reads dense weights; use experts.dense() or 'xla'.")
    if backend in ("triton", "mosaic"):
        layout_for(backend)  # raises where it cannot run
        if packed_for not in _READS[backend]:
            raise ValueError(
                f"backend {backend!r} reads layouts {_READS[backend]}, not {experts.layout!r}; "
                f"use experts.to_layout(layout_for({backend!r}, experts)) or backend='xla'."
            )
    return backend


_READS = {"triton": ("triton", "mosaic"), "mosaic": ("mosaic",)}


def layout_for(
    backend: str | None = None, experts: ExpertWeights | None = None, *, cut: bool = False
) -> str:
    """The packed layout that a backend reads fastest: "checkpoint", or "triton" or "mosaic", with
    "_wide" where a scale byte is above 128.

    backend None chooses for the device at hand; on a Hopper that is "mosaic", which the kernels of
    both names read. experts, in layout "checkpoint", are looked at for such bytes, and for widths
    that are no multiples of 64; None trusts that there are none. cut: a mesh's tensor axis cuts
    each expert, which the tiles of "mosaic" do not allow.

    Raises:
        NotImplementedError: for a backend that cannot run here.
        ValueError: for an unknown one.
    """
    if backend is None:
        fits = experts is None or not (experts.embed % 64 or experts.ffn % 64)
        hopper = "mosaic" if mosaic.runs_here() and fits and not cut else "triton"
        backend = hopper if device.nvidia() else "xla"
    if backend in ("triton", "mosaic"):
        if backend == "mosaic":
            mosaic.require()
        device.require_nvidia(f"backend {backend!r}")
        return f"{backend}_wide" if experts is not None and experts.needs_wide() else backend
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}; got {backend!r}.")
    return "checkpoint"
