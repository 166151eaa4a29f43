"""What a conversation is made of.

A `Message` is one Harmony message and is written as it stands. A dict is a message of the chat
APIs (role, content, thinking, tool_calls, ...) and is translated by `chat.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
CHANNELS = ("analysis", "commentary", "final")
EFFORTS = ("low", "medium", "high")
IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
KNOWLEDGE_CUTOFF = "2024-06"


class HarmonyError(ValueError):
    """Tokens that are not Harmony, in strict parsing. position: which token it was noticed at."""

    def __init__(self, problem: str, position: int):
        super().__init__(f"token {position}: {problem}.")
        self.position = position


@dataclasses.dataclass(frozen=True, kw_only=True)
class Namespace:
    """A group of tools under one name, which is what comes before the dot in a recipient.

    tools: function descriptions, {"name": ..., "description": ..., "parameters": JSON schema}.
    """

    name: str
    description: str | None = None
    tools: Sequence[dict[str, Any]] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """What Harmony's own system message says. None, or no channels, leaves a line out.

    date: written as given ("2025-06-28"); never today's by itself, so that the prompt of the same
        arguments is always the same.
    tools: "browser", "python", or a Namespace.
    """

    identity: str | None = IDENTITY
    knowledge_cutoff: str | None = KNOWLEDGE_CUTOFF
    date: str | None = None
    reasoning: str | None = "medium"
    tools: Sequence[str | Namespace] = ()
    channels: Sequence[str] = CHANNELS

    def __post_init__(self):
        if self.reasoning is not None and self.reasoning not in EFFORTS:
            raise ValueError(f"reasoning is one of {', '.join(EFFORTS)}; got {self.reasoning!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Developer:
    """What most chat APIs call the system prompt, with the functions that may be called.

    tools: functions as the chat APIs describe them, bare or inside {"type": "function", ...}; or
        a Namespace.
    response_formats: {"name": ..., "description": ..., "schema": JSON schema}, bare or as the chat
        APIs' {"type": "json_schema", "json_schema": {...}}.
    """

    instructions: str | None = None
    tools: Sequence[dict[str, Any] | Namespace] = ()
    response_formats: Sequence[dict[str, Any]] = ()


@dataclasses.dataclass(frozen=True)
class Message:
    """One message.

    role: one of ROLES. A tool's message needs its `name` ("functions.f", "python").
    content: text, taken literally; or System or Developer for those roles.
    recipient: who it is for ("functions.f" in a call, "assistant" in its result).
    content_type: such as "code", or "<|constrain|>json" with the control token.

    Raises ValueError on an unknown role, a tool without a name, and fields of the header that
    are empty or hold white space, because the header is separated by it.
    """

    role: str
    content: str | System | Developer = ""
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    name: str | None = None

    def __post_init__(self):
        if self.role not in ROLES:
            raise ValueError(f"role is one of {', '.join(ROLES)}; got {self.role!r}.")
        if self.role == "tool" and self.name is None:
            raise ValueError("a message of role 'tool' needs a name, such as 'functions.f'.")
        kinds = {"system": (str, System), "developer": (str, Developer)}.get(self.role, (str,))
        if not isinstance(self.content, kinds):
            raise ValueError(
                f"the content of a {self.role} message is "
                f"{' or '.join(kind.__name__ for kind in kinds)}; "
                f"got {type(self.content).__name__}."
            )
        for field in ("channel", "recipient", "content_type", "name"):
            value = getattr(self, field)
            word = isinstance(value, str) and value.split() == [value]
            if value is not None and not word:
                raise ValueError(f"{field} is a word without white space; got {value!r}.")
