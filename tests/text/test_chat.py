"""Dicts of the chat APIs become Harmony messages."""

import pytest

from gptoss_jax.text.harmony import Developer, Message
from gptoss_jax.text.harmony.chat import translate

JSON = "<|constrain|>json"


def test_thinking_is_analysis_and_content_is_final():
    for field in ("thinking", "reasoning_content", "reasoning"):
        assert translate([{"role": "assistant", field: "T", "content": "C"}]) == [
            Message("assistant", "T", "analysis"),
            Message("assistant", "C", "final"),
        ]


def test_system_and_developer_are_instructions():
    assert translate(
        [
            {"role": "system", "content": "A"},
            {"role": "developer", "content": [{"type": "text", "text": "B"}, "C"]},
            {"role": "user", "content": "x"},
            {"role": "system", "content": "D"},
        ]
    ) == [
        Message("developer", Developer(instructions="A\n\nBC")),
        Message("user", "x"),
        Message("developer", Developer(instructions="D")),
    ]
    given = Message("developer", Developer(instructions="E"))
    assert translate([given, {"role": "system", "content": "F"}]) == [
        given,
        Message("developer", Developer(instructions="F")),
    ]


def test_calls_and_results_find_each_other():
    messages = [
        {"role": "user", "content": "x", "name": "ada"},
        {
            "role": "assistant",
            "thinking": "T",
            "content": "I look.",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
                {"id": "2", "function": {"name": "functions.g", "arguments": {"b": "é"}}},
                {"name": "h"},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "name": "g", "content": {"ok": True}},
        {"role": "tool", "content": None},
    ]
    result = {"channel": "commentary", "recipient": "assistant"}
    assert translate(messages) == [
        Message("user", "x", name="ada"),
        Message("assistant", "T", "analysis"),
        Message("assistant", "I look.", "commentary"),
        Message("assistant", '{"a":1}', "commentary", "functions.f", JSON),
        Message("assistant", '{"b": "é"}', "commentary", "functions.g", JSON),
        Message("assistant", "{}", "commentary", "functions.h", JSON),
        Message("tool", "one", name="functions.f", **result),
        Message("tool", '{"ok": true}', name="functions.g", **result),
        Message("tool", "", name="functions.h", **result),
    ]


def test_built_in_tools_are_called_in_analysis():
    call = {"role": "assistant", "tool_calls": [{"name": "python", "arguments": "print(1)"}]}
    assert translate([call, {"role": "tool", "content": "1"}]) == [
        Message("assistant", "print(1)", "analysis", "python", "code"),
        Message("tool", "1", "analysis", "assistant", name="python"),
    ]


def test_a_message_stays_and_its_call_can_be_answered():
    call = Message("assistant", "{}", "commentary", "functions.f", JSON)
    (same, answer) = translate([call, {"role": "tool", "content": "1"}])
    assert same is call
    assert answer.name == "functions.f"


def test_a_dict_may_say_its_channel():
    assert translate([{"role": "assistant", "content": "x", "channel": "commentary"}]) == [
        Message("assistant", "x", "commentary")
    ]


@pytest.mark.parametrize(
    "message, problem",
    [
        ({"content": "x"}, "message 1: role.*None"),
        ({"role": "user", "content": 3}, "message 1: content is text"),
        ({"role": "user", "content": [{"type": "image"}]}, "message 1: content is text"),
        ({"role": "tool", "content": "x"}, "message 1: a tool message needs a name"),
        ({"role": "assistant", "tool_calls": [{"arguments": "{}"}]}, "message 1: a tool call"),
        ({"role": "assistant", "tool_calls": "f()"}, "message 1: tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": {"name": "f"}}, "message 1: tool_calls must be a li"),
        ({"role": "assistant", "tool_calls": [None]}, "message 1: a tool call holds"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, "message 1: a tool call holds"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {1, 2}}]},
            "message 1: arguments must be .* JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": float("nan")}]},
            "message 1: arguments must be .* JSON",
        ),
        ({"role": "assistant", "tool_calls": [{"id": [1], "name": "f"}]}, "1: the id of a tool"),
        ({"role": "tool", "name": "f", "tool_call_id": {}}, "message 1: the id of a tool call"),
        ({"role": "tool", "name": "f", "content": {"a": {1}}}, "message 1: content must be"),
        ({"role": "tool", "name": 3, "content": "x"}, "message 1: .*name; got 3"),
        ({"role": "user", "content": "x", "name": 3}, "message 1: name is a word"),
        ({"role": "user", "content": "x", "channel": ["final"]}, "message 1: channel is a word"),
    ],
)
def test_what_cannot_be_translated(annotations_unchecked, message, problem):
    with pytest.raises(ValueError, match=problem):
        translate([{"role": "user", "content": "x"}, message])


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}, 3, b"hi"])
def test_messages_come_in_a_list(annotations_unchecked, messages):
    with pytest.raises(ValueError, match="messages must be a list"):
        translate(messages)
