import hashlib
import json
import random

import checkpoints
import o200k as published
import pytest
import tokenizers

from gptoss_jax.text import StreamDecoder, Tokenizer

CONTROL = "startoftext endoftext return constrain channel start end message call".split()
TEXTS = [
    "",
    " ",
    "Hello, world!  \n\n\tx",
    "naïve façade — “quoted”",
    "日本語とemoji 👩‍👩‍👧‍👦🇨🇭 mixed",
    "def f(x):\r\n    return x**2  # 3.14159\r\n",
    "עברית العربية हिन्दी ไทย",
    "\x00\x7f\u00ad\ufeff\U0010ffff",
    "I'll we'RE 1234567 a" + " " * 40 + "b",
]


def random_text(rng, length):
    ranges = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(length))


def test_the_rebuilt_files_are_the_published_ones():
    for name, sha256 in (
        ("o200k_base.tiktoken", published.RANKS_SHA256),
        ("tokenizer.json", published.TOKENIZER_SHA256),
    ):
        content = (published.folder() / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == sha256


def test_ids_are_those_of_openai(o200k, official):
    rng = random.Random(0)
    for text in TEXTS + [random_text(rng, 60) for _ in range(200)]:
        ids = o200k.encode(text)
        assert ids == official.encode(text, disallowed_special=())
        assert o200k.decode(ids) == text


def test_sizes_and_names(o200k):
    assert o200k.size == 200019
    assert o200k.special["<|start|>"] == 200006
    assert o200k.special["<|call|>"] == 200012
    assert o200k.decode([200006, 24912, 200007]) == "<|start|>" + o200k.decode([24912]) + "<|end|>"


def test_ids_beyond_the_vocabulary_have_no_text(o200k):
    assert o200k.decode([27, 200019, 201087, 10**12, 91]) == "<|"
    with pytest.raises(ValueError, match="-1"):
        o200k.decode([-1])


def test_names_of_control_tokens_are_ordinary_text(o200k):
    assert o200k.encode("<|start|>") == [27, 91, 5236, 91, 29]


def test_no_text_becomes_a_control_token(tokenizer):
    rng = random.Random(1)
    names = list(tokenizer.special)
    for _ in range(300):
        parts = [rng.choice([*names, *TEXTS, "<|", "|>", "\n"]) for _ in range(6)]
        text = "".join(parts)
        ids = tokenizer.encode(text)
        assert not set(ids) & set(tokenizer.special.values())
        assert tokenizer.decode(ids) == text


def test_added_tokens_not_marked_special_are_text_too(make_bytes_only):
    tokenizer = Tokenizer(make_bytes_only(special=False))
    assert tokenizer.special["<|return|>"] == 256
    assert max(tokenizer.encode("a<|return|>b<|start|>")) < 256


def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "😀"


def test_truncation_and_padding_in_the_file_are_not_obeyed(make_bytes_only):
    inner = make_bytes_only()
    inner.enable_truncation(3)
    inner.enable_padding(length=5)
    tokenizer = Tokenizer(inner)
    assert [len(tokenizer.encode(text)) for text in ("", "ab", "abcdefg")] == [0, 2, 7]


def test_streaming_holds_back_unfinished_characters(small):
    stream = StreamDecoder(small)
    ids = small.encode("a😀b")
    assert [stream.push(id) for id in ids] == ["a", "", "", "", "😀", "b"]
    assert stream.flush() == ""


def test_streaming_goes_on_after_a_bad_byte(small):
    stream = StreamDecoder(small)
    bad = small._inner.token_to_id("ÿ")  # the byte 0xFF
    assert [stream.push(id) for id in [bad, *small.encode("ok")]] == ["\ufffd", "o", "k"]
    assert stream.push(small.encode("😀")[0]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(small.encode("x")[0]) == "x"


def test_stream_equals_whole_for_any_ids(tokenizer):
    rng = random.Random(2)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.size + 20) for _ in range(30)]
        stream = StreamDecoder(tokenizer)
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


def test_the_embedded_tokenizer():
    tokenizer = Tokenizer.load("tiny")
    assert {f"<|{name}|>" for name in CONTROL} <= set(tokenizer.special)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert not set(ids) & set(tokenizer.special.values())
        assert tokenizer.decode(ids) == text


def test_where_the_file_is_looked_for(tmp_path, make_bytes_only):
    (tmp_path / "original").mkdir()
    file = tmp_path / "tokenizer.json"
    make_bytes_only().save(str(file))
    for path in (file, tmp_path, str(tmp_path), tmp_path / "original"):
        assert Tokenizer.load(path).size == 265


def test_a_name_in_the_local_cache(tmp_path, make_bytes_only, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="openai/none"):
        Tokenizer.load("openai/none")
    snapshot = tmp_path / "models--openai--some" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    make_bytes_only().save(str(snapshot / "tokenizer.json"))
    assert Tokenizer.load("openai/some").size == 265


def test_what_cannot_be_loaded(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer.json at .*nowhere"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer.json"):
        Tokenizer.load(tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match="byte-level"):
        Tokenizer(words)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(pre_tokenizer=None),
        lambda t: t["pre_tokenizer"].update(add_prefix_space=True),
        lambda t: t.update(normalizer={"type": "NFKC"}),
        lambda t: t.update(normalizer={"type": "Lowercase"}),
        lambda t: t["model"].update(vocab={}),
        lambda t: t["model"]["vocab"].pop("Ċ"),
        lambda t: t["model"]["vocab"].pop("Ã"),
        lambda t: t["model"]["vocab"].update({"日本": 265}),
    ],
    ids="uncut prefix NFKC lower empty newline C3 foreign".split(),
)
def test_a_tokenizer_that_does_not_give_text_back_is_refused(tmp_path, change):
    """Damaged, or of another kind: some letter would be lost in silence."""
    values = checkpoints.tokenizer_json()
    change(values)
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="does not give text back"):
        Tokenizer.load(tmp_path)


def test_a_missing_control_token_is_named(make_bytes_only):
    tokenizer = Tokenizer(make_bytes_only(names=("start",)))
    with pytest.raises(ValueError, match="message"):
        tokenizer.control("<|message|>")
