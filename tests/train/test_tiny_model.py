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

# Of sums and of calls 19 of 20 is the bar: 95 %. The card's model has 400 of 400 sums, 400 of 400
# calls of functions whose words it knows and 393 of 400 of others. A model that takes the right
# function in 81 % passes in a twelfth of all samples.
SUMS, KNOWN, UNKNOWN, GREETINGS = 20, 12, 8, 2
BAR = 0.95
# What functions are named by and asked about; seven of them name no function in training.
WORDS = (
    "river stone bread paper garden window summer letter silver winter morning candle kitchen "
    "mountain harbour village carpet orange forest bridge castle market hammer basket bottle "
    "doctor farmer sister brother flower island circle corner dinner engine finger ground handle "
    "insect jacket kettle ladder mirror needle pencil pocket ribbon saddle tailor velvet wagon "
    "anchor barrel cattle dragon eagle fountain glove honey"
).split()
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
# (asked, offered, called, arguments): one function, then several, whichever comes first.
CALLS = (
    ("What is the weather in Rome?", [WEATHER], "get_weather", {"city": "Rome"}),
    ("Set a timer for 25 minutes.", [TIMER], "set_timer", {"minutes": 25}),
    ("Tell Anna: good morning", [SEND], "send_message", {"to": "Anna", "text": "good morning"}),
    ("What is the price of bread?", [PRICE, WEATHER], "find_price", {"product": "bread"}),
    ("What is the weather in Oslo?", [PRICE, WEATHER], "get_weather", {"city": "Oslo"}),
    ("Tell me the age of Grace.", [PRICE, AGE], "get_age", {"name": "Grace"}),
    ("Find the age of Tom.", [TIMER, AGE, PRICE], "get_age", {"name": "Tom"}),
    ("Set a timer for 7 minutes.", [WEATHER, TIMER], "set_timer", {"minutes": 7}),
)


@pytest.fixture(scope="module")
def said():
    """(questions, the ids answered, grades), kind by kind, all answered in one batch."""
    sys.path.insert(0, str(RECIPES))
    import chats
    import evaluate
    import questions

    sys.path.remove(str(RECIPES))
    tokenizer = gj.Tokenizer.load("tiny")
    sizes = {
        "add_two_digits": SUMS,
        "tool_call": KNOWN,
        "unseen_function": UNKNOWN,
        "greet": GREETINGS,
    }
    # Another seed than evaluate.py's, which the card's figures come from.
    asked = questions.drawn(chats.Chats(WORDS), sizes, tokenizer, seed=1)
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


def share(said, *kinds, of="right"):
    asked, _, grades = said
    return np.mean([grade[of] for q, grade in zip(asked, grades, strict=True) if q.kind in kinds])


def test_held_out_sums(said):
    assert share(said, "add_two_digits") >= BAR


def test_tool_calls(said):
    """The right function, whichever of up to five are offered, with the right arguments."""
    asked, _, _ = said
    calls = [q for q in asked if q.kind in ("tool_call", "unseen_function")]
    assert len(calls) == KNOWN + UNKNOWN
    # Where one function is offered, its name is no choice.
    assert sum(q.functions > 1 for q in calls) >= 8
    assert share(said, "tool_call", "unseen_function", of="parses") == 1
    assert share(said, "tool_call", "unseen_function") >= BAR


def test_calls_that_users_write(said):
    asked, _, grades = said
    wrong = [
        q.asked for q, g in zip(asked, grades, strict=True) if q.kind == "call" and not g["right"]
    ]
    assert not wrong


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
    assert share(said, "greet") == 1


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
