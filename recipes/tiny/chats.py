"""The mixture: one conversation after another, each ready for the Harmony renderer."""

import random

from arithmetic import add, compare, multiply, parity, subtract, two_digits
from talk import Talk
from tools import CITIES, PEOPLE, Tools
from wordlist import Words

REASONING = ("low", "medium", "high")
INSTRUCTIONS = (
    "Be brief.",
    "Answer briefly.",
    "You are a helpful assistant.",
    "Be kind and brief.",
    "Help the user.",
    "Answer the question.",
    "You are a careful assistant. Answer correctly.",
)


class Chats:
    """Draws conversations: {"messages", "reasoning", "tools", "date"}, messages as plain dicts."""

    def __init__(self, words: list[str], with_tools: float = 0.36):
        """with_tools: share of conversations in which tools are offered."""
        self.with_tools = with_tools
        self.words, self.tools = Words(words), Tools(words)
        self.talk = Talk(words, CITIES + PEOPLE)
        w, t = self.words, self.talk
        # weights: how much practice each needs, found by looking at what was still wrong
        self.makers = {
            "add": (add, 16),
            "subtract": (subtract, 14),
            "multiply": (multiply, 8),
            "compare": (compare, 5),
            "parity": (parity, 2),
            "count_letter": (w.count_letter, 8),
            "length": (w.length, 5),
            "reverse": (w.reverse, 9),
            "spell": (w.spell, 8),
            "end": (w.end, 3),
            "sort": (w.sort, 9),
            "reverse_list": (w.reverse_list, 4),
            "pick": (w.pick, 4),
            "extreme": (w.extreme, 5),
            "how_many": (w.how_many, 2),
            "repeat": (w.repeat, 4),
            "as_json": (w.as_json, 4),
            "greet": (t.greet, 2),
            "about": (t.about, 3),
            "unknown": (t.unknown, 4),
        }

    def question(self, rng, wanted=False, kind=None):
        if kind is None:
            kinds = list(self.makers)
            kind = rng.choices(kinds, [self.makers[k][1] for k in kinds])[0]
        if kind == "add_two_digits":
            return add(rng, wanted, operand=two_digits)
        asked, analysis, final = self.makers[kind][0](rng, wanted)
        return (asked if kind == "repeat" else casual(rng, asked)), analysis, final

    def draw(self, rng: random.Random, wanted=False, kind=None, reasoning=None) -> dict:
        """One conversation. wanted: from the held-out side. kind: one question of that kind,
        "tools", or None for the whole mixture."""
        reasoning = reasoning or rng.choice(REASONING)
        about = {"reasoning": reasoning, "tools": [], "date": self.date(rng)}
        messages = []
        if rng.random() < 0.15:
            messages.append({"role": "developer", "content": rng.choice(INSTRUCTIONS)})
        with_tools = kind == "tools" or (kind is None and rng.random() < self.with_tools)
        if with_tools and (kind == "tools" or rng.random() < 0.9):
            talk = self.tools.conversation(rng, wanted)
            about["tools"] = talk["tools"]
            talk["turns"][0]["user"] = casual(rng, talk["turns"][0]["user"])
            for turn in talk["turns"]:
                messages += played(turn, reasoning)
            return about | {"messages": messages}
        if with_tools:  # offered, not needed: nothing that adds, since a sum may be asked
            offered = self.tools.conversation(rng, wanted, "lookup")["tools"]
            about["tools"] = [tool for tool in offered if "number" not in kinds_of(tool)]
        turns = 1 if kind else rng.choices((1, 2, 3), (88, 9, 3))[0]
        for _ in range(turns):
            question, analysis, final = self.question(rng, wanted, kind)
            messages += played({"user": question, "analysis": analysis, "final": final}, reasoning)
        return about | {"messages": messages}

    @staticmethod
    def date(rng) -> str | None:
        if rng.random() < 0.6:
            return None
        return f"20{rng.randrange(24, 32)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"


def kinds_of(tool: dict) -> list[str]:
    return [parameter["type"] for parameter in tool["parameters"]["properties"].values()]


def casual(rng, question: str) -> str:
    """Now and then as people type: no capital at the start, no mark at the end, a please."""
    if rng.random() < 0.12 and question[:2].istitle():
        question = question[0].lower() + question[1:]
    if rng.random() < 0.12 and question[-1] in "?.":
        question = question[:-1]
    if rng.random() < 0.04 and question[-1] not in "?.!" and question[-1].isalnum():
        question += " please"
    return question


def played(turn: dict, reasoning: str) -> list[dict]:
    """Messages of one turn: what was asked or returned, the analysis, then the answer or call."""
    out = []
    if "user" in turn:
        out.append({"role": "user", "content": turn["user"]})
    if "tool" in turn:
        out.append({"role": "tool", "name": f"functions.{turn['tool']}", "content": turn["result"]})
    thinking = turn["analysis"][reasoning]
    if thinking:
        out.append({"role": "assistant", "channel": "analysis", "content": thinking})
    if "call" in turn:
        out.append(
            {
                "role": "assistant",
                "channel": "commentary",
                "recipient": f"functions.{turn['call']}",
                "content_type": "<|constrain|>json",
                "content": turn["arguments"],
            }
        )
    else:
        out.append({"role": "assistant", "channel": "final", "content": turn["final"]})
    return out
