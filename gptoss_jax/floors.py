"""The least time that a step of the whole model can take on one H200, from its configuration."""

from .config import Config
from .kernels import shapes


def decode_bytes(config: Config, batch: int, context: int) -> float:
    """Bytes that one decode step must read, each used weight once: bfloat16, and MXFP4 experts.

    Experts hit are E (1 - (1 - X/E)^B), if all are as likely. A sliding layer reads
    min(context, window) positions of the cache, a full one all. Activations and norms are left
    out: under 1 % of it.
    """
    c = config
    layer = shapes.Experts(
        model="", tokens=batch, embed=c.embed, ffn=c.ffn, experts=c.experts,
        chosen=c.experts_per_token,
    )  # fmt: skip
    weights = c.layers * (layer.weight_bytes() + 2 * _dense(c)) + 2 * c.vocab * c.embed
    seen = sum(min(context, c.window_of(i) or context) for i in range(c.layers))
    return weights + batch * seen * c.kv_heads * c.head_width * 2 * 2


def decode_floor_ms(config: Config, batch: int, context: int) -> float:
    """The bytes of a step at the copy rate measured on an H200."""
    return decode_bytes(config, batch, context) / shapes.BYTES_PER_US / 1e3


def prefill_floor_ms(config: Config, tokens: int) -> float:
    """One sequence through every layer: no faster than its products, nor than its weights."""
    c = config
    products = _dense(c) + c.experts_per_token * 3 * c.embed * c.ffn
    flop = 2 * tokens * c.layers * products
    for i in range(c.layers):
        window = min(c.window_of(i) or tokens, tokens)
        pairs = window * (window + 1) / 2 + (tokens - window) * window
        flop += 4 * pairs * c.q_heads * c.head_width
    read = decode_bytes(c, tokens, 0) - 2 * c.vocab * c.embed
    return max(flop / shapes.FLOP_PER_US, read / shapes.BYTES_PER_US) / 1e3


def _dense(c: Config) -> int:
    """Weights of one layer that every token uses: attention's two projections and the router."""
    qkv = (c.q_heads + 2 * c.kv_heads) * c.head_width * c.embed
    return qkv + c.q_heads * c.head_width * c.embed + c.experts * c.embed
