"""The same checkpoint here and in PyTorch, compared layer by layer.

transformers is the other side for the Hugging Face layouts, OpenAI's own torch model for original/.
Our numbers are computed first and our model is let go before the reference is opened, so that the
peak memory is the larger of the two models, not their sum.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from . import references

# Median over positions of the root mean square difference of logits, in units of the logits'
# standard deviation. Tiny models of four layers, 300 tokens, against float64: 2e-6 in float32 and
# 0.02 in bfloat16, for the references as for us; deeper models add up more roundings.
_MEDIAN_BOUND = {"float32": 1e-4, "bfloat16": 0.1}


@dataclasses.dataclass(frozen=True)
class Difference:
    """Ours less theirs over one activation of shape [T, D] (or [T, V])."""

    max: float
    mean: float
    spread: float  # standard deviation of theirs: what max and mean are to be measured by
    cosine: float  # the lowest over the T positions


@dataclasses.dataclass(frozen=True)
class Layer:
    layer: int
    attention: Difference  # the residual stream after attention
    experts: Difference  # the residual stream after the experts
    router: float  # share of positions at which both chose the same set of experts


@dataclasses.dataclass(frozen=True)
class Length:
    """One sequence of `length` tokens."""

    length: int
    layers: list[Layer]
    logits: Difference  # ids without text masked, as everywhere below
    median: float  # median over positions of the logits' root mean square difference / spread
    kl_mean: float  # KL(theirs || ours), nats
    kl_max: float
    argmax: float  # share of positions whose most likely id is the same
    clear: int  # positions whose top-2 margin exceeds four times their root mean square difference
    clear_wrong: int  # those of them whose most likely id differs nevertheless
    greedy: list[int]  # ours, from the end of the sequence
    greedy_equal: int  # how many of them the reference would have chosen too, from the first on


@dataclasses.dataclass(frozen=True)
class Report:
    """What `parity` found. `problems` is empty when the two models agree."""

    path: str
    reference: str
    dtype: str
    text_vocab: int  # ids from here on are masked on both sides
    lengths: list[Length]

    @property
    def problems(self) -> list[str]:
        return [f"{one.length} tokens: {p}" for one in self.lengths for p in self._problems(one)]

    def _problems(self, one: Length) -> Iterator[str]:
        bound = _MEDIAN_BOUND[self.dtype]
        if not one.median <= bound:  # NaN is a problem too
            yield f"the logits' median difference is {one.median:.2g} spreads; {bound:.2g} is noise"
        if one.clear_wrong:
            yield f"{one.clear_wrong} of {one.clear} clear choices of the next token differ"
        if self.dtype == "float32" and one.greedy_equal < len(one.greedy):
            yield f"only the first {one.greedy_equal} of {len(one.greedy)} greedy ids are equal"

    def to_json(self) -> dict[str, Any]:
        """Everything, and `problems`. What is not finite becomes None: JSON has no NaN."""
        return _finite(dataclasses.asdict(self) | {"problems": self.problems})

    def table(self) -> str:
        """One line a length, then one a layer at the longest length."""
        lines = [
            f"{self.path} in {self.dtype}, against {self.reference}",
            "",
            "tokens  logits max     mean   median   cosine  KL mean   KL max  argmax"
            "  clear  wrong  greedy",
        ]
        for one in self.lengths:
            d = one.logits
            lines.append(
                f"{one.length:6}  {d.max / d.spread:10.2g} {d.mean / d.spread:8.2g} "
                f"{one.median:8.2g} {d.cosine:8.6f} {one.kl_mean:8.2g} {one.kl_max:8.2g} "
                f"{one.argmax:7.1%} {one.clear:6} {one.clear_wrong:6} "
                f"{f'{one.greedy_equal}/{len(one.greedy)}':>7}"
            )
        last = max(self.lengths, key=lambda one: one.length)
        lines += [
            "",
            f"at {last.length} tokens   after attention              after experts",
            " layer        max     mean   cosine       max     mean   cosine  same experts",
        ]
        for row in last.layers:
            lines.append(
                f"{row.layer:6} "
                + " ".join(
                    f"{d.max / d.spread:10.2g} {d.mean / d.spread:8.2g} {d.cosine:8.6f}"
                    for d in (row.attention, row.experts)
                )
                + f" {row.router:12.1%}"
            )
        lines += ["", "Differences are in units of the reference's standard deviation."]
        lines += [f"differs: {p}" for p in self.problems] or ["The two agree."]
        return "\n".join(lines)


def _finite(value):
    match value:
        case float():
            return value if math.isfinite(value) else None
        case list():
            return [_finite(v) for v in value]
        case dict():
            return {k: _finite(v) for k, v in value.items()}
    return value


def parity(
    path: str | os.PathLike,
    *,
    lengths: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    new_tokens: int = 16,
    dtype: str = "float32",
    experts: str | None = None,
    backend: str | None = None,
    mesh: Mesh | None = None,
    device: str = "cpu",
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Loads a checkpoint here and in PyTorch and compares them.

    lengths: of the sequences; None: 1 (which already shows sinks and YaRN's concentration), the
    window, and well beyond two windows. tokens: at least as many ids as the longest; None: random
    ids below the text vocabulary, from `seed`. new_tokens: greedy ids after each sequence.
    dtype: of weights and activations on both sides. experts, backend, mesh: as in `load`; with
    several processes each of them opens a reference of its own and returns the same report.
    device: the reference's, as torch names it. progress: gets a line of text as each part is done.

    Raises ValueError for impossible lengths and tokens, CheckpointError for a bad checkpoint and
    references.ReferenceMissing (an ImportError) where torch or the reference is not installed.
    """
    from .checkpoint import load
    from .places import find

    if dtype not in _MEDIAN_BOUND:
        raise ValueError(f"dtype must be one of {', '.join(_MEDIAN_BOUND)}; got {dtype!r}.")
    folder = find(path)
    references.require(folder)
    model = load(folder, dtype=dtype, experts=experts, backend=backend, mesh=mesh)
    vocab = model.config.vocab
    text_vocab = min(model.text_vocab or vocab, vocab)
    lengths = lengths or (1, model.config.window, 2 * model.config.window + 44)
    ids = _checked(tokens, lengths, text_vocab, seed)
    progress(f"{path} is loaded here")
    ours = []
    for length in lengths:
        ours.append(_ours(model, ids[:length], new_tokens))
        progress(f"{length} tokens are computed here")
    del model
    reference = references.open_reference(folder, dtype=dtype, device=device)
    name = f"{reference.name} {reference.version}"
    progress(f"{path} is loaded in {name}")
    compared = []
    for length, one in zip(lengths, ours, strict=True):
        compared.append(_compared(reference, ids[:length], *one, text_vocab))
        progress(f"{length} tokens: the logits' median difference is {compared[-1].median:.2g}")
    return Report(str(path), name, dtype, text_vocab, compared)


def _checked(tokens, lengths, text_vocab: int, seed: int) -> list[int]:
    if bad := [n for n in lengths if n < 1]:
        raise ValueError(f"lengths must be at least 1; got {bad}.")
    longest = max(lengths)
    if tokens is None:
        return np.random.default_rng(seed).integers(0, text_vocab, longest).tolist()
    if len(tokens) < longest:
        raise ValueError(f"{longest} tokens are to be compared, but only {len(tokens)} are given.")
    return list(tokens)


def _ours(model, tokens: list[int], new_tokens: int) -> tuple[dict, list[int]]:
    """Our trace without the batch axis, and our greedy continuation."""
    from .generation import generate
    from .sampling import Sampler

    trace = {
        name: [a[0] for a in value] if isinstance(value, list) else value[0]
        for name, value in model.trace([tokens]).items()
    }
    if not new_tokens:
        return trace, []
    out = generate(
        model,
        [tokens],
        max_new_tokens=new_tokens,
        sampler=Sampler(temperature=0.0),
        stop_tokens=(),
    )
    return trace, out.tokens[0]


def _compared(reference, tokens: list[int], ours: dict, greedy: list[int], text_vocab: int):
    theirs = reference.trace(tokens)
    layers = [
        Layer(
            layer=i,
            attention=difference(ours["after_attention"][i], theirs["after_attention"][i]),
            experts=difference(ours["after"][i], theirs["after"][i]),
            router=same_sets(ours["router_ids"][i], theirs["router_ids"][i]),
        )
        for i in range(len(theirs["after"]))
    ]
    a = np.asarray(ours["logits"], np.float64)[:, :text_vocab]
    b = np.asarray(theirs["logits"], np.float64)[:, :text_vocab]
    rows = np.sqrt(np.mean((a - b) ** 2, axis=-1))
    top = np.sort(b, axis=-1)
    clear = top[:, -1] - top[:, -2] > 4 * rows
    same = a.argmax(axis=-1) == b.argmax(axis=-1)
    kl = divergence(b, a)
    return Length(
        length=len(tokens),
        layers=layers,
        logits=difference(a, b),
        median=float(np.median(rows) / np.std(b)),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        argmax=float(same.mean()),
        clear=int(clear.sum()),
        clear_wrong=int((clear & ~same).sum()),
        greedy=greedy,
        greedy_equal=_followed(reference, tokens, greedy, text_vocab),
    )


def _followed(reference, tokens: list[int], greedy: list[int], text_vocab: int) -> int:
    """How many of our greedy ids the reference chooses too.

    One pass over prompt and continuation answers it: as long as the ids are equal, the logits
    after each of them are those of a greedy run.
    """
    if not greedy:
        return 0
    logits = reference.logits([*tokens, *greedy[:-1]])[len(tokens) - 1 :, :text_vocab]
    differs = np.flatnonzero(logits.argmax(axis=-1) != np.asarray(greedy))
    return int(differs[0]) if differs.size else len(greedy)


def difference(ours, theirs) -> Difference:
    """Of two arrays [T, D]; NaN on either side makes every number NaN."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"ours has shape {a.shape}, theirs {b.shape}.")
    gap = np.abs(a - b)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosine = np.sum(a * b, axis=-1) / np.maximum(norms, np.finfo(np.float64).tiny)
    return Difference(float(gap.max()), float(gap.mean()), float(b.std()), float(cosine.min()))


def same_sets(ours, theirs) -> float:
    """Share of rows of [T, X] that hold the same ids in any order."""
    return float(np.mean(np.all(np.sort(ours, axis=-1) == np.sort(theirs, axis=-1), axis=-1)))


def divergence(p_logits: np.ndarray, q_logits: np.ndarray) -> np.ndarray:
    """KL(p || q) in nats of each row of [T, V] logits."""
    log_p, log_q = (x - x.max(axis=-1, keepdims=True) for x in (p_logits, q_logits))
    log_p = log_p - np.log(np.exp(log_p).sum(axis=-1, keepdims=True))
    log_q = log_q - np.log(np.exp(log_q).sum(axis=-1, keepdims=True))
    return np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
