"""Rotary positions with YaRN, in float32 throughout (bfloat16 turns position 257 into 256).

YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2-3.4), as gpt-oss uses it: the correction range
is not rounded to whole channels, and cos and sin carry the concentration 0.1·ln(factor) + 1.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .config import Config


def inverse_frequencies(config: Config) -> np.ndarray:
    """float64 [H/2]: radians that channel i turns per position."""
    half = config.head_width // 2
    plain = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    if config.rope_factor == 1.0:
        return plain

    def channel(turns: float) -> float:
        """The (fractional) channel that makes this many turns over the original context."""
        per_position = turns * 2 * math.pi / config.rope_original_context
        return -half * math.log(per_position) / math.log(config.rope_theta)

    low, high = channel(config.rope_beta_fast), channel(config.rope_beta_slow)
    if config.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_width - 1)
    # Channels before low turn often enough to be left alone; those past high are stretched whole.
    stretched = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0, 1)
    return plain * (1 - stretched) + plain / config.rope_factor * stretched


def concentration(config: Config) -> float:
    """What YaRN multiplies cos and sin by: 1.3465735902799727 for gpt-oss."""
    return 0.1 * math.log(config.rope_factor) + 1.0 if config.rope_factor > 1.0 else 1.0


def table(
    config: Config, positions_BT: Int[Array, "B T"]
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """float32 cos and sin, concentration included, for every position and channel pair."""
    frequencies = jnp.asarray(inverse_frequencies(config), jnp.float32)
    angles = positions_BT.astype(jnp.float32)[..., None] * frequencies
    scale = jnp.float32(concentration(config))
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x_BTKMH: Float[Array, "B T *heads H"], cos, sin) -> Float[Array, "B T *heads H"]:
    """Turns channel i with channel i + H/2 (halves, not neighbours), in float32.

    The references cast cos and sin to the activations' dtype first; keeping them in float32 differs
    from that at bfloat16's rounding only, and not at all in float32.
    """
    cos, sin = (jnp.expand_dims(t, tuple(range(2, x_BTKMH.ndim - 1))) for t in (cos, sin))
    first, second = jnp.split(x_BTKMH.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x_BTKMH.dtype)
