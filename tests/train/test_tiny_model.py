"""The embedded model does what its card says, on questions that its training never saw.

A sample small enough for a CPU; recipes/tiny/evaluate.py measures the card's figures.
"""

import json
import random
import sys

import numpy as np
import pytest
from train_cases import RECIPES

import gptoss_jax as gj
from gptoss_jax.checkpoint import open_checkpoint

SUMS, CALLS = 12, 6


@pytest.fixture(scope="module")
def held_out():
    """(prompts, expected, answers): sums, then tool calls, then greetings; one batch for all."""
    sys.path.insert(0, str(RECIPES))
    import chats
    import evaluate

    sys.path.remove(str(RECIPES))
    tokenizer = gj.Tokenizer.load("tiny")
    words = "river stone bread paper garden window summer letter silver winter".split()
    makers = chats.Chats(words)
    rng = random.Random(0)
    prompts, expected = [], []
    for kind, n in (("add_two_digits", SUMS), ("tool_call", CALLS), ("greet", 2)):
        for i in range(n):
            reasoning = ("low", "medium", "high")[i % 3]
            messages, about, answer = evaluate.question(makers, rng, kind, reasoning)
            prompts.append(gj.harmony.render(messages, tokenizer, reasoning=reasoning, **about))
            expected.append(answer)
    ends = {tokenizer.special[name]: name for name in ("<|return|>", "<|call|>", "<|endoftext|>")}
    answers = evaluate.answered(gj.load("tiny"), prompts, ends, most=160)
    parsed = [gj.harmony.parse(ids, tokenizer) for ids in answers]
    return expected, parsed, [len(ids) for ids in answers]


def test_held_out_sums(held_out):
    expected, parsed, _ = held_out
    right = [
        said[-1].channel == "final" and said[-1].content == text
        for (_, text), said in zip(expected[:SUMS], parsed, strict=False)
    ]
    # The card says 100 %; at 95 % one of 12 is wrong in half of all samples, two in a tenth.
    assert sum(right) >= SUMS - 1


def test_tool_calls(held_out):
    expected, parsed, _ = held_out
    calls = slice(SUMS, SUMS + CALLS)
    arguments = [
        json.loads(said[-1].content) == json.loads(text)
        for (_, text), said in zip(expected[calls], parsed[calls], strict=True)
    ]
    assert sum(arguments) >= CALLS - 1
    # The card: one call in six goes to a function of another verb where several are offered.
    functions = [
        said[-1].recipient == recipient
        for (recipient, _), said in zip(expected[calls], parsed[calls], strict=True)
    ]
    assert sum(functions) >= CALLS - 2


def test_every_turn_ends_in_the_right_stop_token(held_out):
    expected, parsed, _ = held_out
    for (recipient, _), said in zip(expected, parsed, strict=True):
        assert said.finish == ("<|call|>" if recipient else "<|return|>")
        assert not said.problems


def test_reasoning_sets_how_much_it_thinks(held_out):
    _, _, lengths = held_out
    low, medium, high = (np.mean(lengths[i:SUMS:3]) for i in range(3))
    assert low < medium < high


def test_a_newcomer_s_first_words_are_answered(held_out):
    _, parsed, _ = held_out
    for said in parsed[-2:]:
        assert "Ask me a sum" in said[-1].content


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
