"""Looks a checkpoint through without building the model: what it is, and all that is wrong."""

import collections
import dataclasses
import re
from typing import Any

from tqdm import tqdm

from ..config import Config
from ..errors import CheckpointError
from . import names
from .layouts import Checkpoint, open_checkpoint
from .parts import parts_of
from .stops import tokens
from .values import Watch


@dataclasses.dataclass(frozen=True)
class Report:
    """What `inspect` found. problems: why the folder cannot be loaded; notes: what is odd."""

    path: str
    layout: str | None
    config: Config | None
    files: dict[str, int]  # bytes
    tensors: list[dict[str, Any]]  # name, dtype, shape, bytes, file
    parameters: dict[str, int]
    stop_tokens: tuple[int, ...]
    text_vocab: int | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; `size_bytes` is the files' sum."""
        return dataclasses.asdict(self) | {"size_bytes": sum(self.files.values()), "ok": self.ok}

    def __str__(self) -> str:
        described = names.DESCRIPTIONS.get(self.layout or "", "not recognised")
        lines = [
            self.path,
            f"layout      {self.layout or 'none'}: {described}",
            f"files       {len(self.files)}, {sum(self.files.values()):,} bytes",
        ]
        if self.parameters:
            lines.append(
                f"parameters  {self.parameters['total']:,}, of which a token uses "
                f"{self.parameters['active']:,}; experts {self.parameters['experts']:,}"
            )
        if self.config is not None:
            fields = dataclasses.asdict(self.config)
            fields["sliding"] = "".join("s" if s else "f" for s in self.config.sliding)
            shown = [f"{name} {value}" for name, value in fields.items()]
            lines += [
                f"{'config' if i == 0 else '':12}" + ", ".join(shown[i : i + 6])
                for i in range(0, len(shown), 6)
            ]
            vocab = "unknown" if self.text_vocab is None else f"{self.text_vocab} ids with a text"
            lines.append(f"tokens      {vocab}, stops {list(self.stop_tokens)}")
        lines += [f"tensors     {len(self.tensors)}", *_table(self.tensors)]
        for title, listed in (("notes", self.notes), ("problems", self.problems)):
            lines += [f"{title:12}{len(listed) or 'none'}", *(f"  {line}" for line in listed)]
        return "\n".join(lines)


def inspect(path, *, allow_zero: bool = False) -> Report:
    """Reads headers and every value of a checkpoint (a path as in `load`).

    allow_zero: report weights that are zero throughout as notes, not as problems.
    Raises CheckpointError only where there is no folder to look into.
    """
    found = open_checkpoint(path)
    problems, notes = list(found.problems), list(found.notes)
    stop_tokens, text_vocab = (), None
    if found.config is not None:
        try:
            stop_tokens, text_vocab = tokens(found)
        except CheckpointError as e:
            problems += e.problems
    if not found.problems:
        watch = _look(found, allow_zero)
        problems += watch.problems()
        if allow_zero:
            notes += [f"{line}." for line in watch.dead()]
    elif found.files.tensors:
        notes.append("values were not read; mend the problems below first.")
    return Report(
        path=str(found.folder),
        layout=found.layout,
        config=found.config,
        files={f.path.name: f.path.stat().st_size for f in found.files.files},
        tensors=[
            dict(
                name=name,
                dtype=tensor.stored,
                shape=list(tensor.shape),
                bytes=tensor.nbytes,
                file=tensor.file.path.name,
            )
            for name, tensor in found.files.tensors.items()
        ],
        parameters={} if found.config is None else parameter_counts(found.config),
        stop_tokens=stop_tokens,
        text_vocab=text_vocab,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def parameter_counts(config: Config) -> dict[str, int]:
    """total; experts; active: what one token goes through, unembedding included, embedding not."""
    c = config
    expert = 2 * c.ffn * (c.embed + 1) + c.embed * (c.ffn + 1)
    experts = c.layers * c.experts * expert
    idle = c.layers * (c.experts - c.experts_per_token) * expert
    embedding = c.vocab * c.embed
    return {
        "total": c.parameters,
        "experts": experts,
        "embedding": embedding,
        "active": c.parameters - idle - embedding,
    }


def _look(found: Checkpoint, allow_zero: bool) -> Watch:
    watch = Watch(allow_zero=allow_zero)
    parts = parts_of(found, watch, None, own=False)
    total = sum(part.nbytes for part in parts.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading", disable=None) as bar:
        for part in parts.values():
            part[...]
            part.forget()
            bar.update(part.nbytes)
    return watch


def _table(tensors: list[dict[str, Any]]) -> list[str]:
    """One line for tensors that differ in their layer (or expert) alone."""
    groups = collections.defaultdict(list)
    for tensor in tensors:
        general = re.sub(r"\.\d+(?=\.)", ".*", tensor["name"])
        groups[general, tensor["dtype"], tuple(tensor["shape"])].append(tensor["bytes"])
    width = max((len(name) for name, _, _ in groups), default=0)
    return [
        f"  {name:{width}}  {len(sizes):>4} x {dtype:7} {list(shape)!s:24} {sum(sizes):>16,} bytes"
        for (name, dtype, shape), sizes in groups.items()
    ]
