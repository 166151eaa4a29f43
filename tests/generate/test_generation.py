"""Generation against full forward passes of the same model, and against itself in other shapes.

On meshes: tests/sharding/test_matrix.py.
"""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from tiny import TINY

import gptoss_jax as gj
from gptoss_jax import buckets, decode, generation

GREEDY = gj.Sampler(temperature=0.0)
# One sliding layer (window 5) and one full one. Lengths: a lone token, shorter than the window,
# the window, one more, and well beyond two windows.
CONFIG = dataclasses.replace(TINY, layers=2, sliding=None, max_context=128)
LENGTHS = (1, 4, 5, 6, 17, 30)
PROMPTS = [np.random.default_rng(n).integers(0, CONFIG.vocab, n).tolist() for n in LENGTHS]
NEW = 24


@pytest.fixture(scope="module")
def model():
    model = gj.GptOss(CONFIG, rngs=nnx.Rngs(1))
    draw = np.random.default_rng(0).standard_normal
    for block in model.blocks:  # what random initialisation leaves at zero, so that it counts
        block.attn.sinks_KG.set_value(jax.numpy.asarray(draw((2, 3)) + 1, jax.numpy.float32))
        block.moe.router_bias_E.set_value(jax.numpy.asarray(draw(8), jax.numpy.float32))
    return model


@pytest.fixture(scope="module")
def batch(model):
    """All prompts in one ragged batch, greedy, with log probabilities."""
    return run(model, PROMPTS)


def run(model, prompts, **keywords):
    keywords = {"max_new_tokens": NEW, "sampler": GREEDY, "logprobs": True} | keywords
    return gj.generate(model, prompts, **keywords)


def same(one, other):
    assert one.tokens == other.tokens
    assert one.finish_reasons == other.finish_reasons
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        # float32 through another shape: a few roundings of logits near 3.
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_decoding_equals_the_full_forward(model, batch):
    whole = np.zeros((len(PROMPTS), 64), np.int32)  # causal: what follows a row does not matter
    for row, prompt, new in zip(whole, PROMPTS, batch.tokens, strict=True):
        row[: len(prompt) + NEW] = prompt + new
    logits = np.asarray(model(whole), np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for b, (prompt, new) in enumerate(zip(PROMPTS, batch.tokens, strict=True)):
        steps = len(prompt) - 1 + np.arange(NEW)
        assert new == logprobs[b, steps].argmax(-1).tolist()
        np.testing.assert_allclose(batch.logprobs[b], logprobs[b, steps, new], atol=2e-5)
    assert batch.finish_reasons == ["length"] * len(PROMPTS)


def test_a_row_of_a_ragged_batch_equals_its_run_alone(model, batch):
    for b in (0, 3, 5):
        alone = run(model, [PROMPTS[b]])
        assert alone.tokens[0] == batch.tokens[b]
        np.testing.assert_allclose(alone.logprobs[0], batch.logprobs[b], atol=2e-5)


def test_chunked_prefill_equals_whole(model, batch, monkeypatch):
    # 30 tokens: one chunk of 64 before; two of 16 now, longer than the ring of 5 slots.
    monkeypatch.setattr(buckets, "TOKENS_ELSEWHERE", 16 * 8)
    assert list(buckets.chunks(29, 8, 16 * 8)) == [(0, 16), (16, 16)]
    same(run(model, PROMPTS), batch)


def test_other_rows_and_their_order_leave_a_rows_bits_alone(model):
    """Sampled: a seed belongs to its row, wherever the row is and whoever sits beside it."""
    sampler = gj.Sampler(temperature=1.3)
    first = run(model, PROMPTS, sampler=sampler, seeds=[1, 2, 42, 3, 4, 5])
    other = run(
        model, [PROMPTS[2], *PROMPTS[:4:-1], *PROMPTS[:3]], sampler=sampler, seeds=[42, 9, 8, 7, 6]
    )
    assert first.tokens[2] == other.tokens[0]
    assert first.logprobs[2] == other.logprobs[0]
    again = run(model, PROMPTS, sampler=sampler, seeds=[1, 2, 43, 3, 4, 5])
    assert again.tokens[2] != first.tokens[2] and again.tokens[3] == first.tokens[3]


def test_stream_gives_what_generate_gives(model, batch):
    for b in (0, 4):
        steps = list(
            gj.stream(model, PROMPTS[b], max_new_tokens=NEW, sampler=GREEDY, logprobs=True)
        )
        assert [step.token for step in steps] == batch.tokens[b]
        np.testing.assert_allclose([s.logprob for s in steps], batch.logprobs[b], atol=2e-5)
        assert [s.finish_reason for s in steps] == [None] * (NEW - 1) + ["length"]


def test_each_step_draws_noise_of_its_own(model):
    """Token r is the argmax of the full forward's logits and the noise of (seed, r); streamed too,
    whose later calls go on counting."""
    prompt, seed = PROMPTS[2], 7
    how = dict(max_new_tokens=NEW, sampler=gj.Sampler(), seeds=[seed], stop_tokens=())
    (new,) = gj.generate(model, [prompt], **how).tokens
    logits = np.asarray(model([prompt + new]), np.float64)[0, len(prompt) - 1 : -1]
    key = jax.random.wrap_key_data(np.uint32([0, seed]), impl="threefry2x32")
    noise = [
        jax.random.gumbel(jax.random.fold_in(key, r), (CONFIG.vocab,), mode="high")
        for r in range(NEW)
    ]
    assert new == (logits + np.array(noise)).argmax(-1).tolist()
    assert [step.token for step in gj.stream(model, prompt, **how)] == new


def test_stream_calls_cover_the_tokens_and_grow():
    assert list(generation._stream_calls(100)) == [1, 1, 8, 16, 32, 32, 10]
    assert list(generation._stream_calls(1)) == [1]


def test_top_logprobs_hold_the_greedy_token_first(model, batch):
    out = run(model, PROMPTS, max_new_tokens=5, top_logprobs=3)
    assert out.tokens == [row[:5] for row in batch.tokens]
    for tokens, logs, tops in zip(out.tokens, out.logprobs, out.top_logprobs, strict=True):
        assert [next(iter(top)) for top in tops] == tokens
        assert [next(iter(top.values())) for top in tops] == logs
        assert all(
            len(top) == 3 and list(top.values()) == sorted(top.values())[::-1] for top in tops
        )


def test_the_context_can_be_filled_to_its_last_position(model, batch):
    out = run(model, PROMPTS, max_new_tokens=CONFIG.max_context - 30)
    assert [len(row) for row in out.tokens] == [98] * len(PROMPTS)
    assert [row[:NEW] for row in out.tokens] == batch.tokens


def test_a_prompt_beyond_the_context_is_refused_before_any_work(model, monkeypatch):
    monkeypatch.setattr(generation, "programs", None)  # nothing may be compiled or run
    with pytest.raises(ValueError, match=r"prompts\[1\] has 30 tokens.*max_new_tokens=99.*128"):
        run(model, [PROMPTS[0], PROMPTS[5]], max_new_tokens=99)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([1, 2, 3], r"prompts\[0\] must be a sequence"),
        ("hello", "Encode text"),
        (["hello"], "Tokenizer.encode"),
        ([], "empty"),
        ([[1], []], r"prompts\[1\] is empty"),
        ([[1, 53]], r"prompts\[0\]\[1\] = 53 .*0..52"),
        ([[-1]], r"-1 is no token id"),
        ([[1.5]], "whole numbers"),
        ([[True, False]], "whole numbers"),
        ([[1, True]], r"prompts\[0\] .* True or False"),
        ([[2**70]], "whole numbers"),
        ([[[1], [1, 2]]], r"prompts\[0\] must be a sequence"),
        ([[[1]]], r"prompts\[0\] must be a sequence"),
        (7, "sequence of sequences"),
    ],
)
def test_prompts_that_are_none_are_named(model, prompts, words):
    with pytest.raises(ValueError, match=words):
        run(model, prompts)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"seeds": [1, 2]}, "seeds has 2 entries for 1"),
        ({"seeds": [-1]}, r"seeds\[0\]"),
        ({"seeds": 7}, "seeds must be a sequence"),
        ({"stop_tokens": 7}, "stop_tokens must be a sequence"),
        ({"stop_tokens": "stop"}, "stop_tokens"),
        ({"stop_tokens": [1.5]}, "stop_tokens"),
        ({"top_logprobs": 54}, "top_logprobs"),
        ({"sampler": None}, "sampler must be"),
        ({"sampler": {"temperature": 0}}, "sampler must be"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"max_new_tokens": 10**30}, "context of 128"),
    ],
)
def test_arguments_out_of_range_are_named(model, annotations_unchecked, keywords, words):
    with pytest.raises(ValueError, match=words):
        run(model, [[1]], **keywords)
    keywords = {"max_new_tokens": 1} | keywords
    with pytest.raises(ValueError, match=words):
        gj.stream(model, [1], **keywords)  # at the call, not at the first step


def test_donating_the_cache_changes_nothing(model, monkeypatch):
    """CUDA once gave wrong donated state where other results came before it."""
    runs = []

    class Kept(generation._Run):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            runs.append(self)

    def undonated(graph, tree, config, mesh, *, gpu):
        made = decode.Programs(graph, tree, config, mesh, gpu=gpu)
        made.prefill = jax.jit(made.prefill.__wrapped__)
        made.decode = jax.jit(made.decode.__wrapped__, static_argnums=(5, 6))
        return made

    monkeypatch.setattr(generation, "_Run", Kept)
    donated = run(model, PROMPTS)
    monkeypatch.setattr(generation, "programs", undonated)
    assert run(model, PROMPTS) == donated
    for a, b in zip(*(jax.tree.leaves(one.cache) for one in runs), strict=True):
        np.testing.assert_array_equal(a, b)
