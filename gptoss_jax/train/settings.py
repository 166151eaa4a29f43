"""What a training run's TOML file may say. Bad values are refused by name, all at once."""

import dataclasses
import difflib
import math
import pathlib
import tomllib
import types as types_module
import typing

from ..config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Where the documents are (.npz of `Documents.save`, or .jsonl) and how long a row is."""

    train: str
    valid: str | None = None
    tokenizer: str | None = None  # needed for .jsonl, and copied beside an exported model
    row: int = 512  # tokens; no document may be longer
    rows: int = 32  # rows a step, over the whole mesh
    valid_batches: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW with linear warmup and cosine decay to `floor` times the peak."""

    peak: float = 1e-3
    warmup: int = 100  # steps
    floor: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1  # matrices alone
    clip: float = 1.0  # largest norm of the whole gradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    folder: str
    steps: int
    seed: int = 0
    start: str | None = None  # checkpoint to start from, as `load` takes it; None: random weights
    compute: str = "bfloat16"  # of activations and products; master weights are float32
    remat: bool = True
    quantise_from: int = -1  # step from which experts are rounded to MXFP4; -1: never
    router_aux: float = 0.0  # weight of the load-balancing loss
    data_parallel: int = 1  # devices that share the rows of a batch
    expert_parallel: int = 1  # and devices in each of these that share experts and moments
    checkpoint_every: int = 500  # steps
    keep: int = 2  # checkpoints
    valid_every: int = 0  # steps; 0: at the end alone
    log_every: int = 1  # steps between lines of metrics.jsonl
    export: str | None = None  # folder for the finished model
    export_format: str = "mxfp4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    model: Config
    data: Data
    run: Run
    optimizer: Optimizer = Optimizer()

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Settings":
        """Reads a TOML file with tables [model] (the fields of Config), [data], [optimizer], [run].

        Relative paths in it are relative to the file. Raises ValueError, naming every field that is
        unknown, missing or wrong.
        """
        path = pathlib.Path(path)
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read the training config {path}: {error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not TOML: {error}") from error
        return cls.of(tables, folder=path.parent)

    @classmethod
    def of(cls, tables: dict, folder: str | pathlib.Path = ".") -> "Settings":
        """From the tables of a TOML file; see `load`."""
        problems: list[str] = []
        kinds = {"model": Config, "data": Data, "run": Run, "optimizer": Optimizer}
        problems += [f"{unknown('table', name, kinds)}" for name in tables if name not in kinds]
        parts = {}
        for name, kind in kinds.items():
            given = tables.get(name, {})
            if not isinstance(given, dict):
                problems.append(f"{name} must be a table; got {given!r}")
                continue
            if values := checked(name, kind, given, problems):
                try:
                    parts[name] = kind(**values[0])
                except ValueError as error:
                    problems.append(f"[{name}]: {error}")
        if set(parts) == set(kinds):
            problems += list(_wrong(**parts))
        if problems:
            raise ValueError("this training config cannot be used: " + "; ".join(problems))
        folder = pathlib.Path(folder)
        for part, names in (
            ("data", ("train", "valid", "tokenizer")),
            ("run", ("folder", "export")),
        ):
            placed = {
                n: str(folder / v) for n in names if (v := getattr(parts[part], n)) is not None
            }
            parts[part] = dataclasses.replace(parts[part], **placed)
        start = parts["run"].start
        if start is not None and (folder / start).is_dir():  # else "tiny", or a name in a cache
            parts["run"] = dataclasses.replace(parts["run"], start=str(folder / start))
        return cls(**parts)


def checked(table: str, kind: type, given: dict, problems: list[str]):
    """(keyword arguments of `kind`,) from a TOML table; () where `problems` were added to."""
    before = len(problems)
    types = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values = {}
    for name, value in given.items():
        if name not in fields:
            problems.append(unknown(f"[{table}] key", name, fields))
            continue
        union = typing.get_origin(types[name]) in (typing.Union, types_module.UnionType)
        allowed = typing.get_args(types[name]) if union else (types[name],)
        if isinstance(value, list):
            value = tuple(value)
        if isinstance(value, int) and not isinstance(value, bool) and float in allowed:
            value = float(value)
        plain = tuple(typing.get_origin(t) or t for t in allowed)
        if not isinstance(value, plain) or (isinstance(value, bool) and bool not in plain):
            wanted = " or ".join(t.__name__ for t in plain if t is not type(None))
            problems.append(f"{table}.{name} must be {wanted}; got {value!r}")
            continue
        values[name] = value
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in given:
            problems.append(f"{table}.{name} is missing")
    return () if len(problems) > before else (values,)


def unknown(what: str, name: str, known) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    return f"{what} {name!r} is unknown ({hint})"


def _wrong(model: Config, data: Data, run: Run, optimizer: Optimizer):
    """Values of the right type that cannot be."""
    limits = (
        ("data.row", data.row, 2, math.inf),
        ("data.rows", data.rows, 1, math.inf),
        ("data.valid_batches", data.valid_batches, 1, math.inf),
        ("run.steps", run.steps, 1, math.inf),
        ("run.seed", run.seed, 0, 2**32 - 1),
        ("run.quantise_from", run.quantise_from, -1, math.inf),
        ("run.router_aux", run.router_aux, 0, math.inf),
        ("run.data_parallel", run.data_parallel, 1, math.inf),
        ("run.expert_parallel", run.expert_parallel, 1, math.inf),
        ("run.checkpoint_every", run.checkpoint_every, 1, math.inf),
        ("run.keep", run.keep, 1, math.inf),
        ("run.valid_every", run.valid_every, 0, math.inf),
        ("run.log_every", run.log_every, 1, math.inf),
        ("optimizer.warmup", optimizer.warmup, 0, math.inf),
        ("optimizer.floor", optimizer.floor, 0, 1),
        ("optimizer.weight_decay", optimizer.weight_decay, 0, math.inf),
    )
    for name, value, low, high in limits:
        if not low <= value <= high or math.isinf(value):  # NaN fails the comparison
            bound = f"at least {low}" if high == math.inf else f"in {low}..{high}"
            yield f"{name} must be {bound}; got {value!r}"
    for name in ("peak", "clip"):
        value = getattr(optimizer, name)
        if not 0 < value < math.inf:
            yield f"optimizer.{name} must be finite and above 0; got {value!r}"
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(optimizer, name) < 1:
            yield f"optimizer.{name} must lie in [0, 1); got {getattr(optimizer, name)!r}"
    if run.compute not in ("bfloat16", "float32"):
        yield f"run.compute must be 'bfloat16' or 'float32'; got {run.compute!r}"
    if run.export_format not in ("mxfp4", "bf16", "original"):
        yield f"run.export_format must be 'mxfp4', 'bf16' or 'original'; got {run.export_format!r}"
    if data.rows % run.data_parallel:
        yield (
            f"data.rows {data.rows} cannot be divided over run.data_parallel {run.data_parallel} "
            "devices"
        )
    if run.expert_parallel >= 1 and model.experts % run.expert_parallel:
        yield (
            f"model.experts {model.experts} cannot be divided over run.expert_parallel "
            f"{run.expert_parallel} devices"
        )
    if run.quantise_from >= 0 or (run.export and run.export_format != "bf16"):
        for name in ("embed", "ffn"):
            if getattr(model, name) % 32:
                yield f"model.{name} {getattr(model, name)} is no multiple of 32, the MXFP4 block"
