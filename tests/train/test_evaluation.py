"""What recipes/tiny counts as right, its intervals, and how it asks another program."""

import re
import sys

import numpy as np
import pytest
from train_cases import RECIPES, harmony_tokenizer


@pytest.fixture(scope="module")
def recipe():
    """(questions, evaluate, crosscheck, a Chats)"""
    sys.path.insert(0, str(RECIPES))
    import chats
    import crosscheck
    import evaluate
    import questions

    sys.path.remove(str(RECIPES))
    # Enough for a tenth to be held out of whatever a question is about.
    words = [a + b + "er" for a in "br cl st tr gr".split() for b in "ow ea oo ai ie".split()]
    words += [word + "s" for word in words]
    return questions, evaluate, crosscheck, chats.Chats(words)


KINDS = {"add": 6, "tool_call": 6, "tool_result": 6, "hidden_instruction": 6}


@pytest.fixture(scope="module")
def asked(recipe):
    return recipe[0].drawn(recipe[3], KINDS, harmony_tokenizer())


def said(question, tokenizer, **changes) -> list[int]:
    """The ids of the answer that is expected, or of a changed one."""
    call = question.recipient is not None
    message = {
        "role": "assistant",
        "channel": "commentary" if call else "final",
        "recipient": question.recipient,
        "content": question.text,
    } | changes
    header = f" to={message['recipient']}" if message["recipient"] else ""
    end = changes.get("end", "<|call|>" if call else "<|return|>")
    text = f"{header}<|channel|>{message['channel']}<|message|>{message['content']}"
    ids = []
    for piece in text.replace("<|", "\0<|").replace("|>", "|>\0").split("\0"):
        ids += [tokenizer.special[piece]] if piece in tokenizer.special else tokenizer.encode(piece)
    return [*ids, tokenizer.special[end]] if end else ids


def test_the_expected_answer_is_right_and_all_others_are_not(recipe, asked):
    graded, tokenizer = recipe[0].graded, harmony_tokenizer()
    for question in asked:
        assert all(graded(question, said(question, tokenizer), tokenizer).values())
        assert not graded(question, said(question, tokenizer, content="x"), tokenizer)["right"]
        cut = graded(question, said(question, tokenizer, end=None), tokenizer)
        assert cut["right"] and not cut["stop"]
        other = "<|call|>" if question.recipient is None else "<|return|>"
        assert not graded(question, said(question, tokenizer, end=other), tokenizer)["stop"]
        assert not graded(question, [], tokenizer)["right"]
        if question.recipient is None:
            thought = said(question, tokenizer, channel="analysis")
            assert not graded(question, thought, tokenizer)["right"]
            continue
        wrong = graded(question, said(question, tokenizer, recipient="functions.x"), tokenizer)
        assert wrong == {
            "right": False,
            "stop": True,
            "parses": True,
            "name": False,
            "arguments": True,
        }
        wrong = graded(question, said(question, tokenizer, content='{"x": 1}'), tokenizer)
        assert wrong["name"] and wrong["parses"] and not (wrong["arguments"] or wrong["right"])
        spaced = question.text.replace(": ", " :  ")
        assert graded(question, said(question, tokenizer, content=spaced), tokenizer)["right"]
        broken = graded(question, said(question, tokenizer, content='{"x": '), tokenizer)
        assert not (broken["parses"] or broken["name"] or broken["right"])


def test_questions_are_held_out_and_of_their_kind(recipe, asked):
    questions, _, _, chats = recipe
    tokenizer = harmony_tokenizer()
    for question in asked:
        assert (question.recipient is not None) == (question.kind == "tool_call")
        assert (question.functions > 0) == (question.kind != "add")
        assert question.kind != "hidden_instruction" or "did not follow" in question.text
        assert question.length > len(said(question, tokenizer)) - 2
        assert tokenizer.decode(question.prompt).endswith("<|start|>assistant")
    levels = [question.reasoning for question in asked if question.kind == "add"]
    assert levels == ["low", "medium", "high"] * 2
    again = questions.drawn(chats, {"tool_call": 6}, tokenizer)  # whatever else is asked
    assert again == [question for question in asked if question.kind == "tool_call"]


def test_two_actions_are_offered_and_no_lookup(recipe):
    tokenizer = harmony_tokenizer()
    actions = {"add": "add|sum|plus", "timer": "timer", "send": "send|message"}
    seen = set()
    for question in recipe[0].drawn(recipe[3], {"two_actions": 40}, tokenizer):
        declared = re.findall(r"^type (\w+) =", tokenizer.decode(question.prompt), re.MULTILINE)
        assert question.functions == len(declared) == 2
        called = question.recipient.removeprefix("functions.")
        assert called in declared
        kinds = [[k for k, words in actions.items() if re.search(words, n)] for n in declared]
        (a,), (b,) = kinds
        assert a != b
        seen.add((a, b, declared.index(called)))
    assert len(seen) == 12  # six orders of two kinds, either of them called


def test_counts_by_level_and_by_functions_offered(recipe, asked):
    _, evaluate, _, _ = recipe
    tokenizer = harmony_tokenizer()
    answers = [said(question, tokenizer) for question in asked]
    wrong = next(i for i, q in enumerate(asked) if q.kind == "tool_call" and q.reasoning == "high")
    answers[wrong] = said(asked[wrong], tokenizer, recipient="functions.x", end="<|return|>")
    rows = evaluate.table(asked, answers, tokenizer)
    assert {kind: row["right"] for kind, row in rows.items()} == KINDS | {"tool_call": 5}
    row = rows["tool_call"]
    assert (row["parses"], row["name"], row["arguments"], row["stop"]) == (6, 5, 6, 5)
    by_level = {level: (x["right"], x["n"]) for level, x in row["by_reasoning"].items()}
    assert by_level == {"low": (2, 2), "medium": (2, 2), "high": (1, 2)}
    assert sum(x["right"] for x in row["by_functions"].values()) == 5
    assert "right stop token: 23 of 24" in evaluate.printed(rows)
    assert "functions.x" in evaluate.mistakes(asked, answers, tokenizer, 1)


def test_interval(recipe):
    interval, z = recipe[0].interval, 1.959964
    for right, n in ((81, 100), (0, 12), (12, 12), (399, 400)):
        low, high = interval(right, n)
        for bound in (low, high):  # Wilson: the share seen lies z deviations from either bound
            if 1e-9 < bound < 1 - 1e-9:
                assert abs(right / n - bound) == pytest.approx(z * (bound * (1 - bound) / n) ** 0.5)
        assert -1e-12 <= low <= right / n <= high <= 1 + 1e-12
    assert interval(12, 12)[0] == pytest.approx(0.7575, abs=1e-4)


def test_another_program_is_followed_where_it_parts(recipe):
    greedy = recipe[2].greedy
    calls = []

    def program(ids):
        """Counts on from what it reads, but leaves out 5."""
        calls.append(len(ids))
        following = [(i + 1) % 10 if i != 4 else 6 for i in ids]
        return np.eye(10)[following]

    assert greedy(program, [0, 1], [2, 3, 4], {7}, 20) == [2, 3, 4] and calls == [4]
    assert greedy(program, [0, 1], [2, 3, 4, 5, 6, 7], {7}, 20) == [2, 3, 4, 6, 7]
    assert greedy(program, [0, 1], [2, 8, 9, 0], {7}, 4) == [2, 3, 4, 6]
    assert greedy(program, [5], [6, 7], {7}, 20) == [6, 7]
