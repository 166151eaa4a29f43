"""Text in and out of the model: the tokenizer, and Harmony, the format of its conversations."""

from gptoss_jax.text import harmony
from gptoss_jax.text.tokenizer import StreamDecoder, Tokenizer

__all__ = ["StreamDecoder", "Tokenizer", "harmony"]
