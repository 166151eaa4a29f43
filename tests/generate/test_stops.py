"""Stops, vocabularies and bad logits, on a model whose next token depends on the last one alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import TINY

import gptoss_jax as gj
from gptoss_jax import generation

V, RETURN, CALL, END, BROKEN = TINY.vocab, 50, 51, 49, 40
# 1 -> 2 -> 3 -> return;  10 -> 11 -> call;  20 -> end -> 21 -> 22 -> 20 -> ...;  30 -> 41 -> NaN
CHAIN = {1: 2, 2: 3, 3: RETURN, 10: 11, 11: CALL, 20: END, END: 21, 21: 22, 22: 20, 30: BROKEN}


class Chain(gj.GptOss):
    """Draws CHAIN[token]; the logits after BROKEN are NaN. No layer is run."""

    def __init__(self):
        super().__init__(dataclasses.replace(TINY, layers=1, sliding=None), rngs=nnx.Rngs(0))
        table = np.zeros((V, V), np.float32)
        for token in range(V):
            table[token, CHAIN.get(token, 5)] = 30.0
        table[BROKEN] = np.nan
        self.table_VV = nnx.Param(jnp.asarray(table))
        self.stop_tokens = (RETURN, CALL)

    def hidden(self, tokens_BT, positions_BT, cache=None, **_):
        length_B = jnp.maximum(cache.length_B, positions_BT.max(axis=1) + 1)
        seen_BT = jnp.where(positions_BT >= 0, tokens_BT, 0)  # of padding a model makes anything
        return seen_BT[..., None], dataclasses.replace(cache, length_B=length_B)

    def logits(self, x):
        return self.table_VV[...][x[..., 0]]


@pytest.fixture(scope="module")
def chain():
    return Chain()


def test_each_row_stops_on_its_own_stop_token_which_is_left_out(chain):
    out = gj.generate(chain, [[1], [7, 20], [10], [3]], max_new_tokens=6, logprobs=True)
    # <|end|> ends a message, not the turn.
    assert out.tokens == [[2, 3], [END, 21, 22, 20, END, 21], [11], []]
    assert out.finish_reasons == ["stop", "length", "stop", "stop"]
    assert [len(row) for row in out.logprobs] == [2, 6, 1, 0]


@pytest.mark.parametrize(
    ("stop_tokens", "tokens", "reason"),
    [
        (None, [2, 3], "stop"),
        ((), [2, 3, RETURN, 5, 5, 5], "length"),
        ([3], [2], "stop"),
        ({2}, [], "stop"),
        (range(30, 48), [2, 3, RETURN, 5, 5, 5], "length"),
        (np.array([RETURN]), [2, 3], "stop"),
        ([V, 2**31, 10**30], [2, 3, RETURN, 5, 5, 5], "length"),  # which no model draws
    ],
)
def test_stop_tokens_given_replace_the_models(chain, stop_tokens, tokens, reason):
    out = gj.generate(chain, [[1]], max_new_tokens=6, stop_tokens=stop_tokens)
    assert (out.tokens, out.finish_reasons) == ([tokens], [reason])
    steps = list(gj.stream(chain, [1], max_new_tokens=6, stop_tokens=stop_tokens))
    assert [step.token for step in steps if step.token is not None] == tokens
    assert [step.finish_reason for step in steps[:-1]] == [None] * (len(steps) - 1)
    assert steps[-1].finish_reason == reason
    assert len(steps) == max(len(tokens), 1)


@pytest.mark.parametrize(
    ("length", "new", "slots"), [(100, 28, 128), (100, 29, 256), (1, 250, 256)]
)
def test_every_position_has_a_slot(chain, length, new, slots):
    """What finds no slot would be dropped in silence."""
    run = generation._Run(
        chain, [np.ones(length, np.int32)], max_new_tokens=new, sampler=gj.Sampler(),
        stop_tokens=(), seeds=None, logprobs=False, top=0,
    )  # fmt: skip
    assert run.cache.capacity == slots >= length + new


def test_a_stop_on_the_last_allowed_token_is_a_stop(chain):
    assert gj.generate(chain, [[1]], max_new_tokens=3).finish_reasons == ["stop"]
    assert gj.generate(chain, [[1]], max_new_tokens=2).finish_reasons == ["length"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_raise_and_name_the_row(chain, temperature):
    sampler = gj.Sampler(temperature=temperature)
    with pytest.raises(ValueError, match="row 1 hold NaN"):
        gj.generate(chain, [[1], [30], [2]], max_new_tokens=4, sampler=sampler)
    steps = gj.stream(chain, [30], max_new_tokens=4, sampler=sampler)
    assert next(steps).token == BROKEN  # what was drawn before is still given
    with pytest.raises(ValueError, match="NaN"):
        next(steps)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_did_not_stop(chain, temperature):
    """What its argmax gives is token 0, which here ends a turn."""
    sampler = gj.Sampler(temperature=temperature)
    with pytest.raises(ValueError, match="row 0 hold NaN"):
        gj.generate(chain, [[30]], max_new_tokens=4, sampler=sampler, stop_tokens=[0])


def test_ids_without_text_are_never_drawn():
    chain = Chain()
    chain.text_vocab = RETURN  # 3 -> RETURN is impossible now: 29 equal others remain, then 5
    out = gj.generate(chain, [[3]], max_new_tokens=1, logprobs=True, sampler=gj.Sampler())
    assert out.tokens[0][0] < RETURN
    assert out.logprobs[0][0] == pytest.approx(-np.log(RETURN), rel=1e-5)


def test_a_repetition_penalty_sees_prompt_and_output(chain):
    # The chain's favourite has logit 30, all others 0: a penalty cannot make it lose, but two
    # favourites tell: after 5 comes 5 again, unless penalised below an equal rival.
    rival = Chain()
    table = np.asarray(rival.table_VV[...]).copy()
    table[5, 6] = table[6, 7] = 29.0
    rival.table_VV.set_value(jnp.asarray(table))
    keywords = {"max_new_tokens": 4, "stop_tokens": ()}
    greedy = gj.Sampler(temperature=0.0)
    assert gj.generate(rival, [[5]], sampler=greedy, **keywords).tokens == [[5, 5, 5, 5]]
    penal = gj.Sampler(temperature=0.0, repetition_penalty=1.1)
    # 5 is in the prompt: 6 wins. After 6: 5 is worth 27.3, 7 wins. After 7: 5 alone.
    assert gj.generate(rival, [[5]], sampler=penal, **keywords).tokens == [[6, 7, 5, 5]]
