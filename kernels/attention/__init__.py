"""Grouped-head attention with learned sinks over a cache whose slots state their positions."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .. import device
from . import decode, prefill, reference, xla
from .reference import visible

__all__ = ["Backend", "attention", "visible"]

Backend = Literal["reference", "xla", "triton", "mosaic"]


def attention(
    q_BTKGH: Float[Array, "B T K G H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    sinks_KG: Float[Array, "K G"],
    q_pos_BT: Int[Array, "B T"],
    k_pos_BS: Int[Array, "B S"],
    *,
    window: int | None = None,
    backend: Backend | None = None,
) -> Float[Array, "B T K G H"]:
    """softmax(q . k / sqrt(H), with a sink for each head) . v, over what each query may see.

    Query head g of key/value head k is row [k, g]. Slot j is seen by query i iff
    0 <= k_pos[j] <= q_pos[i] and, with a window, q_pos[i] - k_pos[j] < window: see `visible`.
    Slots may be in any order. What an unseen slot holds does not matter, NaN included. A query
    at a negative position (padding) gives zeros. Scores, softmax and sums are float32; the
    result has q's dtype.

    backend: None chooses ("triton" for bfloat16 and float16 on an NVIDIA GPU, else "xla");
        "reference" is the definition, "xla" the one with gradients.
    Raises ValueError for shapes, dtypes or a window that cannot be; NotImplementedError for a
    backend that cannot do what is asked.
    """
    B, T, K, G, H = q_BTKGH.shape
    S = k_BKSH.shape[2]
    for name, array, shape in (
        ("k_BKSH", k_BKSH, (B, K, S, H)),
        ("v_BKSH", v_BKSH, (B, K, S, H)),
        ("sinks_KG", sinks_KG, (K, G)),
        ("q_pos_BT", q_pos_BT, (B, T)),
        ("k_pos_BS", k_pos_BS, (B, S)),
    ):
        if array.shape != shape:
            raise ValueError(
                f"{name} should have shape {shape} beside q_BTKGH {q_BTKGH.shape} and k_BKSH "
                f"{k_BKSH.shape}; it has {array.shape}."
            )
    if not q_BTKGH.dtype == k_BKSH.dtype == v_BKSH.dtype:
        raise ValueError(
            f"q, k and v share one dtype; got {q_BTKGH.dtype}, {k_BKSH.dtype}, {v_BKSH.dtype}."
        )
    if window is not None and window < 1:
        raise ValueError(f"window counts the query itself, so it is at least 1; got {window}.")

    args = (q_BTKGH, k_BKSH, v_BKSH, sinks_KG, q_pos_BT, k_pos_BS)
    match backend or choose(q_BTKGH):
        case "reference":
            return reference.attention(*args, window=window)
        case "xla":
            return xla.attention(*args, window=window)
        case "triton":
            device.require_nvidia("triton attention")
            kernel = decode.attention if T == 1 else prefill.attention
            return kernel(*args, window=window)
        case "mosaic":
            raise NotImplementedError("attention has no backend 'mosaic'. Use 'triton'.")
        case name:
            raise ValueError(
                f"backend is None, 'reference', 'xla', 'triton' or 'mosaic'; got {name!r}."
            )


def choose(q_BTKGH: Float[Array, "B T K G H"]) -> Backend:
    """What `backend=None` means: float32 on a GPU is for parity, which XLA serves exactly."""
    half = q_BTKGH.dtype in (jnp.bfloat16, jnp.float16)
    return "triton" if half and device.nvidia() else "xla"
