"""examples/chat_with_tools.py, driven by a model whose replies are written here."""

import importlib.util
import pathlib
import types

import pytest

import gptoss_jax as gj
from gptoss_jax.text.harmony import Message, encode, parse

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "chat_with_tools.py"
CALL = Message(
    "assistant", '{"city": "Oslo"}', "commentary", "functions.get_weather", "<|constrain|>json"
)
ANALYSIS, FINAL = (
    Message("assistant", "I look.", "analysis"),
    Message("assistant", "Rain.", "final"),
)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("chat_with_tools", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def replies(monkeypatch, small):
    """Stands for generate: gives these replies one after another, and keeps the prompts."""
    queue, prompts = [], []

    def generate(model, batch, *, max_new_tokens, sampler):
        assert sampler.temperature == 0.0
        (prompt,) = batch
        prompts.append(prompt)
        messages, reason = queue.pop(0)
        ids = encode(messages, small)
        # without the `<|start|>assistant` of the prompt, and without the token that ends it
        ids = ids[len(encode([Message("assistant")], small)) - 2 : -1]
        return types.SimpleNamespace(tokens=[ids[:max_new_tokens]], finish_reasons=[reason])

    monkeypatch.setattr(gj, "generate", generate)
    return queue, prompts


def converse(example, small, **keywords):
    keywords = {"max_new_tokens": 1000} | keywords
    return example.converse(None, small, [Message("user", "Oslo?")], **keywords)


def test_call_and_answer(example, replies, small):
    queue, prompts = replies
    queue += [([ANALYSIS, CALL], "stop"), ([FINAL], "stop")]
    messages = converse(example, small)
    result = Message(
        "tool",
        '{"weather": "light rain"}',
        "commentary",
        "assistant",
        name="functions.get_weather",
    )
    assert messages == [Message("user", "Oslo?"), ANALYSIS, CALL, result, FINAL]
    assert parse(prompts[1], small)[2:] == messages[:-1]  # the first two are system and tools
    assert prompts[1][: len(prompts[0])] == prompts[0]


def test_a_call_cut_short_is_not_run(example, replies, small):
    queue, _ = replies
    queue += [([CALL], "length")]
    short = converse(example, small, max_new_tokens=60)[-1]
    assert short.recipient == "functions.get_weather"
    assert CALL.content.startswith(short.content)


@pytest.mark.parametrize(
    "call",
    [
        Message("assistant", "{broken", "commentary", "functions.get_weather"),
        Message("assistant", "[1]", "commentary", "functions.get_weather"),
        Message("assistant", '{"town": "Oslo"}', "commentary", "functions.get_weather"),
        Message("assistant", "{}", "commentary", "functions.format_disk"),
    ],
)
def test_wrong_calls_are_told_to_the_model(call, example, replies, small):
    queue, _ = replies
    queue += [([call], "stop"), ([FINAL], "stop")]
    *_, result, final = converse(example, small)
    assert result.role == "tool"
    assert result.name == call.recipient
    assert '"error"' in result.content
    assert final == FINAL


def test_calls_come_to_an_end(example, replies, small):
    queue, prompts = replies
    queue += [([CALL], "stop")] * 10
    converse(example, small, max_calls=2)
    assert len(prompts) == 3


def test_the_embedded_model_calls_the_function(example, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["chat_with_tools.py", "What is the weather in Oslo?"])
    example.main()
    *_, call, result, _, final = capsys.readouterr().out.splitlines()
    assert call == '[commentary to functions.get_weather] {"city": "Oslo"}'
    assert result == '[commentary to assistant] {"weather": "light rain"}'
    assert final.startswith("[final]")
    assert "light rain" in final
