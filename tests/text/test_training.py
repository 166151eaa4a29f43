"""What is learned: exactly what the assistant samples, the token that ends it included."""

import openai_harmony as oh
import pytest

from gptoss_jax.text.harmony import Message, System, parse, render, render_training

CALL = Message("assistant", "{}", "commentary", "functions.f", "<|constrain|>json")
RESULT = Message("tool", "3", "commentary", "assistant", name="functions.f")
TWO_TURNS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 3?"},
    {"role": "assistant", "thinking": "2+3", "content": "5"},
]


def learned(ids, mask, tokenizer):
    """The pieces that are learned, apart."""
    pieces, inside = [], False
    for id, learn in zip(ids, mask, strict=True):
        if learn and not inside:
            pieces.append([])
        if learn:
            pieces[-1].append(id)
        inside = bool(learn)
    return [tokenizer.decode(piece) for piece in pieces]


def test_two_turns(tokenizer):
    ids, mask = render_training(TWO_TURNS, tokenizer)
    assert set(mask) == {0, 1}
    assert learned(ids, mask, tokenizer) == [
        "<|channel|>final<|message|>2<|end|>",
        "<|channel|>analysis<|message|>2+3<|end|>"
        "<|start|>assistant<|channel|>final<|message|>5<|return|>",
    ]
    last = render_training(TWO_TURNS, tokenizer, turns="last")
    assert last[0] == ids
    assert learned(*last, tokenizer) == learned(ids, mask, tokenizer)[1:]


def test_calls(tokenizer):
    messages = [Message("user", "x"), Message("assistant", "a", "analysis"), CALL, CALL, RESULT]
    ids, mask = render_training([*messages, Message("assistant", "b", "final")], tokenizer)
    call = " to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
    assert learned(ids, mask, tokenizer) == [
        # after analysis the model begins the next message itself; after a call it is begun for it
        f"<|channel|>analysis<|message|>a<|end|><|start|>assistant{call}",
        call,
        "<|channel|>final<|message|>b<|return|>",
    ]
    ids, mask = render_training(messages[:3], tokenizer, turns="last")
    assert tokenizer.decode(ids[-1:]) == "<|call|>"
    assert mask[-1] == 1


def test_a_final_message_ends_the_turn_whoever_speaks_next(tokenizer):
    """The model does not learn to go on after it: the next header was begun for it."""
    again = Message("assistant", "b", "final")
    ids, mask = render_training([Message("user", "x"), again, again], tokenizer)
    assert learned(ids, mask, tokenizer) == [
        "<|channel|>final<|message|>b<|end|>",
        "<|channel|>final<|message|>b<|return|>",
    ]


def test_what_is_learned_follows_the_prompt(tokenizer):
    """prompt + what is sampled == what is learned from, whatever came before."""
    for messages in (TWO_TURNS, TWO_TURNS[:2], [*TWO_TURNS[:3], CALL, RESULT, TWO_TURNS[3]]):
        ids, mask = render_training(messages, tokenizer, turns="last")
        start = mask.index(1)
        turn = next(n for n in (3, 1) if n < len(messages))
        assert ids[:start] == render(messages[:turn], tokenizer)


def test_shorter_conversations_begin_longer_ones(tokenizer):
    short, _ = render_training(TWO_TURNS[:2], tokenizer)
    long, _ = render_training(TWO_TURNS, tokenizer)
    assert short[:-1] == long[: len(short) - 1]
    assert tokenizer.decode([short[-1], long[len(short) - 1]]) == "<|return|><|end|>"


def test_thinking_of_the_last_turn_stays(tokenizer):
    three = [*TWO_TURNS, {"role": "user", "content": "?"}, TWO_TURNS[3]]
    text = tokenizer.decode(render_training(three, tokenizer)[0])
    assert text.count("2+3") == 1
    assert text.endswith(
        "<|channel|>analysis<|message|>2+3<|end|>"
        "<|start|>assistant<|channel|>final<|message|>5<|return|>"
    )
    whole = tokenizer.decode(render_training(three, tokenizer, drop_analysis=False)[0])
    assert whole.count("2+3") == 2


def test_equal_to_openai_harmony(o200k, official):
    conversation = oh.Conversation.from_messages(
        [
            oh.Message.from_role_and_content(oh.Role.SYSTEM, oh.SystemContent.new()),
            oh.Message.from_role_and_content(oh.Role.USER, "x"),
            oh.Message.from_role_and_content(oh.Role.ASSISTANT, "a").with_channel("analysis"),
            oh.Message.from_role_and_content(oh.Role.ASSISTANT, "b").with_channel("final"),
        ]
    )
    theirs = official.render_conversation_for_training(
        conversation, oh.RenderConversationConfig(auto_drop_analysis=False)
    )
    messages = [
        Message("system", System()),
        Message("user", "x"),
        Message("assistant", "a", "analysis"),
        Message("assistant", "b", "final"),
    ]
    assert render_training(messages, o200k)[0] == theirs
    assert parse(theirs, o200k) == parse(render_training(messages, o200k)[0], o200k)


@pytest.mark.parametrize("turns", ["all", "last"])
def test_a_conversation_that_ends_with_the_user_teaches_nothing_new(turns, tokenizer):
    _, mask = render_training(TWO_TURNS[:1], tokenizer, turns=turns)
    assert sum(mask) == 0
