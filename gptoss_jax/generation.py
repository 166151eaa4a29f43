"""Text generation: `generate` runs a batch to its end, `stream` yields one prompt's tokens.

Both prefill in chunks and then call the one compiled loop of `decode.py`: generate once, stream
repeatedly, with the next call on its way while the last one's tokens are read.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from . import buckets
from .decode import BAD, RUNNING, STOPPED, Drawn, Request, Rows, programs
from .model import GptOss
from .sampling import Sampler, seed_words

# Lists, tuples, ranges, NumPy arrays: checked below, by name and place, not by annotation.
Ids = Any  # whole numbers
Prompts = Any  # a sequence of Ids

# Tokens of stream's successive decode calls; the last one repeats. The first two are single so that
# the first token is shown after two steps, the others long enough to hide the calls between them.
STREAM_CALLS = (1, 1, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns; one entry per prompt in every list.

    tokens: without prompt and stop token. finish_reasons: "stop" (a stop token came) or "length".
    logprobs: natural logs, of the drawn tokens, before temperature, penalty and filters.
    top_logprobs: for each token the most probable ids, most probable first, and their logs.
    """

    tokens: list[list[int]]
    finish_reasons: list[str]
    logprobs: list[list[float]] | None = None
    top_logprobs: list[list[dict[int, float]]] | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """One token of a stream. finish_reason is None but on the last step.

    token is None only on the single step of a stream that stopped before its first token.
    """

    token: int | None
    logprob: float | None = None
    finish_reason: str | None = None
    top_logprobs: dict[int, float] | None = None


def generate(
    model: GptOss,
    prompts: Prompts,
    *,
    max_new_tokens: int = 128,
    sampler: Sampler = Sampler(),  # noqa: B008 (frozen)
    stop_tokens: Ids | None = None,
    seeds: Ids | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
) -> Generation:
    """Continues every prompt by at most max_new_tokens tokens.

    prompts: non-empty sequences of token ids, of any lengths. With several processes each passes
        and gets the whole lists.
    stop_tokens: end a row and are not returned; None takes model.stop_tokens, () none.
    seeds: one whole number in 0..2**64-1 a row; None takes 0, 1, 2, ... A row's tokens depend on
        its own prompt and seed, not on its neighbours.
    logprobs: also return those of the drawn tokens; top_logprobs: and of the so many most probable.

    Raises ValueError, before anything is computed, for prompts that are not lists of known ids, for
    a prompt that with max_new_tokens exceeds config.max_context, and for values out of range; and
    afterwards where a row's logits were not finite.
    """
    run = _Run(
        model,
        _checked_prompts(prompts, model.config.vocab),
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        stop_tokens=stop_tokens,
        seeds=seeds,
        logprobs=logprobs,
        top=top_logprobs,
    )
    drawn = _fetch(run.decode(max_new_tokens, room=buckets.room(max_new_tokens)))
    run.check(drawn)
    B, counts = len(prompts), drawn.count_B
    return Generation(
        tokens=[drawn.token_BR[b, : counts[b]].tolist() for b in range(B)],
        finish_reasons=["stop" if s == STOPPED else "length" for s in drawn.status_B[:B]],
        logprobs=[drawn.logprob_BR[b, : counts[b]].tolist() for b in range(B)]
        if logprobs
        else None,
        top_logprobs=[[_top(drawn, b, r) for r in range(counts[b])] for b in range(B)]
        if top_logprobs
        else None,
    )


def stream(
    model: GptOss,
    prompt: Ids,
    *,
    max_new_tokens: int = 128,
    sampler: Sampler = Sampler(),  # noqa: B008 (frozen)
    stop_tokens: Ids | None = None,
    seeds: Ids | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
) -> Iterator[Step]:
    """The tokens that `generate` returns for this one prompt, one Step each as they come.

    Arguments and errors as in `generate` (seeds: of one row); arguments are checked at the call,
    before the first step is asked for. A token is held back until the next is known, so that the
    last one carries the finish reason.
    """
    run = _Run(
        model,
        _checked_prompts([prompt], model.config.vocab),
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        stop_tokens=stop_tokens,
        seeds=seeds,
        logprobs=logprobs,
        top=top_logprobs,
    )
    return _steps(run, max_new_tokens)


def _steps(run: "_Run", max_new_tokens: int) -> Iterator[Step]:
    calls = _stream_calls(max_new_tokens)
    room = buckets.room(1)
    coming = run.decode(next(calls), room=room)
    held = None
    while coming is not None:
        following = next(calls, None)
        ahead = None if following is None else run.decode(following, room=room)
        drawn = _fetch(coming)
        coming = ahead
        for r in range(int(drawn.count_B[0])):
            if held is not None:
                yield held
            held = Step(
                token=int(drawn.token_BR[0, r]),
                logprob=None if drawn.logprob_BR is None else float(drawn.logprob_BR[0, r]),
                top_logprobs=None if drawn.top_ids_BRL is None else _top(drawn, 0, r),
            )
        if drawn.status_B[0] != RUNNING:
            if held is not None and drawn.status_B[0] == BAD:
                yield held
            run.check(drawn)
            yield dataclasses.replace(held or Step(token=None), finish_reason="stop")
            return
    yield dataclasses.replace(held, finish_reason="length")


def _stream_calls(total: int) -> Iterator[int]:
    done = i = 0
    while done < total:
        n = min(STREAM_CALLS[min(i, len(STREAM_CALLS) - 1)], total - done)
        yield n
        done, i = done + n, i + 1


class _Run:
    """One generation under way: prefilled when made, then advanced by `decode`."""

    def __init__(
        self, model, prompts, *, max_new_tokens, sampler, stop_tokens, seeds, logprobs, top
    ):
        config, mesh = model.config, model.mesh
        _check_numbers(config, prompts, max_new_tokens, top)
        B = buckets.rows(len(prompts), 1 if mesh is None else mesh.shape["data"])
        seeds = range(len(prompts)) if seeds is None else _listed("seeds", seeds)
        if len(seeds) != len(prompts):
            raise ValueError(f"seeds has {len(seeds)} entries for {len(prompts)} prompts.")
        stops = model.stop_tokens if stop_tokens is None else stop_tokens
        stops = _checked_stops(stops, config.vocab)
        if not isinstance(sampler, Sampler):
            raise ValueError(f"sampler must be a gptoss_jax.Sampler; got {sampler!r:.60}.")

        self.plan = sampler.plan(text_vocab=model.text_vocab, logprobs=logprobs, top=top)
        self.request = Request(
            seeds_B2=np.pad(seed_words(seeds), ((0, B - len(prompts)), (0, 0))),
            stops=np.pad(stops, (0, buckets.stops(len(stops)) - len(stops)), constant_values=-1),
            knobs=sampler.knobs(),
        )
        graph, state = nnx.split(model)
        self.leaves, tree = jax.tree.flatten(state)
        gpu = next(iter(self.leaves[0].devices())).platform == "gpu"
        self.programs = programs(graph, tree, config, mesh, gpu=gpu)

        lengths = np.array([len(p) for p in prompts] + [1] * (B - len(prompts)), np.int32)
        longest = int(lengths.max())
        slots = buckets.capacity(longest + max_new_tokens, config.max_context)
        self.cache = self.programs.empty(B, slots, model.dtype)
        self.rows = Rows(
            token_B=np.array([p[-1] for p in prompts] + [0] * (B - len(prompts)), np.int32),
            status_B=np.array([RUNNING] * len(prompts) + [STOPPED] * (B - len(prompts)), np.int32),
            step=np.int32(0),
            seen_BV=_seen(prompts, B, config.vocab) if self.plan.penalty else None,
        )
        self._prefill(prompts, lengths - 1, B, gpu)

    def _prefill(self, prompts, stored_B, B, gpu):
        tokens = buckets.TOKENS_ON_GPU if gpu else buckets.TOKENS_ELSEWHERE
        for start, size in buckets.chunks(int(stored_B.max()), B, tokens):
            part_BT = np.zeros((B, size), np.int32)
            for row, prompt in zip(part_BT, prompts, strict=False):
                part = prompt[start : min(start + size, len(prompt) - 1)]
                row[: len(part)] = part
            self.cache = self.programs.prefill(
                self.leaves, self.cache, part_BT, np.int32(start), stored_B
            )

    def decode(self, n: int, *, room: int) -> Drawn:
        """Starts up to n more steps; returns at once, with arrays still being computed."""
        self.cache, self.rows, drawn = self.programs.decode(
            self.leaves, self.cache, self.rows, self.request, np.int32(n), self.plan, room
        )
        return drawn

    def check(self, drawn: Drawn):
        """Raises ValueError naming the rows whose logits were not finite."""
        if bad := np.flatnonzero(drawn.status_B == BAD).tolist():
            raise ValueError(
                f"the logits of row {', '.join(map(str, bad))} hold NaN or infinity, or nothing "
                "finite, so that no token can be drawn. Is a weight not finite, or a value beyond "
                "the range of the model's dtype?"
            )


def _fetch(drawn: Drawn) -> Drawn:
    return jax.tree.map(np.asarray, drawn)


def _top(drawn: Drawn, b: int, r: int) -> dict[int, float]:
    ids, logs = drawn.top_ids_BRL[b, r].tolist(), drawn.top_logprobs_BRL[b, r].tolist()
    return dict(zip(ids, logs, strict=True))


def _seen(prompts, B: int, vocab: int) -> np.ndarray:
    seen_BV = np.zeros((B, vocab), bool)
    for row, prompt in zip(seen_BV, prompts, strict=False):
        row[prompt] = True
    return seen_BV


def _checked_prompts(prompts, vocab: int) -> list[np.ndarray]:
    """One int32 array a prompt."""
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__len__"):
        raise ValueError(
            "prompts must be a sequence of sequences of token ids; "
            f"got {type(prompts).__name__}. Encode text with Tokenizer.encode."
        )
    if len(prompts) == 0:
        raise ValueError("prompts is empty: there is nothing to continue.")
    checked = []
    for row, prompt in enumerate(prompts):
        try:
            ids = np.asarray(prompt)
        except ValueError:  # lists of several lengths
            ids = np.empty(())
        if isinstance(prompt, (str, bytes)) or ids.ndim != 1:
            raise ValueError(
                f"prompts[{row}] must be a sequence of token ids; got {prompt!r:.60}. "
                "One prompt alone is [prompt]; text goes through Tokenizer.encode."
            )
        if ids.size == 0:
            raise ValueError(f"prompts[{row}] is empty: give at least one token.")
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"prompts[{row}] must hold whole numbers; got dtype {ids.dtype}.")
        if isinstance(prompt, (list, tuple)) and any(isinstance(i, bool) for i in prompt):
            raise ValueError(
                f"prompts[{row}] must hold whole numbers; True or False is among them."
            )
        if ((ids < 0) | (ids >= vocab)).any():
            where = int(np.flatnonzero((ids < 0) | (ids >= vocab))[0])
            raise ValueError(
                f"prompts[{row}][{where}] = {ids[where]} is no token id of this model "
                f"(0..{vocab - 1})."
            )
        checked.append(ids.astype(np.int32))
    return checked


def _check_numbers(config, prompts, max_new_tokens, top):
    for name, value, low, high in (
        ("max_new_tokens", max_new_tokens, 1, None),
        ("top_logprobs", top, 0, config.vocab),
    ):
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not whole or value < low or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"in {low}..{high}"
            raise ValueError(f"{name} must be a whole number {limits}; got {value!r}.")
    for row, prompt in enumerate(prompts):
        if len(prompt) + max_new_tokens > config.max_context:
            raise ValueError(
                f"prompts[{row}] has {len(prompt)} tokens; with max_new_tokens={max_new_tokens} "
                f"that exceeds the model's context of {config.max_context} positions."
            )


def _listed(name: str, values) -> list:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise ValueError(f"{name} must be a sequence of whole numbers; got {values!r}.")
    return list(values)


def _checked_stops(stop_tokens, vocab: int) -> np.ndarray:
    """Those that can be drawn, int32."""
    stops = _listed("stop_tokens", stop_tokens)
    whole = [isinstance(t, (int, np.integer)) and not isinstance(t, bool) and t >= 0 for t in stops]
    if not all(whole):
        raise ValueError(f"stop_tokens must be token ids, None or (); got {stop_tokens!r}.")
    return np.array(sorted({t for t in stops if t < vocab}), np.int32)
