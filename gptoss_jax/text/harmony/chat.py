"""Messages of the chat APIs (dicts) as Harmony messages."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gptoss_jax.text.harmony.builtin import BUILTIN
from gptoss_jax.text.harmony.messages import ROLES, Developer, Message

THINKING = ("thinking", "reasoning_content", "reasoning")  # the names that servers give it
_HEADER = ("channel", "recipient", "content_type")


def translate(messages: Sequence[Message | Mapping[str, Any]]) -> list[Message]:
    """Harmony messages; those that are so already stay as they are.

    system, developer: instructions of a developer message (those that follow one another joined).
    assistant: `thinking` becomes analysis, `content` final, or commentary where `tool_calls`
        follow it; every call becomes a message to `functions.NAME`.
    tool: the result of the call with its `tool_call_id`, else of the function `name`, else of the
        call before it; content that is not text is written as JSON.
    A dict with a channel, recipient or content_type is one message with just those fields.
    Raises ValueError, naming the message, where a field is missing or of the wrong kind.
    """
    out: list[Message] = []
    messages = listed("messages", messages)
    calls: dict[str | None, str] = {}  # tool_call_id -> recipient; None -> the latest
    for position, message in enumerate(messages):
        if isinstance(message, Message):
            out.append(message)
            if message.role == "assistant" and message.recipient is not None:
                calls[None] = message.recipient
            continue
        try:
            new = _translate(message, calls)
        except ValueError as error:
            raise ValueError(f"message {position}: {error}") from None
        before = messages[position - 1] if position else None
        if _instructs(message) and isinstance(before, Mapping) and _instructs(before):
            text = f"{out.pop().content.instructions}\n\n{new[0].content.instructions}"
            new = [Message("developer", Developer(instructions=text))]
        out += new
    return out


def listed(name: str, given: Any) -> tuple:
    """The entries of a list; None is an empty one. Raises ValueError for what is none."""
    if given is None:
        return ()
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise ValueError(f"{name} must be a list; got {given!r:.80}.")
    return tuple(given)


def _instructs(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def _translate(message: Mapping[str, Any], calls: dict[str | None, str]) -> list[Message]:
    if not isinstance(message, Mapping):
        raise ValueError(f"a Message or a dict is expected; got {type(message).__name__}.")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"role is one of {', '.join(ROLES)}; got {role!r}.")
    if role in ("system", "developer"):
        return [Message("developer", Developer(instructions=_text(message)))]
    if role == "tool":
        return [_result(message, calls)]
    if role == "user" or any(message.get(field) is not None for field in _HEADER):
        fields = {field: message.get(field) for field in _HEADER}
        return [Message(role, _text(message), name=message.get("name"), **fields)]
    return _assistant(message, calls)


def _assistant(message: Mapping[str, Any], calls: dict[str | None, str]) -> list[Message]:
    thinking = next((message[name] for name in THINKING if message.get(name)), None)
    tool_calls = listed("tool_calls", message.get("tool_calls"))
    out = []
    if thinking is not None:
        out.append(Message("assistant", _text({"content": thinking}), "analysis"))
    if not tool_calls:
        out.append(Message("assistant", _text(message), "final"))
    elif message.get("content"):
        out.append(Message("assistant", _text(message), "commentary"))
    for call in tool_calls:
        function = call.get("function", call) if isinstance(call, Mapping) else call
        if not isinstance(function, Mapping):
            raise ValueError(
                f"a tool call holds a function's name and arguments; got {call!r:.80}."
            )
        recipient, channel, kind = _address(function.get("name"))
        arguments = function.get("arguments", "{}")
        text = arguments if isinstance(arguments, str) else _json("arguments", arguments)
        out.append(Message("assistant", text, channel, recipient, kind))
        calls[None] = recipient
        if call.get("id") is not None:
            calls[_id(call["id"])] = recipient
    return out


def _result(message: Mapping[str, Any], calls: Mapping[str | None, str]) -> Message:
    id, name = _id(message.get("tool_call_id")), message.get("name")
    if id in calls and id is not None:
        sender = calls[id]
    elif name is not None:
        sender = _address(name)[0]
    elif None in calls:
        sender = calls[None]
    else:
        raise ValueError("a tool message needs a name, or a call before it that it answers.")
    content = message.get("content")
    if isinstance(content, str | list | None):
        text = _text(message)
    else:
        text = _json("content", content)
    channel = message.get("channel") or _address(sender)[1]
    return Message("tool", text, channel, message.get("recipient") or "assistant", name=sender)


def _id(given: Any) -> str | None:
    if given is not None and not isinstance(given, str):
        raise ValueError(f"the id of a tool call is a string; got {given!r:.80}.")
    return given


def _json(field: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{field} must be a string or JSON values: {error}.") from None


def _address(name: Any) -> tuple[str, str, str]:
    """Recipient, channel and content type of a call: built-in tools are called in analysis."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"a tool call needs the function's name; got {name!r}.")
    if name.split(".")[0] in BUILTIN:
        return name, "analysis", "code"
    recipient = name if name.startswith("functions.") else f"functions.{name}"
    return recipient, "commentary", "<|constrain|>json"


def _text(message: Mapping[str, Any]) -> str:
    """A string, or the texts of a list of {"type": "text", "text": ...} parts one after another."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise ValueError(f"content is text, or a list of text parts; got {content!r}.")
