"""Dense layers for few tokens: a matrix read once, the norm in front and the sums behind it."""

from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .. import device
from . import reference, router, tile, vector, xla

__all__ = ["Backend", "linear", "norm_router"]

Backend = Literal["reference", "xla", "triton", "mosaic"]
MOST_ROWS = 64  # that a kernel takes
# Up to 8 rows: 320 and 180 programs of 20b's two projections, in one wave, 44 to 77 KB under way
# on a processor. Of six shapes without parts the fastest on an H200 was one of 80 and 45 programs,
# which read 1.8 TB/s; this one is not measured yet.
FEW_TILE = dict(rows=16, parts=4, columns=64, warps=4, stages=5)
# Of the same six the fastest at 16 and 32 rows.
SMALL_TILE = dict(rows=16, columns=128, warps=1, stages=5)


def linear(
    x_I: Float[Array, "*N I"],
    weight_OI: Float[Array, "O I"],
    bias_O: Float[Array, " O"] | None = None,
    *,
    norm_I: Float[Array, " I"] | None = None,
    eps: float = 1e-5,
    residual_O: Float[Array, "*N O"] | None = None,
    out_dtype: DTypeLike | None = None,
    backend: Backend | None = None,
) -> Float[Array, "*N O"]:
    """weight . norm(x) + bias + residual, where norm is RMSNorm with scale `norm_I`, if given.

    The weight lies [out, in] as checkpoints store it. Products and sums are float32; the result
    is rounded to out_dtype (None: x's dtype) once, after the residual. `eps` is the norm's.

    backend: None chooses: "triton" on an NVIDIA GPU for as many rows of bfloat16 or float16 as it
        is the faster for (see `choose`), else "xla".
    Raises ValueError for shapes that do not fit; NotImplementedError for a backend that cannot
    do what is asked.
    """
    *N, n_in = x_I.shape
    n_out = weight_OI.shape[0]
    for name, array, shape in (
        ("weight_OI", weight_OI, (n_out, n_in)),
        ("bias_O", bias_O, (n_out,)),
        ("norm_I", norm_I, (n_in,)),
        ("residual_O", residual_O, (*N, n_out)),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} should have shape {shape} beside x_I {x_I.shape} and weight_OI "
                f"{weight_OI.shape}; it has {array.shape}."
            )
    x_NI = x_I.reshape(-1, n_in)
    residual_NO = None if residual_O is None else residual_O.reshape(-1, n_out)
    rows = x_NI.shape[0]
    behind = {"residual_NO": residual_NO, "out_dtype": out_dtype}
    norm = {"norm_I": norm_I, "eps": eps}
    match backend or choose(x_NI):
        case "reference":
            out_NO = reference.linear(x_NI, weight_OI, bias_O, **norm, **behind)
        case "xla":
            out_NO = xla.linear(x_NI, weight_OI, bias_O, **norm, **behind)
        case "triton":
            device.require_nvidia("the triton linear layer")
            if rows == 1:
                out_NO = vector.linear(x_NI, weight_OI, bias_O, **norm, **behind)
            elif rows <= MOST_ROWS:
                if norm_I is not None:
                    x_NI = reference.rms_norm(x_NI, norm_I, eps)
                shape = SMALL_TILE if rows > 8 else FEW_TILE
                out_NO = tile.linear(x_NI, weight_OI, bias_O, **behind, **shape)
            else:
                raise NotImplementedError(
                    f"the triton linear layer takes at most {MOST_ROWS} rows; got {rows}. "
                    "Use backend=None or 'xla'."
                )
        case "mosaic":
            raise NotImplementedError("linear has no backend 'mosaic'. Use 'triton'.")
        case name:
            raise ValueError(
                f"backend is None, 'reference', 'xla', 'triton' or 'mosaic'; got {name!r}."
            )
    return out_NO.reshape(*N, n_out)


def norm_router(
    x_D: Float[Array, "*N D"],
    norm_D: Float[Array, " D"],
    router_ED: Float[Array, "E D"],
    bias_E: Float[Array, " E"],
    *,
    eps: float = 1e-5,
    backend: Backend | None = None,
) -> tuple[Float[Array, "*N D"], Float[Array, "*N E"]]:
    """RMSNorm(x), rounded to x's dtype, and router . normed + bias in float32.

    Products are exact or of float32 precision, never tf32: near ties decide who is chosen.
    backend: None chooses "triton" for at most 64 rows of bfloat16 on an NVIDIA GPU, else "xla".
    """
    *N, D = x_D.shape
    x_ND = x_D.reshape(-1, D)
    if backend is None:
        backend = "triton" if x_ND.shape[0] <= MOST_ROWS and _half_on_gpu(x_ND) else "xla"
    if backend == "triton":
        device.require_nvidia("the triton router")
        normed_ND, logits_NE = router.norm_router(x_ND, norm_D, router_ED, bias_E, eps=eps)
    else:
        normed_ND = reference.rms_norm(x_ND, norm_D, eps)
        logits_NE = reference.router(normed_ND, router_ED, bias_E)
    return normed_ND.reshape(x_D.shape), logits_NE.reshape(*N, -1)


def choose(x_NI: Float[Array, "N I"]) -> Backend:
    """What `backend=None` means for `linear`, as measured on an H200 (20b's two projections).

    us of both       1 row   2    4    8    16   32   64
    XLA               -     28   31   36   31   33   33
    kernels           24    41   34   33   29   31   40      from 2 to 8 before `FEW_TILE`
    """
    return "triton" if x_NI.shape[0] <= 32 and _half_on_gpu(x_NI) else "xla"


def _half_on_gpu(x_NI) -> bool:
    """float32 on a GPU is for parity, which XLA serves."""
    return x_NI.dtype in (jnp.bfloat16, jnp.float16) and device.nvidia()
