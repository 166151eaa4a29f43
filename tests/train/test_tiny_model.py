"""The embedded model does what its card says, on questions that its training never saw.

A sample small enough for a CPU; recipes/tiny/evaluate.py measures the card's figures.
"""

import json
import sys

import numpy as np
import pytest
from train_cases import RECIPES

import gptoss_jax as gj
from gptoss_jax.checkpoint import open_checkpoint

SUMS = 12
LEVELS = ("low", "medium", "high")


def function(name, description, /, **parameters):
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": list(properties)},
    }


PRICE = function("find_price", "Get the price of a item.", product="string")
WEATHER = function("get_weather", "The weather of a city", city="string")
AGE = function("get_age", "Get the age of a person.", name="string")
SEND = function("send_message", "Send a message to a person.", to="string", text="string")
TIMER = function("set_timer", "Set a timer.", minutes="integer")
# (asked, offered, called, arguments): one function, then two, in both orders.
CALLS = (
    ("What is the weather in Rome?", [WEATHER], "get_weather", {"city": "Rome"}),
    ("Set a timer for 25 minutes.", [TIMER], "set_timer", {"minutes": 25}),
    ("Tell Anna: good morning", [SEND], "send_message", {"to": "Anna", "text": "good morning"}),
    ("What is the price of bread?", [PRICE, WEATHER], "find_price", {"product": "bread"}),
    ("What is the weather in Oslo?", [PRICE, WEATHER], "get_weather", {"city": "Oslo"}),
    ("Tell me the age of Grace.", [PRICE, AGE], "get_age", {"name": "Grace"}),
)


@pytest.fixture(scope="module")
def said():
    """(questions about sums, their answers' ids and messages; the same of calls and greetings),
    all answered in one batch."""
    sys.path.insert(0, str(RECIPES))
    import chats
    import evaluate
    import questions

    sys.path.remove(str(RECIPES))
    tokenizer = gj.Tokenizer.load("tiny")
    words = "river stone bread paper garden window summer letter silver winter".split()
    sizes = {"add_two_digits": SUMS, "greet": 2}
    asked = questions.drawn(chats.Chats(words), sizes, tokenizer)
    for i, (text, tools, name, arguments) in enumerate(CALLS):
        user = [{"role": "user", "content": text}]
        prompt = gj.harmony.render(user, tokenizer, reasoning=LEVELS[i % 3], tools=tools)
        expected = f"functions.{name}", json.dumps(arguments)
        asked.append(
            questions.Question("call", LEVELS[i % 3], prompt, text, *expected, 60, len(tools))
        )
    answers = evaluate.answered(gj.load("tiny"), asked, tokenizer, batch=len(asked), most=160)
    grades = [questions.graded(q, ids, tokenizer) for q, ids in zip(asked, answers, strict=True)]
    return asked, answers, grades


def test_held_out_sums(said):
    _, _, grades = said
    # The card says 100 %; at 95 % one of 12 is wrong in a third of all samples, two in a tenth.
    assert sum(grade["right"] for grade in grades[:SUMS]) >= SUMS - 1


def test_tool_calls(said):
    _, _, grades = said
    calls = grades[-len(CALLS) :]
    assert all(grade["arguments"] for grade in calls)
    # Where several functions are offered, the card says, it may take one's verb for another's.
    for (_, offered, *_), grade in zip(CALLS, calls, strict=True):
        assert grade["name"] or len(offered) > 1


def test_every_turn_ends_in_the_right_stop_token(said):
    asked, answers, grades = said
    tokenizer = gj.Tokenizer.load("tiny")
    assert all(grade["stop"] for grade in grades)
    for question, ids in zip(asked, answers, strict=True):
        parsed = gj.harmony.parse(ids, tokenizer)
        assert parsed.finish == ("<|call|>" if question.recipient else "<|return|>")
        assert not parsed.problems


def test_reasoning_sets_how_much_it_thinks(said):
    _, answers, _ = said
    low, medium, high = (np.mean([len(ids) for ids in answers[i:SUMS:3]]) for i in range(3))
    assert low < medium < high


def test_a_newcomer_s_first_words_are_answered(said):
    _, _, grades = said
    assert all(grade["right"] for grade in grades[SUMS : SUMS + 2])


def test_its_files():
    found = open_checkpoint("tiny").require()
    config = found.config
    assert found.layout == "hf-mxfp4"
    assert 2e6 <= config.parameters <= 8e6
    folder = found.files.folder
    assert sum(f.stat().st_size for f in folder.iterdir()) < 6e6
    tokenizer = gj.Tokenizer.load("tiny")
    assert tokenizer.size == config.vocab
    text = "Sé 2 ≤ 10, <|start|> naïve 漢字 \N{GRINNING FACE}\r\n\t\x00"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.special.values())  # text never becomes a control token
    stops = {tokenizer.special[name] for name in ("<|return|>", "<|call|>", "<|endoftext|>")}
    assert set(gj.load("tiny").stop_tokens) == stops
    card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert f"{config.parameters:,}" in card
