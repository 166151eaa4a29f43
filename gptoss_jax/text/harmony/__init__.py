"""Harmony, the format of gpt-oss's conversations: messages to tokens and back.

render            messages -> prompt, ends in `<|start|>assistant`
render_training   messages -> ids and loss mask
encode            just the messages, nothing added or dropped
parse, Parser     tokens -> messages, whole or as they are sampled
stop_tokens       which tokens end a turn
"""

from gptoss_jax.text.harmony.builtin import BROWSER, PYTHON
from gptoss_jax.text.harmony.messages import (
    Developer,
    HarmonyError,
    Message,
    Namespace,
    System,
)
from gptoss_jax.text.harmony.parse import Delta, Parsed, Parser, parse
from gptoss_jax.text.harmony.render import encode, render, render_training
from gptoss_jax.text.harmony.schema import typescript
from gptoss_jax.text.harmony.stops import stop_tokens

__all__ = [
    "BROWSER",
    "PYTHON",
    "Delta",
    "Developer",
    "HarmonyError",
    "Message",
    "Namespace",
    "Parsed",
    "Parser",
    "System",
    "encode",
    "parse",
    "render",
    "render_training",
    "stop_tokens",
    "typescript",
]
