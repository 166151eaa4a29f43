"""Cross entropy over the tokens that count, and a load-balancing loss for the router."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def cross_entropy(
    logits_BTV: Float[Array, "B T V"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
) -> Float[Array, ""]:
    """Mean over the weighted positions of -log softmax(logits)[target], in nats, float32.

    Positions of weight 0 matter not at all, whatever their logits hold; if all are, it is 0.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    # A masked position must not send NaN through 0 * NaN, in either direction.
    logits_BTV = jnp.where((weights_BT > 0)[..., None], logits_BTV, jnp.float32(0))
    chosen_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    nats_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT
    return jnp.sum(nats_BT * weights_BT) / jnp.maximum(jnp.sum(weights_BT), jnp.float32(1))


def balance(
    logits_NE: Float[Array, "N E"], ids_NX: Int[Array, "N X"], live_N: Bool[Array, " N"]
) -> Float[Array, ""]:
    """E · Σ_e f_e · P_e over the live tokens, the convention of the Switch Transformer.

    f_e is the share of all choices that fell on expert e (they sum to 1, whatever the number chosen
    per token), P_e the mean over tokens of softmax over all experts. Uniform routing gives 1, all
    tokens to one expert E; it is never negative. f carries no gradient. Padding does not count.
    """
    E = logits_NE.shape[-1]
    live_N = live_N.astype(jnp.float32)
    tokens = jnp.maximum(jnp.sum(live_N), jnp.float32(1))
    # Compared, never used as an index: an id outside [0, E) is simply nowhere.
    chosen_NXE = (ids_NX[..., None] == jnp.arange(E, dtype=ids_NX.dtype)).astype(jnp.float32)
    f_E = jnp.einsum("NXE,N->E", chosen_NXE, live_N) / (tokens * ids_NX.shape[-1])
    P_NE = jax.nn.softmax(logits_NE.astype(jnp.float32), axis=-1)
    P_NE = jnp.where(live_N[:, None] > 0, P_NE, jnp.float32(0))
    return E * jnp.sum(jax.lax.stop_gradient(f_E) * jnp.sum(P_NE, axis=0) / tokens)
