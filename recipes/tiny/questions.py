"""Held-out questions with the answers expected of them, and what counts as right.

An answer is right if its final message is the expected one to the letter. A call is right if it
goes to the expected function, in the commentary channel, with JSON arguments equal to the expected
ones. The stop token is right if <|return|> ends the one and <|call|> the other.
"""

import dataclasses
import json
import random

from chats import REASONING, Chats, played

from gptoss_jax.text import Tokenizer, harmony

ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")
# Asked with functions; every other kind is one of Chats.makers, or "add_two_digits".
# unseen_function: names whose last word training never shows. two_actions: two of ACTIONS are
# offered and no lookup, which training never does.
CALLS = ("tool_call", "unseen_function", "two_actions")
ACTIONS = ("add", "timer", "send")
RESULTS = ("tool_result", "hidden_instruction")


@dataclasses.dataclass(frozen=True)
class Question:
    """asked: the last message. recipient: of the expected call, None where an answer is expected.
    text: of that call's arguments or that answer. length: tokens that the recipe would answer with.
    functions: how many are offered."""

    kind: str
    reasoning: str
    prompt: list[int]
    asked: str
    recipient: str | None
    text: str
    length: int
    functions: int


def draw(chats: Chats, rng, kind: str, reasoning: str, tokenizer: Tokenizer) -> Question:
    """One question of a kind from the held-out side, at a reasoning level."""
    about = {"date": chats.date(rng), "tools": [], "reasoning": reasoning}
    if kind in CALLS + RESULTS:
        first, other = rng.sample(ACTIONS, 2) if kind == "two_actions" else (None, None)
        talk = chats.tools.conversation(
            rng,
            True,
            first,
            unseen=kind == "unseen_function",
            note=True if kind == "hidden_instruction" else None,
        )
        about["tools"] = talk["tools"]
        if other is not None:
            called = talk["turns"][0]["call"]
            own = next(tool for tool in talk["tools"] if tool["name"] == called)
            about["tools"] = [own, getattr(chats.tools.functions, other)(rng)]
            rng.shuffle(about["tools"])
        call, use = talk["turns"]
        messages, last = played(call, reasoning), call
        if kind in RESULTS:
            messages, last = messages + played(use, reasoning), use
    else:
        asked, analysis, final = chats.question(rng, True, kind)
        last = {"user": asked, "analysis": analysis, "final": final}
        messages = played(last, reasoning)
    given = max(i for i, m in enumerate(messages) if m["role"] != "assistant") + 1
    prompt = harmony.render(messages[:given], tokenizer, **about)
    whole, _ = harmony.render_training(
        messages, tokenizer, turns="last", drop_analysis=False, **about
    )
    return Question(
        kind=kind,
        reasoning=reasoning,
        prompt=prompt,
        asked=messages[given - 1]["content"],
        recipient=messages[-1].get("recipient"),
        text=messages[-1]["content"],
        length=len(whole) - len(prompt),
        functions=len(about["tools"]),
    )


def drawn(chats: Chats, sizes: dict[str, int], tokenizer: Tokenizer, *, seed=0) -> list[Question]:
    """So many of each kind, a third at each reasoning level; a kind's do not depend on the rest."""
    found = []
    for kind, n in sizes.items():
        rng = random.Random(f"{kind} {seed}")
        levels = (REASONING[i % len(REASONING)] for i in range(n))
        found += [draw(chats, rng, kind, level, tokenizer) for level in levels]
    return found


def graded(question: Question, ids: list[int], tokenizer: Tokenizer) -> dict[str, bool]:
    """ids: the answer, with the stop token that ended it if one did.

    {"right", "stop"}, and of calls "parses" (a call with JSON arguments), "name", "arguments".
    """
    said = harmony.parse(ids, tokenizer)
    last = said[-1] if said else None
    wanted = "<|call|>" if question.recipient else "<|return|>"
    stop = bool(ids) and ids[-1] == tokenizer.special[wanted]
    if question.recipient is None:
        right = last is not None and last.recipient is None and last.channel == "final"
        return {"right": right and last.content == question.text, "stop": stop}
    try:
        assert last is not None
        given = json.loads(last.content)
        parses = last.channel == "commentary" and isinstance(given, dict)
    except (AssertionError, json.JSONDecodeError):
        given, parses = None, False
    name = parses and last.recipient == question.recipient
    arguments = parses and given == json.loads(question.text)
    return {
        "right": name and arguments,
        "stop": stop,
        "parses": parses,
        "name": name,
        "arguments": arguments,
    }


def interval(right: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of which `right` of n draws were seen."""
    z = 1.959964  # standard deviations
    p, wider = right / n, 1 + z * z / n
    middle = p + z * z / (2 * n)
    spread = z * (p * (1 - p) / n + (z / (2 * n)) ** 2) ** 0.5
    return (middle - spread) / wider, (middle + spread) / wider
