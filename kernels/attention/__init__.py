"""Grouped-head attention with learned sinks over a cache whose slots state their positions."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .. import device
from . import decode, prefill, reference, step, xla
from .reference import visible

__all__ = ["Backend", "append_and_attend", "attention", "visible"]

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


def append_and_attend(
    qkv_BKMH: Float[Array, "B K M H"],
    cos_BC: Float[Array, "B C"],
    sin_BC: Float[Array, "B C"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    sinks_KG: Float[Array, "K G"],
    q_pos_B: Int[Array, " B"],
    k_pos_BS: Int[Array, "B S"],
    slot_B: Int[Array, " B"],
    *,
    window: int | None = None,
    backend: Backend | None = None,
) -> tuple[Float[Array, "B K G H"], Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """One new token a row: turns its queries and key, stores key and value, attends.

    qkv: M = G queries, one key, one value of each head, not turned. cos, sin: float32 of the
    token's position for C = H/2 channel pairs (i, i + H/2). slot: where the row's key and value
    go; S or more writes nothing (padding, whose q_pos is negative and whose result is zeros).
    k_pos: the slots' positions after this step. Returns the result and the cache's arrays, which
    are written in place where the arguments' memory may be reused.

    The same as rotating, storing and `attention`, to rounding; backends and errors as there.
    """
    _, K, M, H = qkv_BKMH.shape
    if 2 * cos_BC.shape[-1] != H or (K, M - 2) != sinks_KG.shape:
        raise ValueError(
            f"qkv_BKMH {qkv_BKMH.shape} belongs with cos of half its width and sinks of "
            f"{(K, M - 2)}; got {cos_BC.shape} and {sinks_KG.shape}."
        )
    backend = backend or choose(qkv_BKMH)
    if backend == "triton":
        device.require_nvidia("triton attention")
        return step.append_and_attend(
            qkv_BKMH, cos_BC, sin_BC, k_BKSH, v_BKSH, sinks_KG, q_pos_B, k_pos_BS, slot_B,
            window=window,
        )  # fmt: skip
    turned_BKMH = reference.turn(qkv_BKMH[:, :, :-1], cos_BC, sin_BC)
    q_BKGH, k_BKH = turned_BKMH[:, :, :-1], turned_BKMH[:, :, -1]
    rows = jnp.arange(slot_B.shape[0])
    k_BKSH = k_BKSH.at[rows, :, slot_B].set(k_BKH, mode="drop")
    v_BKSH = v_BKSH.at[rows, :, slot_B].set(qkv_BKMH[:, :, -1], mode="drop")
    out_BTKGH = attention(
        q_BKGH[:, None], k_BKSH, v_BKSH, sinks_KG, q_pos_B[:, None], k_pos_BS,
        window=window, backend=backend,
    )  # fmt: skip
    return out_BTKGH[:, 0], k_BKSH, v_BKSH


def choose(q: Float[Array, "..."]) -> Backend:
    """What `backend=None` means: float32 on a GPU is for parity, which XLA serves exactly."""
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    return "triton" if half and device.nvidia() else "xla"
