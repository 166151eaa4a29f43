"""Small configurations whose sizes never coincide: a mistaken axis cannot pass a shape check.

In the real models K == G, H == K·G and D == F all hold, and hide such mistakes.
"""

from gptoss_jax.config import Config

# D and F are multiples of 32, the MXFP4 block, and not powers of two where a kernel could mind.
TINY = Config(
    layers=3,
    embed=96,
    kv_heads=2,
    q_per_kv=3,
    head_width=10,
    experts=8,
    experts_per_token=4,
    ffn=64,
    vocab=53,
    window=5,
)

# For meshes: 8 experts over 2, 4, 8; 4 key/value heads over 2, 4; F in whole blocks over 2.
MESHED = Config(
    layers=2,
    embed=96,
    kv_heads=4,
    q_per_kv=3,
    head_width=10,
    experts=8,
    experts_per_token=3,
    ffn=128,
    vocab=53,
    window=5,
)
