"""Packing, masks, and that a document in a packed row computes what it computes alone."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_cases import SMALL, harmony_tokenizer, packed_logits

from gptoss_jax.train import Batches, Documents, conversation, text_document
from gptoss_jax.train.data import ROWS_OPEN, pack


def documents(lengths, vocab=50, seed=0):
    rng = np.random.default_rng(seed)
    return Documents.of((rng.integers(0, vocab, n), rng.random(n) < 0.7) for n in lengths)


def test_row_picture():
    docs = Documents.of([([1, 2, 3, 4], [0, 1, 1, 1]), ([5, 6, 7], [0, 0, 1])])
    batch = Batches(docs, row=8, rows=1, seed=0).of([[0, 1]])
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 11, 12, 13, -1]]
    assert batch["targets"].tolist() == [[2, 3, 4, 0, 6, 7, 0, 0]]
    # Weight stands where the token is predicted, one before the token that counts.
    assert batch["weights"].tolist() == [[1, 1, 1, 0, 0, 1, 0, 0]]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=120))
def test_every_document_lies_in_one_row_once(lengths):
    rows = pack(np.array(lengths), 16)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 16
    # First fit with enough open rows: no two rows could be one.
    if len(rows) <= ROWS_OPEN:
        totals = sorted(sum(lengths[i] for i in row) for row in rows)
        assert len(totals) < 2 or totals[0] + totals[1] > 16


def test_positions_keep_documents_apart():
    row = 16
    docs = documents([3, 5, 1, 7, 2, 9, 4, 4])
    for step in range(3):
        batch = Batches(docs, row=row, rows=2, seed=1).at(step)
        for tokens, pos in zip(batch["tokens"], batch["positions"], strict=True):
            live = pos[pos >= 0]
            jumps = np.flatnonzero(np.diff(live) != 1)
            starts = [0, *(jumps + 1)]
            for start, end in zip(starts, [*starts[1:], len(live)], strict=True):
                ids = tokens[: len(live)][start:end].tolist()
                assert any(
                    ids == docs.tokens[a:b].tolist()
                    for a, b in zip(docs.starts, docs.starts[1:], strict=False)
                )
                # What this document's last query could see of the one before: nothing.
                assert start == 0 or live[start] - live[start - 1] >= row


def test_batches_are_a_function_of_the_step():
    docs = documents(range(1, 17))
    a, b = (Batches(docs, row=16, rows=2, seed=3) for _ in range(2))
    for step in (5, 0, 11):
        for name, array in a.at(step).items():
            np.testing.assert_array_equal(array, b.at(step)[name])
    assert any(
        (a.at(0)[n] != Batches(docs, row=16, rows=2, seed=4).at(0)[n]).any() for n in b.at(0)
    )


def test_a_pass_visits_every_document_once():
    docs = documents([4, 4, 4, 4, 8, 8, 16, 16, 3])
    batches = Batches(docs, row=16, rows=1, seed=0)
    n = len(batches.packed)
    for turn in (0, 1):
        seen = [batches.at(turn * n + i) for i in range(n)]
        assert sum(int((b["positions"] >= 0).sum()) for b in seen) == len(docs.tokens)
        assert sum(float(b["weights"].sum()) for b in seen) == sum(
            docs.counts[a + 1 : b].sum() for a, b in zip(docs.starts, docs.starts[1:], strict=False)
        )


def test_no_pass_has_the_order_of_the_file_or_of_another_pass():
    docs = Documents.of(([n] * 4, [0, 1, 1, 1]) for n in range(60))
    batches = Batches(docs, row=16, rows=1, seed=0)
    n = len(batches.packed)
    rows = [batches.at(i)["tokens"][0, ::4].tolist() for i in range(3 * n)]
    first, second, third = (rows[i * n : (i + 1) * n] for i in range(3))
    assert sorted(first) == sorted(second) == sorted(third)  # packed once
    # 15 rows: one of 15! orders is the same by chance.
    assert first != second != third != first
    # Nor do rows hold what lay together in the file.
    assert sum(row == list(range(row[0], row[0] + 4)) for row in first) < 3


def test_a_packed_document_computes_what_it_computes_alone():
    docs = documents([7, 12, 5, 8], vocab=SMALL.vocab)
    row = 32
    logits = packed_logits(SMALL, row)
    batches = Batches(docs, row=row, rows=1, seed=0)
    packed = logits(batches.of([[0, 1, 2, 3]]))
    slot = 0
    for i, n in enumerate(docs.lengths):
        alone = logits(batches.of([[i]]))
        # The largest angle is that of position 3 * 32 + 32: float32 turns it to 8e-6.
        np.testing.assert_allclose(packed[0, slot : slot + n], alone[0, :n], atol=1e-4)
        slot += n
    other = documents([7, 12, 5, 8], vocab=SMALL.vocab, seed=9)
    mixed = Documents(
        np.concatenate([other.tokens[:19], docs.tokens[19:]]), docs.counts, docs.starts
    )
    changed = logits(Batches(mixed, row=row, rows=1, seed=0).of([[0, 1, 2, 3]]))
    np.testing.assert_array_equal(changed[0, 19:32], packed[0, 19:32])
    assert not np.allclose(changed[0, :19], packed[0, :19], atol=1e-2)


def counted(ids, counts, tokenizer):
    """The trained tokens as text, runs joined, gaps as |."""
    out = []
    for id, counts_ in zip(ids, counts, strict=True):
        out.append(tokenizer.decode([id]) if counts_ else "|")
    text = "".join(out)
    while "||" in text:
        text = text.replace("||", "|")
    return text


MESSAGES = [
    {"role": "user", "content": "u1"},
    {"role": "assistant", "thinking": "t1", "content": "c1"},
    {"role": "user", "content": "u2"},
    {"role": "assistant", "thinking": "t2", "content": "c2"},
]


def test_assistant_turns_are_trained_with_their_stop_tokens():
    tokenizer = harmony_tokenizer()
    ids, counts = conversation(MESSAGES, tokenizer, turns="all")
    # FT09, FT05: thinking becomes analysis; only what the assistant says counts; every end counts.
    assert counted(ids, counts, tokenizer) == (
        "|<|channel|>final<|message|>c1<|end|>|"
        "<|channel|>analysis<|message|>t2<|end|><|start|>assistant"
        "<|channel|>final<|message|>c2<|return|>"
    )
    assert ids[-1] == tokenizer.special["<|return|>"] and ids.count(ids[-1]) == 1


def test_the_last_turn_alone_follows_the_prompt_that_render_gives():
    from gptoss_jax.text import harmony

    tokenizer = harmony_tokenizer()
    ids, counts = conversation(MESSAGES, tokenizer)
    prompt = harmony.render(MESSAGES[:3], tokenizer)
    assert ids[: len(prompt)] == prompt and not any(counts[: len(prompt)])
    assert all(counts[len(prompt) :])


def test_analysis_of_earlier_turns_is_left_out():
    tokenizer = harmony_tokenizer()
    spoken = [
        {"role": "user", "content": "u1"},
        {"role": "assistant", "channel": "analysis", "content": "t1"},
        {"role": "assistant", "channel": "final", "content": "c1"},
        {"role": "user", "content": "u2"},
        {"role": "assistant", "channel": "analysis", "content": "t2"},
        {"role": "assistant", "channel": "final", "content": "c2"},
    ]
    assert conversation(spoken, tokenizer) == conversation(MESSAGES, tokenizer)
    assert "t1" not in tokenizer.decode(conversation(spoken, tokenizer, turns="all")[0])


def test_history_ends_otherwise_than_the_last_turn():
    # FT04: the ids of a shorter conversation begin a longer one, save for the token it ends in.
    tokenizer = harmony_tokenizer()
    spoken = [{k: v for k, v in m.items() if k != "thinking"} for m in MESSAGES]
    short, _ = conversation(spoken[:2], tokenizer)
    long, _ = conversation(spoken, tokenizer)
    assert short[-1] == tokenizer.special["<|return|>"]
    assert long[: len(short)] == [*short[:-1], tokenizer.special["<|end|>"]]


def test_tool_calls_and_results():
    tokenizer = harmony_tokenizer()
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "thinking": "t", "tool_calls": [call]},
        {"role": "tool", "name": "f", "content": "r"},
        {"role": "assistant", "content": "c"},
    ]
    text = counted(*conversation(messages, tokenizer), tokenizer)
    assert text.startswith("|<|channel|>analysis<|message|>t<|end|>")
    assert '<|message|>{"a": 1}<|call|>|' in text
    assert text.endswith("|<|channel|>final<|message|>c<|return|>")


def test_plain_text_is_trained_but_for_its_first_token():
    tokenizer = harmony_tokenizer()
    ids, counts = text_document("To be", tokenizer)
    assert tokenizer.decode(ids) == "To be<|endoftext|>"
    assert counts == [False] + [True] * (len(ids) - 1)


def test_files_keep_documents(tmp_path):
    docs = documents([3, 1, 5])
    docs.save(tmp_path / "d.npz")
    again = Documents.load(tmp_path / "d.npz")
    for name in ("tokens", "counts", "starts"):
        np.testing.assert_array_equal(getattr(again, name), getattr(docs, name))


def test_jsonl(tmp_path):
    tokenizer = harmony_tokenizer()
    file = tmp_path / "d.jsonl"
    lines = [{"text": "To be"}, {"messages": MESSAGES, "reasoning": "low", "turns": "all"}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    docs = Documents.load(file, tokenizer)
    assert docs.lengths.tolist() == [
        len(text_document("To be", tokenizer)[0]),
        len(conversation(MESSAGES, tokenizer, reasoning="low", turns="all")[0]),
    ]
    with pytest.raises(ValueError, match=r"data\.tokenizer must name"):
        Documents.load(file)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "the data is empty"),
        ("{", r"d\.jsonl:1 is not JSON"),
        ('{"text": "a", "messages": []}', "either"),
        ('{"messages": [{"role": "nobody", "content": "x"}]}', r"d\.jsonl:1: .*nobody"),
        ('{"messages": [], "reasonning": "low"}', r"d\.jsonl:1: .*reasonning"),
    ],
)
def test_bad_lines_are_named(tmp_path, text, message):
    file = tmp_path / "d.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        Documents.load(file, harmony_tokenizer())


def test_bad_files_are_named(tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"PK but no archive")
    (tmp_path / "data.csv").write_text("1,2")
    for name, message in (
        ("none.npz", "does not exist"),
        ("bad.npz", "not a file of documents"),
        ("data.csv", r"\.npz or \.jsonl"),
    ):
        with pytest.raises(ValueError, match=message):
            Documents.load(tmp_path / name)
    with pytest.raises(ValueError, match="document 1 has 9 tokens and data.row is 8"):
        Batches(documents([3, 9, 2]), row=8, rows=1, seed=0)
    with pytest.raises(ValueError, match="document 1 is empty"):
        documents([3, 0, 2])
