"""Sampling against plain NumPy definitions, and the faults samplers are known for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gptoss_jax.sampling import Sampler, _noise, sample, seed_words

jitted = functools.partial(jax.jit, static_argnames="plan")(sample)


def draw(logits, sampler, *, seeds=None, step=0, seen=None, **plan):
    logits = jnp.asarray(np.atleast_2d(logits), jnp.float32)
    seeds = seed_words(range(len(logits)) if seeds is None else seeds)
    return jitted(logits, seeds, jnp.int32(step), sampler.knobs(), sampler.plan(**plan), seen)


def drawable(probabilities, sampler, draws=300):
    """The set of tokens that come up, over many seeds (four tokens, so that all share a shape)."""
    row = np.full(4, -np.inf, np.float32)
    row[: len(probabilities)] = np.log(probabilities)
    tokens = draw(np.tile(row, (draws, 1)), sampler).token_B
    return set(np.asarray(tokens).tolist())


# --- filters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probabilities", "p", "kept"),
    [
        ([0.5, 0.41, 0.09], 0.9, {0, 1}),  # the token that crosses the threshold stays
        ([0.5, 0.3, 0.1, 0.1], 0.8, {0, 1}),  # a mass reached exactly takes nothing more
        ([25 / 85, 21 / 85, 20 / 85, 19 / 85], 46 / 85, {0, 1}),  # short of it by one rounding
        ([0.1, 0.3, 0.1, 0.5], 0.85, {0, 1, 3}),  # of equals, the lower id
        ([0.25, 0.25, 0.25, 0.25], 1.0, {0, 1, 2, 3}),
        ([0.2, 0.5, 0.3], 1e-9, {1}),
        ([0.2, 0.5, 0.3], 0.0, {1}),
        ([0.4, 0.4, 0.2], 0.0, {0}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(probabilities, p, kept):
    assert drawable(probabilities, Sampler(top_p=p)) == kept


@pytest.mark.parametrize("k", [1, 2, 3, 50])
def test_top_k_keeps_k_and_lower_ids_among_equals(k):
    probabilities = [0.2, 0.3, 0.3, 0.2]
    order = [1, 2, 0, 3]
    assert drawable(probabilities, Sampler(top_k=k)) == set(order[:k])


def test_top_p_counts_mass_after_top_k():
    # Of {.4, .3} renormalised to {.571, .429}, p = .57 needs only the first; of all, two.
    assert drawable([0.4, 0.3, 0.2, 0.1], Sampler(top_p=0.57)) == {0, 1}
    assert drawable([0.4, 0.3, 0.2, 0.1], Sampler(top_k=2, top_p=0.57)) == {0}


def test_min_p_is_relative_to_the_most_probable():
    assert drawable([0.5, 0.26, 0.24], Sampler(min_p=0.5)) == {0, 1}


def test_the_whole_of_min_p_keeps_the_most_probable_alone():
    assert drawable([0.2, 0.4, 0.4], Sampler(min_p=1.0)) == {1, 2}


def test_top_p_that_a_sum_reaches_exactly():
    """Tenths, whose sums in float32 fall on either side; and half a thousandth more is one more."""
    rows = np.zeros((300, 10))
    for k in range(1, 10):
        assert int(draw(rows, Sampler(top_p=k / 10)).token_B.max()) == k - 1
    assert drawable([0.5, 0.4, 0.1], Sampler(top_p=0.5005)) == {0, 1}


def test_temperature_comes_before_the_filters():
    # At temperature 2, {.64, .36} turns into {.571, .429}.
    assert drawable([0.64, 0.36], Sampler(top_p=0.6)) == {0}
    assert drawable([0.64, 0.36], Sampler(top_p=0.6, temperature=2.0)) == {0, 1}


def kept_by_sorting(row, *, top_k, top_p):
    """The definition, in float64 with a stable sort."""
    order = np.argsort(-row, kind="stable")
    weights = np.exp(row[order].astype(np.float64) - row.max())
    weights[top_k:] = 0
    before = np.concatenate([[0], np.cumsum(weights)[:-1]]) / weights.sum()
    return set(order[(before < top_p - 1e-6) & (weights > 0)].tolist())


def test_filters_equal_a_stable_sort_with_many_ties():
    rng = np.random.default_rng(0)
    rows = rng.integers(-6, 3, (4, 97)).astype(np.float32) / 2
    for top_k, top_p in [(7, 0.9999), (97, 0.7), (20, 0.5), (1, 0.3), (96, 0.999)]:
        sampler = Sampler(top_k=top_k, top_p=top_p)
        tokens = np.asarray(draw(np.tile(rows, (300, 1)), sampler).token_B).reshape(300, 4)
        for row, drawn in zip(rows, tokens.T, strict=True):
            kept = kept_by_sorting(row, top_k=top_k, top_p=top_p)
            assert set(drawn.tolist()) <= kept
            if len(kept) <= 8:
                assert set(drawn.tolist()) == kept


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    seen = jnp.array([[True, False, False], [False, True, False]])
    rows = [[2.0, 1.5, 0.0], [-1.0, -0.8, -5.0]]
    tokens = draw(rows, Sampler(temperature=0.0, repetition_penalty=1.5), seen=seen).token_B
    assert tokens.tolist() == [1, 0]  # 2/1.5 < 1.5;  -.8 * 1.5 < -1
    assert draw(rows, Sampler(temperature=0.0)).token_B.tolist() == [0, 1]


# --- distribution and seeds ----------------------------------------------------------------------


def test_frequencies_follow_the_probabilities():
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    tokens = draw(np.log(np.tile(probabilities, (4000, 1))), Sampler()).token_B
    counts = np.bincount(np.asarray(tokens), minlength=4)
    # Four standard deviations of a binomial count.
    assert np.all(np.abs(counts - 4000 * probabilities) < 4 * np.sqrt(4000 * probabilities))


def test_equal_logits_are_drawn_evenly_over_the_whole_vocabulary():
    # Noise in bfloat16 gives a mean near 134 instead of 100,544.
    tokens = np.concatenate(
        [draw(np.zeros((20, 201_088)), Sampler(), step=s).token_B for s in range(5)]
    )
    # The mean of 100 uniform draws has a deviation of 201,088 / sqrt(12 * 100) = 5,805.
    assert abs(tokens.mean() - 100_544) < 4 * 5805
    assert len(set(tokens.tolist())) > 96


def test_large_noise_has_no_steps():
    """Of 23 random bits the 50 largest values are all there are beyond 12: ties, which go to the
    lower id. Of six million draws 37 lie there."""
    noise = jax.jit(lambda words: jax.lax.map(lambda w: _noise(w, jnp.int32(0), 201_088), words))
    large = np.asarray(noise(seed_words(range(30))))
    large = large[large > 12]
    assert 15 < len(large) < 70 and len(np.unique(large)) == len(large)


def test_a_row_draws_the_same_alone_and_among_others():
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(4, 301))
    sampler = Sampler()
    for step in range(5):
        alone = draw(rows[2], sampler, seeds=[42], step=step).token_B[0]
        among = draw(rows, sampler, seeds=[7, 8, 42, 9], step=step).token_B[2]
        moved = draw(rows[[2, 0, 3, 1]], sampler, seeds=[42, 1, 2, 3], step=step).token_B[0]
        assert alone == among == moved


def test_seeds_and_steps_each_change_the_draw():
    rows = np.zeros((64, 5000))
    first = np.asarray(draw(rows, Sampler()).token_B)
    assert len(set(first.tolist())) > 55
    assert np.mean(first == np.asarray(draw(rows, Sampler(), step=1).token_B)) < 0.1
    high = draw(rows[:2], Sampler(), seeds=[5, 5 + 2**32]).token_B
    assert high[0] != high[1]


def test_filters_do_not_change_a_draw_they_do_not_forbid():
    rows = np.random.default_rng(2).normal(size=(1200, 97)) * 2
    free = np.asarray(draw(rows, Sampler()).token_B)
    ranks = (rows > rows[np.arange(1200), free][:, None]).sum(1)
    kept = np.asarray(draw(rows, Sampler(top_k=12, top_p=0.9999999)).token_B)
    assert (ranks < 12).any() and (ranks >= 12).any()
    assert (kept == free)[ranks < 12].all() and (kept != free)[ranks >= 12].all()


# --- the vocabulary, bad logits, log probabilities -----------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_beyond_the_text_vocabulary_never_come_up(temperature):
    rows = np.full((50, 256), -9.0)
    rows[:, 250:] = 0.0  # what a zero-padded unembedding gives
    out = draw(rows, Sampler(temperature=temperature), text_vocab=250, logprobs=True, top=250)
    assert int(out.token_B.max()) < 250
    assert int(out.top_ids_BL.max()) < 250
    np.testing.assert_allclose(out.logprob_B, -np.log(250), rtol=1e-5)


@pytest.mark.parametrize("sampler", [Sampler(temperature=0.0), Sampler()])
def test_rows_that_are_not_finite_are_flagged_and_the_others_are_not(sampler):
    good = [0.1, 0.2, -np.inf, 0.3]
    bad = [[np.nan] * 4, [0.1, 0.2, np.nan, 0.3], [-np.inf] * 4, [0.0, np.inf, 0.0, 0.0]]
    # 2,088 wide, since there a vectorised maximum can lose a NaN.
    rows = np.full((5, 2088), -50.0)
    rows[:, 777:781] = [good, *bad]
    rows[3] = -np.inf
    out = draw(rows, sampler, seeds=[3] * 5)
    assert out.bad_B.tolist() == [False, True, True, True, True]
    assert out.token_B[0] == draw(rows[[0] * 5], sampler, seeds=[3] * 5).token_B[0]


def test_log_probabilities_are_before_temperature_penalty_and_filters():
    row = np.array([1.0, 0.5, -2.0, 0.0])
    right = row - np.log(np.exp(row).sum())
    sampler = Sampler(temperature=0.3, top_k=2, repetition_penalty=2.0)
    out = draw(row, sampler, logprobs=True, top=3, seen=jnp.array([[True, False, False, False]]))
    np.testing.assert_allclose(out.logprob_B[0], right[int(out.token_B[0])], rtol=1e-6)
    assert out.top_ids_BL[0].tolist() == [0, 1, 3]
    np.testing.assert_allclose(out.top_logprobs_BL[0], right[[0, 1, 3]], rtol=1e-6)


@pytest.mark.parametrize("temperature", [1e-20, 1e-38, 1e-45, 1e-320])
def test_a_temperature_near_zero_draws_the_most_probable(temperature):
    """Not token 0: 1e-45 is zero where subnormals are flushed, and 0 / 0 is no number."""
    rows = [[0.5, 3.0, -1.0, 2.999], [-np.inf, -7.0, -8.0, -7.1]]
    for more in ({}, {"top_p": 0.9}):
        out = draw(rows, Sampler(temperature=temperature, **more))
        assert out.token_B.tolist() == [1, 1] and not out.bad_B.any()


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_the_strongest_penalties_stay_numbers(temperature, penalty):
    """Tokens seen go to the top or the bottom, a logit of zero stays what it is."""
    rows, seen = [[0.0, 2e4, -2e4, 1.0]], jnp.array([[True, True, True, False]])
    out = draw(rows, Sampler(temperature=temperature, repetition_penalty=penalty), seen=seen)
    assert out.token_B.tolist() == [1 if penalty < 1 else 3] or temperature == 1.0
    assert not out.bad_B.any()


def test_numbers_of_numpy_are_numbers():
    given = Sampler(temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float16(0.5))
    assert given.knobs() == Sampler(temperature=0.5, top_k=3, top_p=0.5).knobs()
    assert Sampler(temperature=np.int32(0)).greedy


def test_changing_values_compiles_nothing():
    rows = np.zeros((300, 4))
    draw(rows, Sampler(temperature=0.5, top_k=3, top_p=0.5))
    before = jitted._cache_size()
    draw(rows, Sampler(temperature=0.9, top_k=5, top_p=0.7), step=4, seeds=range(5, 305))
    assert jitted._cache_size() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", True),
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_k", -(10**30)),
        ("top_p", float("nan")),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 9e-7),
        ("repetition_penalty", 1.1e6),
        ("repetition_penalty", float("nan")),
    ],
)
def test_values_outside_their_range_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        Sampler(**{name: value})


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True])
def test_bad_seeds_are_named(seed):
    with pytest.raises(ValueError, match=r"seeds\[1\]"):
        seed_words([0, seed])
