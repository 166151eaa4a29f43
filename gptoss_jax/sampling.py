"""Choosing the next token: one noisy argmax over the vocabulary, filters are masks before it.

A draw is argmax(logits / temperature + Gumbel noise). The noise of token v belongs to (row seed,
step, v) alone: not to the row's place in the batch, its neighbours, or what the filters removed.

Top-k and top-p keep "the smallest set of largest logits whose weight reaches a goal", with weight 1
and goal k, or weight exp(logit) and goal p. The set's smallest member is found by bisection on the
ordered bits of the logits: no sort of 201,088 values, and the same arithmetic for every row,
whatever the others hold.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

Number = Any  # Python's or NumPy's: checked by name, not by annotation

# What rounding may add or take from a sum of 201,088 probabilities: where {.5, .3} should reach
# p = .8 and sums to .79999995, the set must not grow by another token.
_MASS_SLACK = 1e-6
# Below it a logit's distance over the temperature, or 0 / 0 where float32 flushes it to zero, is no
# number any more; a draw at 1e-30 is already one among equal largest logits.
_COLDEST = 1e-30
_LARGEST = float(np.finfo(np.float32).max)
_PENALTIES = 1e-6, 1e6  # beyond, float32 logits times the factor overflow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """How the next token is drawn. Applied in this order; each value left alone does nothing.

    repetition_penalty: logits of tokens already in the prompt or the output are divided by it
        where positive and multiplied where negative; 1e-6 to 1e6.
    temperature: divides the logits; 0.0 takes the most probable token (ties: the lowest id), and
        the filters below then change nothing. Less than 1e-30 counts as 1e-30.
    top_k: keep the k most probable tokens.
    top_p: of those, keep the smallest set of most probable tokens whose mass is at least p (never
        none; equal ones by lowest id).
    min_p: keep tokens at least min_p times as probable as the most probable.

    Raises ValueError for a value outside its range.
    """

    temperature: Number = 1.0
    top_k: Number | None = None
    top_p: Number = 1.0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), np.generic):
                object.__setattr__(self, field.name, value.item())  # plain, so that Plan is too
        if not _real(self.temperature) or self.temperature < 0:
            raise ValueError(
                "temperature must be finite and at least 0 (0 is greedy); "
                f"got {self.temperature!r}."
            )
        if self.top_k is not None and not (_whole(self.top_k) and self.top_k >= 1):
            raise ValueError(
                "top_k must be a whole number of at least 1, or None to keep all; "
                f"got {self.top_k!r}."
            )
        for name in ("top_p", "min_p"):
            if not _real(value := getattr(self, name)) or not 0 <= value <= 1:
                raise ValueError(f"{name} must lie in 0..1; got {value!r}.")
        low, high = _PENALTIES
        if not _real(self.repetition_penalty) or not low <= self.repetition_penalty <= high:
            raise ValueError(
                f"repetition_penalty must lie in {low:g}..{high:g} (1 changes nothing); "
                f"got {self.repetition_penalty!r}."
            )

    @property
    def greedy(self) -> bool:
        """Temperature 0: no randomness, seeds do not matter."""
        return self.temperature == 0

    def plan(
        self, *, text_vocab: int | None = None, logprobs: bool = False, top: int = 0
    ) -> "Plan":
        """What has to be computed for this sampler; see Plan."""
        filtered = not self.greedy
        return Plan(
            greedy=self.greedy,
            top_k=filtered and self.top_k is not None,
            top_p=filtered and self.top_p < 1,
            min_p=filtered and self.min_p > 0,
            penalty=self.repetition_penalty != 1,
            text_vocab=text_vocab,
            logprobs=logprobs,
            top=top,
        )

    def knobs(self) -> "Knobs":
        """The values, as arguments of a compiled function."""
        return Knobs(
            temperature=np.float32(1 if self.greedy else max(self.temperature, _COLDEST)),
            top_k=np.float32(min(self.top_k or 1, 2**24)),
            top_p=np.float32(self.top_p),
            min_p=np.float32(self.min_p),
            penalty=np.float32(self.repetition_penalty),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What of a sampler is compiled in: which steps there are. The values are Knobs.

    text_vocab: ids from here on have no text and are never drawn; None where all have.
    logprobs: also return the drawn token's.  top: how many of the most probable to return.
    """

    greedy: bool
    top_k: bool
    top_p: bool
    min_p: bool
    penalty: bool
    text_vocab: int | None
    logprobs: bool
    top: int


class Knobs(NamedTuple):
    """A sampler's values, float32 scalars. Changing them compiles nothing."""

    temperature: np.float32
    top_k: np.float32
    top_p: np.float32
    min_p: np.float32
    penalty: np.float32


class Draw(NamedTuple):
    """One token per row. Log probabilities are of the logits before penalty and temperature."""

    token_B: Int[Array, " B"]  # int32
    bad_B: Bool[Array, " B"]  # the row's logits hold a NaN or +inf, or nothing finite
    logprob_B: Float[Array, " B"] | None  # where plan.logprobs
    top_ids_BL: Int[Array, "B L"] | None  # L = plan.top, most probable first
    top_logprobs_BL: Float[Array, "B L"] | None


def seed_words(seeds) -> np.ndarray:
    """Seeds 0 <= seed < 2**64 as uint32 [B, 2], high word first. Raises ValueError outside."""
    for row, seed in enumerate(seeds):
        if not _whole(seed) or not 0 <= seed < 2**64:
            raise ValueError(f"seeds[{row}] must be a whole number in 0..2**64-1; got {seed!r}.")
    words = [(int(seed) >> 32, int(seed) & 0xFFFFFFFF) for seed in seeds]
    return np.array(words, np.uint32).reshape(-1, 2)


def sample(
    logits_BV: Float[Array, "B V"],
    seeds_B2: UInt32[Array, "B 2"],
    step: Int[Array, ""],
    knobs: Knobs,
    plan: Plan,
    seen_BV: Bool[Array, "B V"] | None = None,
) -> Draw:
    """Draws one token per row.

    logits: float32.  seeds: of seed_words.  step: how many tokens the rows have drawn before.
    seen: where plan.penalty, the tokens in prompt and output so far.
    """
    # Drawn from bfloat16, 201,088 equal logits gave a mean id of 134 instead of 100,544.
    assert logits_BV.dtype == jnp.float32, logits_BV.dtype
    if plan.text_vocab is not None and plan.text_vocab < logits_BV.shape[1]:
        text_V = jnp.arange(logits_BV.shape[1]) < plan.text_vocab
        logits_BV = jnp.where(text_V, logits_BV, -jnp.inf)

    chosen_from = logits_BV
    if plan.penalty:
        assert seen_BV is not None
        factor = jnp.where(logits_BV > 0, 1 / knobs.penalty, knobs.penalty)
        chosen_from = jnp.where(seen_BV, logits_BV * factor, logits_BV)

    if plan.greedy:
        # argmax takes a NaN for the largest, so that looking at what it chose is enough.
        token_B = _argmax(chosen_from)
        bad_B = ~jnp.isfinite(_pick(logits_BV, token_B))
    else:
        best_B1 = jnp.max(chosen_from, axis=1, keepdims=True)
        # Not by what max gives: XLA's on a CPU loses one NaN among 2,088 numbers.
        bad_B = jnp.any(~(logits_BV < jnp.inf), axis=1) | (best_B1[:, 0] == -jnp.inf)
        scaled_BV = (chosen_from - best_B1) / knobs.temperature
        kept_BV = _filters(scaled_BV, knobs, plan)
        noise_BV = jax.vmap(lambda words: _noise(words, step, logits_BV.shape[1]))(seeds_B2)
        token_B = _argmax(jnp.where(kept_BV, scaled_BV + noise_BV, -jnp.inf))

    logprob_B = top_ids_BL = top_logprobs_BL = None
    if plan.logprobs or plan.top:
        total_B = jax.nn.logsumexp(logits_BV, axis=1)
        if plan.logprobs:
            logprob_B = _pick(logits_BV, token_B) - total_B
        if plan.top:
            top_BL, top_ids_BL = jax.lax.top_k(logits_BV, plan.top)
            top_logprobs_BL = top_BL - total_B[:, None]
    return Draw(token_B, bad_B, logprob_B, top_ids_BL, top_logprobs_BL)


def _filters(scaled_BV, knobs: Knobs, plan: Plan):
    """The tokens that may be drawn. scaled: logits over temperature, their maximum 0."""
    kept_BV = scaled_BV > -jnp.inf
    if plan.top_k or plan.top_p:
        keys_BV = _ordered_bits(scaled_BV)
        if plan.top_k:
            goal_B = jnp.broadcast_to(knobs.top_k, scaled_BV.shape[:1])
            kept_BV &= _largest(keys_BV, jnp.ones_like(scaled_BV), goal_B)
        if plan.top_p:
            mass_BV = jnp.where(kept_BV, jnp.exp(scaled_BV), 0)
            share = jnp.maximum(knobs.top_p - _MASS_SLACK, 1e-30)  # 0 would ask for nobody
            goal_B = jnp.sum(mass_BV, axis=1) * share
            kept_BV &= _largest(keys_BV, mass_BV, goal_B)
    if plan.min_p:
        kept_BV &= scaled_BV >= jnp.log(knobs.min_p)
    return kept_BV


def _largest(keys_BV: UInt32[Array, "B V"], weight_BV: Float[Array, "B V"], goal_B):
    """The smallest set of largest keys whose weight is at least the goal, ties by lowest index;
    never empty, and everything where the whole weight falls short.

    edge_B = max {t : sum of weights with key >= t reaches the goal}, found from its top bits down.
    A candidate costs a read of the row: two bits a pass are 16 passes of 3, 48 reads. Four bits,
    120 reads in 8 passes, took 0.6 ms (top-k) and 2.5 ms (top-p) for 32 rows on an H200, where
    lax.top_k took 2.5 and lax.sort 4.0.
    """
    edge_B = jnp.zeros(keys_BV.shape[:1], jnp.uint32)
    steps_C = jnp.arange(1, 4, dtype=jnp.uint32)
    for shift in range(30, -1, -2):
        candidates_BC = edge_B[:, None] + (steps_C << np.uint32(shift))[None]
        above_BCV = keys_BV[:, None, :] >= candidates_BC[:, :, None]
        weight_BC = jnp.sum(jnp.where(above_BCV, weight_BV[:, None, :], 0), axis=2)
        reached_B = jnp.sum(weight_BC >= goal_B[:, None], axis=1).astype(jnp.uint32)
        edge_B = edge_B + (reached_B << np.uint32(shift))

    above_BV = keys_BV > edge_B[:, None]
    tied_BV = keys_BV == edge_B[:, None]
    missing_B = goal_B - jnp.sum(jnp.where(above_BV, weight_BV, 0), axis=1)
    each_B = jnp.max(jnp.where(tied_BV, weight_BV, 0), axis=1)  # tied keys weigh the same
    wanted_B = jnp.maximum(jnp.ceil(missing_B / jnp.maximum(each_B, jnp.float32(1e-37))), 1)
    rank_BV = jnp.cumsum(tied_BV.astype(jnp.int32), axis=1)
    return above_BV | (tied_BV & (rank_BV.astype(jnp.float32) <= wanted_B[:, None]))


def _ordered_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """uint32 in the order of the float32 values: x < y <=> bits(x) < bits(y), and -0 as +0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)
    return jnp.where(bits >> np.uint32(31) == 1, ~bits, bits | np.uint32(1 << 31))


def _noise(words_2, step, vocab: int) -> Float[Array, " V"]:
    """Gumbel noise of one row at one step; entry v does not depend on the vocabulary's size.

    mode "high": with 23 bits of uniform noise the largest of 201,088 draws has a neighbour 2 % away
    in probability, so ties, which go to the lower id, were no rarity.
    """
    key = jax.random.wrap_key_data(words_2, impl="threefry2x32")
    key = jax.random.fold_in(key, step.astype(jnp.uint32))
    return jax.random.gumbel(key, (vocab,), jnp.float32, mode="high")


def _argmax(x_BV) -> Int[Array, " B"]:
    return jnp.argmax(x_BV, axis=1).astype(jnp.int32)


def _pick(x_BV, token_B) -> Float[Array, " B"]:
    return jnp.take_along_axis(x_BV, token_B[:, None], axis=1)[:, 0]


def _whole(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _real(value) -> bool:
    """A number that float32 can hold: not NaN, not infinite."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= _LARGEST
