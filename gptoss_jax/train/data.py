"""Documents with loss weights, packed into rows in which none sees another.

A document is a sequence of ids and, for each, whether predicting it counts. Several lie in one row.
Attention knows positions alone (slot j is seen by query i iff 0 <= pos j <= pos i, and within the
window), so a row keeps documents apart by distance: the positions of each begin one row length
after the last position of the one before, and every layer's window is at most a row, which no
document exceeds. Rotary embedding depends on differences of positions, so a packed document
computes what it computes alone, up to the rounding of larger angles (row length 512: positions
below 8,192, float32 angles exact to 5e-4).

    tokens      a b c d  p q r  .      positions   0 1 2 3  11 12 13  -1       (rows of 8)
    targets     b c d .  q r .  .      weights     1 1 1 0   1  1  0   0
"""

import dataclasses
import json
import pathlib
import zipfile

import numpy as np

from ..text import Tokenizer, harmony

ROWS_OPEN = 32  # first-fit looks at this many unfinished rows: 97 % of the slots filled at 5 a row


@dataclasses.dataclass(frozen=True)
class Documents:
    """tokens [n] int32; counts [n] bool, whether predicting the token is trained; starts [documents
    + 1] int64."""

    tokens: np.ndarray
    counts: np.ndarray
    starts: np.ndarray

    def __post_init__(self):
        n = len(self.tokens)
        if len(self.counts) != n or self.starts[0] != 0 or self.starts[-1] != n:
            raise ValueError(
                f"{n} tokens, {len(self.counts)} loss weights and starts from {self.starts[0]} "
                f"to {self.starts[-1]} do not fit together."
            )
        if np.any(np.diff(self.starts) < 1):
            raise ValueError(f"document {int(np.argmin(np.diff(self.starts)))} is empty.")

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    @classmethod
    def of(cls, documents) -> "Documents":
        """From an iterable of (ids, counts) pairs."""
        pairs = [(np.asarray(ids, np.int32), np.asarray(counts, bool)) for ids, counts in documents]
        if not pairs:
            raise ValueError("there are no documents to train on: the data is empty.")
        lengths = [len(ids) for ids, _ in pairs]
        tokens, counts = (np.concatenate(column) for column in zip(*pairs, strict=True))
        return cls(tokens, counts, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))

    def save(self, path: str | pathlib.Path) -> None:
        """Compressed .npz; `load` reads it."""
        narrow = np.uint16 if self.tokens.max() < 2**16 else np.int32
        np.savez_compressed(
            path, tokens=self.tokens.astype(narrow), counts=self.counts, starts=self.starts
        )

    @classmethod
    def load(cls, path: str | pathlib.Path, tokenizer: Tokenizer | None = None) -> "Documents":
        """Reads .npz, or .jsonl with a tokenizer: lines {"text": ...} or {"messages": [...]}.

        Raises ValueError for a file that is missing, empty, or of neither kind.
        """
        path = pathlib.Path(path)
        if not path.is_file():
            raise ValueError(f"the training data {path} does not exist.")
        if path.suffix == ".npz":
            if not zipfile.is_zipfile(path):
                raise ValueError(f"{path} is not a file of documents: no zip archive.")
            try:
                with np.load(path, allow_pickle=False) as file:
                    return cls(
                        file["tokens"].astype(np.int32),
                        file["counts"].astype(bool),
                        file["starts"].astype(np.int64),
                    )
            except (KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
                raise ValueError(f"{path} is not a file of documents: {error}") from error
            except IndexError as error:
                raise ValueError(f"{path} holds no documents: the data is empty.") from error
        if path.suffix != ".jsonl":
            raise ValueError(f"training data is .npz or .jsonl; got {path}.")
        if tokenizer is None:
            raise ValueError(f"{path} is text: data.tokenizer must name a tokenizer.json.")
        with path.open(encoding="utf-8") as lines:
            return cls.of(
                _from_line(line, f"{path}:{n}", tokenizer)
                for n, line in enumerate(lines, 1)
                if line.strip()
            )


def _from_line(line: str, where: str, tokenizer: Tokenizer):
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict) or ("text" in record) == ("messages" in record):
        raise ValueError(f'{where} must be an object with either "text" or "messages".')
    if "text" in record:
        return text_document(record["text"], tokenizer)
    try:
        return conversation(tokenizer=tokenizer, **record)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{where}: {error}") from error


def text_document(text: str, tokenizer: Tokenizer):
    """(ids, counts) of plain text, closed by <|endoftext|>; every token is trained but the first,
    which nothing predicts."""
    ids = [*tokenizer.encode(text), tokenizer.special["<|endoftext|>"]]
    return ids, [False] + [True] * (len(ids) - 1)


def conversation(messages, tokenizer: Tokenizer, *, turns: str = "last", **about):
    """(ids, counts) of a Harmony conversation: what the assistant wrote counts, its stop tokens
    included; what system, developer, user and tools wrote does not.

    turns: "last" trains the last turn, whose prompt is what `harmony.render` gives; "all" every
    turn, of which the earlier ones end in <|end|> where sampling ends in <|return|>. Analysis of
    earlier turns is left out, as it is in prompts. about: as in `harmony.render_training`.
    """
    asked = max((n for n, m in enumerate(messages) if _field(m, "role") == "user"), default=0)
    kept = [_without_thinking(m) if n < asked else m for n, m in enumerate(messages)]
    kept = [m for n, m in enumerate(kept) if n >= asked or _field(m, "channel") != "analysis"]
    return harmony.render_training(kept, tokenizer, turns=turns, drop_analysis=False, **about)


def _field(message, name: str):
    return message.get(name) if isinstance(message, dict) else getattr(message, name)


def _without_thinking(message):
    if not isinstance(message, dict):
        return message
    names = ("thinking", "reasoning_content", "reasoning")  # what servers call it
    return {key: value for key, value in message.items() if key not in names}


def pack(lengths: np.ndarray, row: int) -> list[list[int]]:
    """Document numbers by row: each goes to the first of the open rows that has room."""
    assert lengths.max() <= row
    rows: list[list[int]] = []
    room: list[int] = []
    first = 0  # rows before this one are closed
    for document, length in enumerate(lengths.tolist()):
        for r in range(first, len(rows)):
            if room[r] >= length:
                rows[r].append(document)
                room[r] -= length
                break
        else:
            rows.append([document])
            room.append(row - length)
        first = max(first, len(rows) - ROWS_OPEN)
    return rows


class Batches:
    """The batch of every step, as a function of the step alone: to resume, the step is enough.

    Documents are shuffled and packed once by the seed; each pass over the data permutes the rows.
    Raises ValueError for a document longer than a row.
    """

    def __init__(self, documents: Documents, *, row: int, rows: int, seed: int):
        self.documents, self.row, self.rows, self.seed = documents, row, rows, seed
        longest = int(np.argmax(documents.lengths))
        if documents.lengths[longest] > row:
            raise ValueError(
                f"document {longest} has {documents.lengths[longest]} tokens and data.row is "
                f"{row}: a document is never cut, so make rows longer or the document shorter."
            )
        order = np.random.default_rng((seed, 0)).permutation(len(documents))
        self.packed = [order[row_] for row_ in pack(documents.lengths[order], row)]

    @property
    def fill(self) -> float:
        """Share of slots that hold a token."""
        return len(self.documents.tokens) / (len(self.packed) * self.row)

    def at(self, step: int) -> dict[str, np.ndarray]:
        """tokens, positions, targets int32 and weights float32, all [rows, row]."""
        return self.of(self._row_of(step * self.rows + i) for i in range(self.rows))

    def _row_of(self, n: int):
        turn, i = divmod(n, len(self.packed))
        return self.packed[self._permutation(turn)[i]]

    def _permutation(self, turn: int):
        if getattr(self, "_turn", None) != turn:
            rng = np.random.default_rng((self.seed, 1, turn))
            self._order, self._turn = rng.permutation(len(self.packed)), turn
        return self._order

    def of(self, rows) -> dict[str, np.ndarray]:
        """The arrays of these rows (each a list of document numbers)."""
        shape = (self.rows, self.row)
        out = {
            "tokens": np.zeros(shape, np.int32),
            "positions": np.full(shape, -1, np.int32),
            "targets": np.zeros(shape, np.int32),
            "weights": np.zeros(shape, np.float32),
        }
        starts, ids, counts = self.documents.starts, self.documents.tokens, self.documents.counts
        for r, documents in enumerate(rows):
            slot = position = 0
            for document in documents:
                a, b = starts[document], starts[document + 1]
                n = b - a
                end = slot + n
                out["tokens"][r, slot:end] = ids[a:b]
                out["positions"][r, slot:end] = np.arange(position, position + n)
                out["targets"][r, slot : end - 1] = ids[a + 1 : b]
                out["weights"][r, slot : end - 1] = counts[a + 1 : b]
                slot, position = end, position + n - 1 + self.row
        return out
