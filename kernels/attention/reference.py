"""Attention as it is defined: grouped heads, learned sinks, visibility by position.

A sink is one more column of each head's softmax. It takes weight and gives no value:

    weight_j = exp(s_j) / (exp(sink) + sum over visible i of exp(s_i)),    s_j = q . k_j / sqrt(H)

Scores [1, 2] and a sink of 3 give weights [0.0900, 0.2447]: they sum to 0.3348, not to 1.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def visible(
    q_pos_BT: Int[Array, "B T"], k_pos_BS: Int[Array, "B S"], window: int | None
) -> Bool[Array, "B T S"]:
    """Which slots each query may look at.

    Slots state the position that they hold, and -1 when empty, so the same rule serves a plain
    cache, a ring that has wrapped, and a ragged batch. `window` counts the query itself: with
    window 3, position 5 sees 3, 4 and 5. A query at a negative position (padding) sees nothing.
    """
    q_pos_BT1 = q_pos_BT[:, :, None]
    k_pos_B1S = k_pos_BS[:, None, :]
    seen_BTS = (k_pos_B1S >= 0) & (k_pos_B1S <= q_pos_BT1)
    if window is not None:
        seen_BTS &= q_pos_BT1 - k_pos_B1S < window
    return seen_BTS


def attention(
    q_BTKGH: Float[Array, "B T K G H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    sinks_KG: Float[Array, "K G"],
    q_pos_BT: Int[Array, "B T"],
    k_pos_BS: Int[Array, "B S"],
    *,
    window: int | None = None,
) -> Float[Array, "B T K G H"]:
    """The definition, all in float32. It holds [B, T, K, S, H] at once: for small sizes only."""
    q_BTKGH_f32, k_BKSH_f32, v_BKSH_f32 = (x.astype(jnp.float32) for x in (q_BTKGH, k_BKSH, v_BKSH))
    seen_BTS = visible(q_pos_BT, k_pos_BS, window)
    seen_BTKGS = seen_BTS[:, :, None, None, :]

    logits_BTKGS = jnp.einsum("BTKGH,BKSH->BTKGS", q_BTKGH_f32, k_BKSH_f32, precision="highest")
    logits_BTKGS = jnp.where(seen_BTKGS, logits_BTKGS * q_BTKGH.shape[-1] ** -0.5, -jnp.inf)
    sinks_KG1 = sinks_KG.astype(jnp.float32)[..., None]

    # The maximum takes the sink in: exp(sink - max) would overflow for a sink above all scores.
    top_BTKG1 = jnp.maximum(jnp.max(logits_BTKGS, axis=-1, keepdims=True), sinks_KG1)
    top_BTKG1 = jnp.where(top_BTKG1 == -jnp.inf, 0.0, top_BTKG1)  # nothing seen, and no sink
    exps_BTKGS = jnp.exp(logits_BTKGS - top_BTKG1)
    total_BTKG1 = jnp.sum(exps_BTKGS, axis=-1, keepdims=True) + jnp.exp(sinks_KG1 - top_BTKG1)
    weights_BTKGS = exps_BTKGS / jnp.where(total_BTKG1 == 0, 1.0, total_BTKG1)

    # 0 * NaN is NaN: an unseen value must be put aside, a weight of zero is not enough.
    seen_v_BTKSH = jnp.where(seen_BTS[:, :, None, :, None], v_BKSH_f32[:, None], 0.0)
    out_BTKGH = jnp.einsum("BTKGS,BTKSH->BTKGH", weights_BTKGS, seen_v_BTKSH, precision="highest")
    return out_BTKGH.astype(q_BTKGH.dtype)


def turn(
    x_BKMH: Float[Array, "B K M H"], cos_BC: Float[Array, "B C"], sin_BC: Float[Array, "B C"]
) -> Float[Array, "B K M H"]:
    """Turns channel i with channel i + H/2 by the row's angle, in float32."""
    cos, sin = cos_BC[:, None, None], sin_BC[:, None, None]
    first, second = jnp.split(x_BKMH.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x_BKMH.dtype)
