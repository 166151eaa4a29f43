"""Conversations as tokens.

Every piece of text is encoded by itself as ordinary text, and control tokens are put between the
pieces by id. Whatever a user, a tool or an instruction says can therefore never become one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gptoss_jax.text.harmony.builtin import BUILTIN
from gptoss_jax.text.harmony.chat import listed, translate
from gptoss_jax.text.harmony.messages import (
    IDENTITY,
    KNOWLEDGE_CUTOFF,
    Developer,
    Message,
    Namespace,
    System,
)
from gptoss_jax.text.harmony.schema import formats_section, tools_section
from gptoss_jax.text.tokenizer import Tokenizer

CONSTRAIN = "<|constrain|>"
AnyMessage = Message | Mapping[str, Any]


def render(
    messages: Sequence[AnyMessage],
    tokenizer: Tokenizer,
    *,
    reasoning: str | None = "medium",
    tools: Sequence[str | dict[str, Any] | Namespace] = (),
    response_formats: Sequence[dict[str, Any]] = (),
    identity: str | None = IDENTITY,
    knowledge_cutoff: str | None = KNOWLEDGE_CUTOFF,
    date: str | None = None,
    drop_analysis: bool = True,
) -> list[int]:
    """The prompt for the assistant's next message; ends in `<|start|>assistant`.

    messages: `Message`, written as it stands, or dicts of the chat APIs (see `chat.translate`).
        Unless a `Message` of role system is among them, one is put first, made of `reasoning`,
        `identity`, `knowledge_cutoff`, `date` and the built-in tools.
    tools: "browser" and "python", described in the system message; functions as dicts, and
        Namespaces, described in the developer message (added where there is none).
    response_formats: schemas for structured output, at the end of the developer message.
    drop_analysis: leave out the thinking of finished turns, that is, all messages on the analysis
        channel before the last final one. The thinking after it (the turn is not finished: it
        has called a tool) stays.
    Raises ValueError for messages that cannot be written, and where tools would have to be put
    into a system or developer `Message` whose content is plain text.
    """
    tools = listed("tools", tools)
    response_formats = listed("response_formats", response_formats)
    system = System(
        identity=identity, knowledge_cutoff=knowledge_cutoff, date=date, reasoning=reasoning
    )
    conversation = _prepare(messages, system, tools, response_formats)
    if drop_analysis:
        conversation = _without_analysis(conversation, before=len(conversation))
    ids, _ = _join(conversation, tokenizer)
    return [*ids, tokenizer.control("<|start|>"), *tokenizer.encode("assistant")]


def render_training(
    messages: Sequence[AnyMessage],
    tokenizer: Tokenizer,
    *,
    turns: Literal["all", "last"] = "all",
    reasoning: str | None = "medium",
    tools: Sequence[str | dict[str, Any] | Namespace] = (),
    response_formats: Sequence[dict[str, Any]] = (),
    identity: str | None = IDENTITY,
    knowledge_cutoff: str | None = KNOWLEDGE_CUTOFF,
    date: str | None = None,
    drop_analysis: bool = True,
) -> tuple[list[int], list[int]]:
    """A conversation to learn from: ids, and for each id 1 if the assistant should learn it.

    The arguments are those of `render`. mask[i] belongs to ids[i], the token to be predicted from
    ids[:i]: shift it with the targets. It is 1 for what the model samples, the token that ends
    each message included: `<|end|>`, `<|call|>`, and `<|return|>`, in which the conversation ends
    if its last message is the assistant's final one. It is 0 for everything else, and for the
    `<|start|>assistant` that a prompt ends in.

    Earlier final messages end in `<|end|>`, as they do in prompts, so the ids of a conversation
    without its last turns are the first ids of the whole one, save that token, and save analysis:
    `drop_analysis` takes it out of the turns before the last, whose prompt then is what `render`
    would have made. With turns="all" those turns are learned as they stand there, without their
    analysis and ending in `<|end|>`; turns="last" learns the last turn alone, exactly what is
    sampled.
    """
    tools = listed("tools", tools)
    response_formats = listed("response_formats", response_formats)
    system = System(
        identity=identity, knowledge_cutoff=knowledge_cutoff, date=date, reasoning=reasoning
    )
    conversation = _prepare(messages, system, tools, response_formats)
    if drop_analysis:
        conversation = _without_analysis(conversation, before=_last_turn(conversation))
    ids, mask = _join(conversation, tokenizer)
    if _is_final(conversation[-1]):
        ids[-1] = tokenizer.control("<|return|>")
    if turns == "last":
        history, _ = _join(conversation[: _last_turn(conversation)], tokenizer)
        mask[: len(history)] = [0] * len(history)
    return ids, mask


def encode(messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """Just these messages: nothing added, nothing dropped. The inverse of `parse`."""
    return _join(list(messages), tokenizer)[0]


def _prepare(
    messages: Sequence[AnyMessage],
    system: System,
    tools: Sequence[str | dict[str, Any] | Namespace],
    response_formats: Sequence[dict[str, Any]],
) -> list[Message]:
    """Translated, with a system message, with tools and formats described."""
    out = translate(messages)
    builtin = tuple(tool for tool in tools if isinstance(tool, str))
    described = tuple(tool for tool in tools if not isinstance(tool, str))
    if not any(message.role == "system" for message in out):
        out.insert(0, Message("system", dataclasses.replace(system, tools=builtin)))
    elif builtin:
        raise ValueError(
            f"the system Message is given, so its content must name the tools: "
            f"System(tools={builtin!r})."
        )
    if described or response_formats:
        _describe(out, described, tuple(response_formats))
    return out


def _without_analysis(messages: list[Message], before: int) -> list[Message]:
    """Without what is on the analysis channel before the last final message of [:before]."""
    finals = [n for n, message in enumerate(messages[:before]) if _is_final(message)]
    last = finals[-1] if finals else 0
    return [m for n, m in enumerate(messages) if n >= last or m.channel != "analysis"]


def _last_turn(messages: list[Message]) -> int:
    """Where the last turn of the assistant (and the tools it called) starts."""
    others = (n for n, m in enumerate(messages) if m.role not in ("assistant", "tool"))
    return 1 + max(others, default=-1)


def _describe(out: list[Message], tools: tuple, response_formats: tuple) -> None:
    """Puts tools and formats into the first developer message, made if there is none."""
    for position, message in enumerate(out):
        if message.role == "developer":
            if isinstance(message.content, str):
                raise ValueError(
                    "the developer Message is plain text, so tools cannot be added to it: "
                    "give it Developer(instructions=..., tools=...)."
                )
            developer = dataclasses.replace(
                message.content,
                tools=(*message.content.tools, *tools),
                response_formats=(*message.content.response_formats, *response_formats),
            )
            out[position] = dataclasses.replace(message, content=developer)
            return
    developer = Developer(tools=tools, response_formats=response_formats)
    after = 1 + next(n for n, message in enumerate(out) if message.role == "system")
    out.insert(after, Message("developer", developer))


def _is_final(message: Message) -> bool:
    return message.role == "assistant" and message.channel == "final"


def _namespaces(tools: Sequence[Any]) -> list[Namespace]:
    """Functions gathered in `functions`, beside the namespaces that are given whole."""
    functions = tuple(tool for tool in tools if isinstance(tool, Mapping))
    out = [Namespace(name="functions", tools=functions)] if functions else []
    for tool in tools:
        if isinstance(tool, str) and tool in BUILTIN:
            out.append(BUILTIN[tool])
        elif isinstance(tool, Namespace):
            out.append(tool)
        elif not isinstance(tool, Mapping):
            raise ValueError(f"built-in tools are {', '.join(BUILTIN)}; got {tool!r}.")
    return out


def _has_functions(messages: Sequence[Message]) -> bool:
    return any(
        space.name == "functions" and len(space.tools) > 0
        for message in messages
        if isinstance(message.content, Developer)
        for space in _namespaces(message.content.tools)
    )


def _system_text(system: System, has_functions: bool) -> str:
    top = [
        system.identity,
        system.knowledge_cutoff and f"Knowledge cutoff: {system.knowledge_cutoff}",
        system.date and f"Current date: {system.date}",
    ]
    channels = None
    if system.channels:
        channels = (
            f"# Valid channels: {', '.join(system.channels)}. "
            "Channel must be included for every message."
        )
        if has_functions:
            channels += "\nCalls to these tools must go to the commentary channel: 'functions'."
    sections = [
        "\n".join(line for line in top if line),
        system.reasoning and f"Reasoning: {system.reasoning}",
        tools_section(_namespaces(system.tools)) if system.tools else None,
        channels,
    ]
    return "\n\n".join(section for section in sections if section)


def _developer_text(developer: Developer) -> str:
    sections = []
    if developer.instructions is not None:
        sections += ["# Instructions", developer.instructions]
    if developer.tools:
        sections.append(tools_section(_namespaces(developer.tools)))
    if developer.response_formats:
        sections.append(formats_section(developer.response_formats))
    return "\n\n".join(sections)


def _text(message: Message, has_functions: bool) -> str:
    match message.content:
        case System() as system:
            return _system_text(system, has_functions)
        case Developer() as developer:
            return _developer_text(developer)
        case text:
            return text


def _join(messages: list[Message], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of the messages one after another, and 1 where the assistant samples the id."""
    has_functions = _has_functions(messages)
    ids: list[int] = []
    mask: list[int] = []
    in_turn = False  # the message before was the assistant's and did not end its turn
    for message in messages:
        head, body = _message(message, tokenizer, has_functions)
        sampled = int(message.role == "assistant")
        ids += [*head, *body]
        mask += [sampled * in_turn] * len(head) + [sampled] * len(body)
        in_turn = bool(sampled) and message.recipient is None and not _is_final(message)
    return ids, mask


def _message(
    message: Message, tokenizer: Tokenizer, has_functions: bool
) -> tuple[list[int], list[int]]:
    """The ids up to the role, which a prompt may end in, and the rest."""
    role = message.name if message.role == "tool" else message.role
    head = [tokenizer.control("<|start|>"), *tokenizer.encode(str(role))]
    body: list[int] = []
    if message.name is not None and message.role != "tool":
        body += tokenizer.encode(f":{message.name}")
    if message.recipient is not None and message.recipient != "all":
        body += tokenizer.encode(f" to={message.recipient}")
    if message.channel is not None:
        body += [tokenizer.control("<|channel|>"), *tokenizer.encode(message.channel)]
    if message.content_type is not None:
        constrained = message.content_type.startswith(CONSTRAIN)
        body += tokenizer.encode(" ") + [tokenizer.control(CONSTRAIN)] if constrained else []
        rest = message.content_type.removeprefix(CONSTRAIN)
        body += tokenizer.encode(rest if constrained else f" {rest}")
    is_call = message.role == "assistant" and message.recipient is not None
    body += [
        tokenizer.control("<|message|>"),
        *tokenizer.encode(_text(message, has_functions)),
        tokenizer.control("<|call|>" if is_call else "<|end|>"),
    ]
    return head, body
