"""AdamW on float32 master weights: warmup, cosine, clipping; decay on matrices alone."""

import jax
import jax.numpy as jnp
import optax

from .settings import Optimizer


def schedule(settings: Optimizer, steps: int) -> optax.Schedule:
    """Step -> learning rate: linear from 0 over `warmup` steps, then a cosine to floor * peak."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.peak,
        warmup_steps=settings.warmup,
        decay_steps=max(steps, settings.warmup + 1),
        end_value=settings.peak * settings.floor,
    )


def decays(name: str) -> bool:
    """Weight decay is for what multiplies activations: no bias, norm scale, sink or embedding."""
    last = name.rsplit(".", 1)[-1]
    return not ("bias" in last or last in ("scale_D", "sinks_KG") or name.startswith("embed."))


def make(settings: Optimizer, steps: int) -> optax.GradientTransformation:
    """The chain: clip the whole gradient's norm, Adam, decoupled decay, the schedule."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.scale_by_adam(b1=settings.beta1, b2=settings.beta2, eps=1e-8),
        optax.add_decayed_weights(
            settings.weight_decay, mask=lambda params: {name: decays(name) for name in params}
        ),
        optax.scale_by_learning_rate(schedule(settings, steps)),
    )


def update(transformation, gradients: dict, state, params: dict):
    """(new params, new state). optax mixes dtypes, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state


def norm(tree) -> jax.Array:
    """Euclidean norm over all leaves, float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))
