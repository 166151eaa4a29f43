"""Reading what models sample, well-formed or not, in pieces or whole."""

import random

import openai_harmony as oh
import pytest

from gptoss_jax.text.harmony import HarmonyError, Message, Parser, encode, parse, render

CONTROL = [
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
]
TURN = (
    "<|channel|>analysis<|message|>Say 😀 — or not.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Grüezi 😀<|return|>"
)
CALL = (
    "<|channel|>analysis<|message|>Call it.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
)


def ids_of(text, tokenizer):
    """Text whose control tokens are meant."""
    out, rest = [], text
    while rest:
        found = [(rest.find(name), name) for name in CONTROL if name in rest]
        at, name = min(found, default=(len(rest), ""))
        out += tokenizer.encode(rest[:at]) + ([tokenizer.special[name]] if name else [])
        rest = rest[at + len(name) :]
    return out


def text_of(parsed, tokenizer):
    return tokenizer.decode(parsed.remainder)


def test_a_turn(tokenizer):
    parsed = parse(ids_of(TURN, tokenizer), tokenizer, strict=True)
    assert parsed == [
        Message("assistant", "Say 😀 — or not.", "analysis"),
        Message("assistant", "Grüezi 😀", "final"),
    ]
    assert parsed.finish == "<|return|>"
    assert parsed.remainder == parsed.problems == []


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.f<|channel|>commentary <|constrain|>json",
        " to=functions.f<|channel|>commentary<|constrain|>json",
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>commentary functions.f <|constrain|>json",
    ],
)
def test_wherever_the_recipient_is(header, tokenizer, official, o200k):
    (message,) = parse(ids_of(f"{header}<|message|>{{}}<|call|>", tokenizer), tokenizer)
    assert message == Message("assistant", "{}", "commentary", "functions.f", "<|constrain|>json")
    theirs = official.parse_messages_from_completion_tokens(
        ids_of(f"{header}<|message|>{{}}<|call|>", o200k), oh.Role.ASSISTANT
    )
    assert theirs[0].recipient == message.recipient
    assert theirs[0].channel == message.channel
    assert theirs[0].content[0].text == message.content


def test_others_speak_after_the_assistant(tokenizer):
    """The role that the first ids continue is theirs alone."""
    text = (
        CALL + "<|start|>functions.f to=assistant<|channel|>commentary<|message|>3<|end|>"
        "<|start|>user:ada<|message|>And?<|end|>"
    )
    parsed = parse(ids_of(text, tokenizer), tokenizer, strict=True)
    assert parsed[2:] == [
        Message("tool", "3", "commentary", "assistant", name="functions.f"),
        Message("user", "And?", name="ada"),
    ]


def test_a_role_that_is_said_again(tokenizer):
    """The prompt ended in `assistant`; some models begin with it once more."""
    ids = ids_of("assistant<|channel|>final<|message|>a<|return|>", tokenizer)
    assert parse(ids, tokenizer, strict=True) == [Message("assistant", "a", "final")]


@pytest.mark.parametrize("end", ["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"])
def test_every_end_ends_a_message(end, tokenizer):
    parsed = parse(ids_of(f"<|channel|>final<|message|>a{end}", tokenizer), tokenizer, strict=True)
    assert parsed == [Message("assistant", "a", "final")] and parsed.finish == end
    parsed = parse(ids_of(f"<|channel|>final{end}", tokenizer), tokenizer)
    assert parsed == [] and parsed.finish == end


def test_type_without_recipient(tokenizer):
    ids = ids_of("<|channel|>final json<|message|>{}<|return|>", tokenizer)
    assert parse(ids, tokenizer, strict=True) == [
        Message("assistant", "{}", "final", content_type="json")
    ]


def test_a_whole_prompt(tokenizer):
    """Ends in a header, which the other library's parser raises on."""
    ids = render([{"role": "user", "content": "Hi"}], tokenizer)
    parsed = parse(ids, tokenizer, strict=True)
    assert [message.role for message in parsed] == ["system", "user"]
    assert text_of(parsed, tokenizer) == "<|start|>assistant"
    assert parsed.problems == []


def test_every_truncation(tokenizer):
    """Content so far is there; the header that was begun is the remainder; nothing raises."""
    ids = ids_of(CALL, tokenizer)
    whole = parse(ids, tokenizer)
    for length in range(len(ids)):
        parsed = parse(ids[:length], tokenizer, strict=True)
        assert parsed.finish != "<|call|>"
        for message, full in zip(parsed, whole, strict=False):
            assert full.content.startswith(message.content.removesuffix("\ufffd"))
            assert (message.channel, message.recipient) == (full.channel, full.recipient)
    assert parse([], tokenizer) == []
    cut = parse(ids_of(CALL.removesuffix(": 1}<|call|>"), tokenizer), tokenizer)
    assert (cut[-1].content, cut[-1].recipient, cut.finish) == ('{"a"', "functions.f", None)


MALFORMED = {
    "recipient twice": (
        "<|channel|>commentary to=functions.f to=functions.f<|message|>{}<|call|>",
        [Message("assistant", "{}", "commentary", "functions.f")],
        "",
    ),
    "text between messages": (
        "<|channel|>analysis<|message|>a<|end|>ok<|start|>assistant<|channel|>final<|message|>b"
        "<|return|>",
        [Message("assistant", "a", "analysis"), Message("assistant", "b", "final")],
        "ok",
    ),
    "start twice": (
        "<|start|><|start|>assistant<|channel|>final<|message|>b<|return|>",
        [Message("assistant", "b", "final")],
        "<|start|>",
    ),
    "channel without name": ("<|channel|><|message|>b<|end|>", [Message("assistant", "b")], ""),
    "no message token": (
        "<|channel|>final Hello<|return|>",
        [],
        "<|channel|>final Hello<|return|>",
    ),
    "message not ended": (
        "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b<|return|>",
        [Message("assistant", "a", "analysis"), Message("assistant", "b", "final")],
        "",
    ),
    "control token in content": (
        "<|channel|>final<|message|>a<|channel|>b<|message|>c<|return|>",
        [Message("assistant", "abc", "final")],
        "<|channel|><|message|>",
    ),
    "two channels": (
        "<|channel|>analysis<|channel|>final<|message|>a<|end|>",
        [Message("assistant", "a", "analysis")],
        "",
    ),
    "unknown role": (
        "<|start|>nobody<|message|>a<|end|>",
        [Message("tool", "a", name="nobody")],
        "",
    ),
    "no role": ("<|start|><|message|>a<|end|>", [Message("assistant", "a")], ""),
    "empty recipient": (" to=<|message|>a<|end|>", [Message("assistant", "a")], ""),
    "end in a later header": (
        "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|return|>",
        [Message("assistant", "a", "final")],
        "<|start|>assistant<|channel|>final<|return|>",
    ),
    "another's message in a header": (
        "<|channel|>analysis<|start|>user<|message|>a<|end|>",
        [Message("user", "a")],
        "<|channel|>analysis",
    ),
    "two types": (
        "<|channel|>final code json<|message|>a<|end|>",
        [Message("assistant", "a", "final", content_type="code")],
        "",
    ),
    "end in a header": (
        "<|channel|>analysis<|end|><|start|>assistant<|message|>a<|end|>",
        [Message("assistant", "a")],
        "<|channel|>analysis<|end|>",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name, tokenizer):
    text, messages, remainder = MALFORMED[name]
    ids = ids_of(text, tokenizer)
    parsed = parse(ids, tokenizer)
    assert parsed == messages
    assert text_of(parsed, tokenizer) == remainder
    assert len(parsed.problems) >= 1
    with pytest.raises(HarmonyError) as raised:
        parse(ids, tokenizer, strict=True)
    assert isinstance(raised.value, ValueError)
    assert 0 <= raised.value.position < len(ids)


def test_ids_beyond_the_vocabulary(tokenizer):
    ids = ids_of("<|channel|>final<|message|>ab", tokenizer)
    for beyond in (tokenizer.size, tokenizer.size + 5, 10**12):
        for at in (-1, 1):  # in the content, in the header
            parsed = parse([*ids[:at], beyond, *ids[at:]], tokenizer)
            assert (parsed[0].channel, parsed[0].content) == ("final", "ab")
            assert parsed.remainder == [beyond]


def test_bad_bytes_do_not_stop_the_text(small):
    """A bad byte becomes U+FFFD where it is; an unfinished character does not leak onwards."""
    bad = small._inner.token_to_id("ÿ")
    head = ids_of("<|channel|>final<|message|>", small)
    ids = [*head, *small.encode("😀"), bad, *small.encode("ok"), small.encode("😀")[0]]
    ids += ids_of("<|end|><|start|>assistant<|message|>next<|end|>", small)
    parsed = parse(ids, small, strict=True)
    assert [message.content for message in parsed] == ["😀\ufffdok\ufffd", "next"]


def test_a_character_cut_short(small):
    ids = ids_of("<|channel|>final<|message|>a😀", small)
    assert parse(ids[:-1], small)[0].content == "a\ufffd"
    parser = Parser(small)
    parser.feed(ids[:-1])
    assert [delta.text for delta in parser.finish()] == ["\ufffd"]


def streamed(ids, tokenizer, sizes):
    """Messages put together from deltas, and the parser's own."""
    parser = Parser(tokenizer)
    texts, headers, ends, at = {}, {}, {}, 0
    deltas = []
    while at < len(ids):
        size = next(sizes)
        deltas += parser.feed(ids[at : at + size])
        at += size
    for delta in deltas + parser.finish():
        texts[delta.index] = texts.get(delta.index, "") + delta.text
        assert headers.setdefault(delta.index, delta.header) == delta.header
        assert delta.index not in ends, "a delta after the end"
        if delta.end:
            ends[delta.index] = delta.end
    return list(texts.values()), parser.messages


@pytest.mark.parametrize("text", [TURN, CALL, CALL[:-20], TURN.replace("<|end|>", "")])
def test_stream_equals_whole_for_every_chunking(text, tokenizer):
    ids = ids_of(text, tokenizer)
    whole = parse(ids, tokenizer)
    rng = random.Random(5)
    chunkings = [iter(lambda size=size: size, None) for size in (1, 2, 3, 5, 7, len(ids))]
    chunkings += [iter(lambda: rng.randint(1, 9), None) for _ in range(20)]
    for sizes in chunkings:
        texts, parsed = streamed(ids, tokenizer, sizes)
        assert texts == [message.content for message in whole]
        assert parsed == whole
        assert (parsed.finish, parsed.remainder) == (whole.finish, whole.remainder)


def test_nothing_raises_and_no_id_is_lost(tokenizer):
    """Ids at random: chunked equals whole, and parsing what was parsed changes nothing."""
    rng = random.Random(6)
    control = [tokenizer.special[name] for name in CONTROL]
    words = [tokenizer.encode(text) for text in ("assistant", "analysis", " to=functions.f", "a b")]
    for _ in range(300):
        ids = []
        for _ in range(rng.randrange(12)):
            ids += rng.choice([[rng.choice(control)], rng.choice(words), [rng.randrange(300000)]])
        whole = parse(ids, tokenizer)
        texts, parsed = streamed(ids, tokenizer, iter(lambda: rng.randint(1, 4), None))
        assert parsed == whole
        assert parsed.remainder == whole.remainder
        assert [text for text in texts if text] == [m.content for m in whole if m.content]
        readable = [m for m in whole if not (m.role == "assistant" and m.recipient == "all")]
        assert parse(encode(readable, tokenizer), tokenizer) == readable


def test_deltas_as_they_come(small):
    parser = Parser(small)
    assert parser.feed(ids_of("<|channel|>final", small)) == []
    assert parser.messages == []
    assert parser.feed(ids_of("<|message|>h", small)[0]) == []
    header = Message("assistant", "", "final")
    (delta,) = parser.feed(ids_of("hi", small))
    assert (delta.index, delta.header, delta.text, delta.end) == (0, header, "hi", None)
    assert parser.messages == [Message("assistant", "hi", "final")]
    (delta,) = parser.feed(ids_of("!<|return|>", small))
    assert (delta.text, delta.end) == ("!", "<|return|>")
    assert parser.finish() == []
    assert parser.messages.finish == "<|return|>"


def test_same_as_openai_harmony_on_what_is_well_formed(o200k, official):
    for text in (TURN, CALL):
        theirs = official.parse_messages_from_completion_tokens(
            ids_of(text, o200k), oh.Role.ASSISTANT
        )
        ours = parse(ids_of(text, o200k), o200k, strict=True)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.content == other.content[0].text
            assert (mine.channel, mine.recipient, mine.content_type) == (
                other.channel,
                other.recipient,
                other.content_type,
            )


def test_first_role_is_one_that_has_a_header(o200k):
    user = parse(o200k.encode("") + ids_of("<|message|>x<|end|>", o200k), o200k, role="user")
    assert user == [Message("user", "x")]
    with pytest.raises(ValueError, match="'tool'"):
        Parser(o200k, role="tool")
