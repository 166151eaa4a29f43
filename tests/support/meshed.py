"""A checkpoint that meshes of eight can cut every way, and prompts for it."""

import functools
import tempfile
from pathlib import Path

import checkpoints
import numpy as np

# 8 experts over 2, 4, 8; 4 key/value heads, so that over expert=8 attention is whole; F in 4 blocks
# of 32 over 2; 288 tokens over 8. 12 query heads. No two sizes of one array coincide.
NUMBERS = checkpoints.TINY.replace(
    layers=2, kv_heads=4, q_per_kv=3, head_width=10, experts=8, experts_per_token=3, ffn=128
)
PROMPTS = [[3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62], [64, 33, 83, 27]]
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 13))
GREEDY = 48  # tokens


@functools.cache
def folder(layers: int = NUMBERS.layers) -> Path:
    """Written once a process, in shards; the operating system clears it away."""
    path = Path(tempfile.mkdtemp(prefix="meshed-"))
    numbers = NUMBERS.replace(layers=layers)
    weights = checkpoints.make_weights(numbers, seed=3)
    checkpoints.write(path, numbers, weights, "mxfp4-sharded", tokenizer=True)
    return path
