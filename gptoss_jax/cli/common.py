"""What commands share: how to load and run a model, how to sample, how to speak."""

import contextlib
import dataclasses
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from gptoss_jax.places import find

DTYPES = ("bfloat16", "float32")
BACKENDS = ("xla", "triton", "mosaic", "reference")
CACHE_VARIABLE = "GPTOSS_COMPILATION_CACHE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Where:
    """What `where_options` collects: on which devices of which processes, and the cache."""

    mesh: dict[str, int] | None
    distributed: bool
    coordinator: str | None
    processes: int | None
    process_id: int | None
    compilation_cache: str | None

    @property
    def several(self) -> bool:
        """Whether other processes are to be joined."""
        return self.distributed or self.coordinator is not None

    @contextlib.contextmanager
    def running(self, *checkpoints: str) -> Iterator[Any]:
        """Turns the compilation cache on, joins the other processes, and gives the mesh or None.

        checkpoints: looked for first, before the seconds that importing JAX takes; not where there
        are several processes, of which one that stops alone would leave the others waiting.
        """
        if not self.several:
            for path in checkpoints:
                find(path)
        import gptoss_jax as gj
        from gptoss_jax.sharding import distributed

        use_compilation_cache(self.compilation_cache)
        if self.several:
            _keep_stdout()
        distributed.start(
            detect=self.distributed,
            coordinator=self.coordinator,
            processes=self.processes,
            process_id=self.process_id,
        )
        _some_device()
        yield gj.make_mesh(**self.mesh) if self.mesh else None
        if self.several:
            distributed.stop()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What `model_options` collects; names as in `gptoss_jax.load`."""

    model: str
    dtype: str
    experts: str | None
    backend: str | None
    dispatch: str

    def load(self, mesh):
        """The model, on the mesh of `Where.running`."""
        import gptoss_jax as gj

        return gj.load(
            self.model,
            mesh=mesh,
            dtype=self.dtype,
            experts=self.experts,
            backend=self.backend,
            dispatch=self.dispatch,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """What `sampling_options` collects."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int

    def keywords(self, rows: int = 1) -> dict[str, Any]:
        """For `generate` and `stream`: row i is drawn with seed + i."""
        import gptoss_jax as gj

        return {
            "max_new_tokens": self.max_new_tokens,
            "sampler": gj.Sampler(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
            ),
            "seeds": [self.seed + i for i in range(rows)],
        }


def _some_device() -> None:
    """Raises ValueError where JAX has none: its own error is an assertion, far from the reason."""
    import jax

    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise ValueError(
            f"JAX finds no device (JAX_PLATFORMS={platforms!r}): unset JAX_PLATFORMS, or install "
            'what it names; for CUDA that is pip install -e ".[cuda13]".'
        ) from error


def _keep_stdout() -> None:
    """Leaves stdout to us: Gloo, which joins processes on CPUs, reports its connections there."""
    ours = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding)
    os.dup2(2, 1)
    sys.stdout = ours


def use_compilation_cache(where: str | None) -> None:
    """None or "" is the user's cache folder; "off", "none" and "0" use none.

    The user's cache folder may be missing and not to be made (no home, or one that is read-only):
    nobody asked for it, so that a line on stderr is all. A folder that was named must be there.
    """
    if (where or "").strip().lower() in ("off", "none", "0"):
        return
    import gptoss_jax as gj

    try:
        gj.enable_compilation_cache(where or None)
    except (OSError, RuntimeError) as error:
        if where:
            raise ValueError(f"no compilation cache in {where}: {error}") from error
        click.echo(f"gptoss-jax: compiled programs are not kept: {error}", err=True)


def compilation_cache_option(command: Callable) -> Callable:
    return click.option(
        "--compilation-cache",
        envvar=CACHE_VARIABLE,
        metavar="FOLDER|off",
        help="Where compiled programs are kept; default: the user's cache folder.  "
        f"[also: {CACHE_VARIABLE}]",
    )(command)


def where_options(command: Callable) -> Callable:
    """Adds the options and passes them on as one argument `where: Where`."""
    return _gathered(
        command,
        "where",
        Where,
        _where,
        click.option(
            "--mesh", callback=_mesh, metavar="data=2,expert=4", help="Axes data, expert, tensor."
        ),
        click.option(
            "--distributed", is_flag=True, help="Join the processes of SLURM or Open MPI."
        ),
        click.option("--coordinator", metavar="HOST:PORT", help="Join processes by hand."),
        click.option("--processes", type=click.IntRange(min=1), metavar="N"),
        click.option("--process-id", type=click.IntRange(min=0), metavar="I"),
        compilation_cache_option,
    )


def model_options(command: Callable) -> Callable:
    """Adds the options and passes them on as one argument `how: ModelOptions`."""
    return _gathered(
        command,
        "how",
        ModelOptions,
        ModelOptions,
        click.option("--model", default="tiny", show_default=True, metavar="tiny|PATH|NAME"),
        click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True),
        click.option(
            "--experts",
            type=click.Choice(("packed", "dense")),
            help="Keep MXFP4 experts packed, or decode them; default: as stored.",
        ),
        click.option("--backend", type=click.Choice(BACKENDS)),
        click.option(
            "--dispatch",
            type=click.Choice(("auto", "all_reduce", "all_to_all")),
            default="auto",
            show_default=True,
            help="How tokens reach experts on other devices.",
        ),
    )


class Real(click.FloatRange):
    """A range of numbers; NaN, which no comparison refuses, and infinity lie in none."""

    def convert(self, value, param, ctx):
        number = super().convert(value, param, ctx)
        if not abs(number) < 3e38:  # what float32 holds
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


def sampling_options(*, max_new_tokens: int) -> Callable:
    """Adds the options and passes them on as one argument `sampling: SamplingOptions`."""
    options = (
        click.option(
            "--max-new-tokens",
            type=click.IntRange(min=1),
            default=max_new_tokens,
            show_default=True,
            metavar="N",
        ),
        click.option(
            "--temperature",
            type=Real(min=0),
            default=1.0,
            show_default=True,
            metavar="T",
            help="0 is greedy.",
        ),
        click.option("--top-k", type=click.IntRange(min=1), metavar="K"),
        click.option("--top-p", type=Real(0, 1), default=1.0, metavar="P"),
        click.option("--min-p", type=Real(0, 1), default=0.0, metavar="P"),
        click.option(
            "--repetition-penalty",
            type=Real(1e-6, 1e6),
            default=1.0,
            metavar="R",
        ),
        click.option(
            "--seed",
            type=click.IntRange(0, 2**63),
            default=0,
            show_default=True,
            help="Of the first row; the next rows count up.",
        ),
    )
    return lambda command: _gathered(
        command, "sampling", SamplingOptions, SamplingOptions, *options
    )


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says on a terminal's last line what is going on, from one second on."""
    if not sys.stderr.isatty():
        yield
        return
    done, start = threading.Event(), time.monotonic()

    def tell():
        while not done.wait(1):
            sys.stderr.write(f"\r{what} {time.monotonic() - start:.0f} s ")
            sys.stderr.flush()
        if time.monotonic() - start >= 1:
            sys.stderr.write("\r\x1b[K")  # to the line's beginning, and clear it
            sys.stderr.flush()

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def waited(steps: Iterable[Any]) -> Iterator[Any]:
    """The same steps, with `waiting` until the first, which compiles and reads the prompt."""
    steps = iter(steps)
    with waiting("starting"):
        first = next(steps, None)
    if first is not None:
        yield first
    yield from steps


def json_option(command: Callable) -> Callable:
    return click.option("--json", "as_json", is_flag=True, help="JSON alone on stdout.")(command)


def say_json(value: Any) -> None:
    """One line of JSON on stdout; in ASCII where stdout cannot take more, or a path is no text."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value)
    click.echo(text)


def tell(line: str) -> None:
    """A line of progress on stderr."""
    click.echo(line, err=True)


def _gathered(
    command: Callable, name: str, kind: type, make: Callable, *options: Callable
) -> Callable:
    """The command with these options, which reach it as `name=make(**fields of kind)`."""
    fields = [field.name for field in dataclasses.fields(kind)]

    @functools.wraps(command)
    def with_one(**given):
        return command(**{name: make(**{field: given.pop(field) for field in fields})}, **given)

    for option in reversed(options):
        with_one = option(with_one)
    return with_one


def _where(**given) -> Where:
    """Raises UsageError for what cannot go together."""
    where = Where(**given)
    triple = [where.coordinator, where.processes, where.process_id]
    if any(part is not None for part in triple):
        if None in triple:
            raise click.UsageError("--coordinator, --processes and --process-id go together.")
        if where.distributed:
            raise click.UsageError("give either --distributed or --coordinator, not both.")
        if where.process_id >= where.processes:
            raise click.UsageError("--process-id counts from 0 to --processes minus 1.")
    if where.several and not where.mesh:
        raise click.UsageError("several processes need --mesh, which says how they share a model.")
    return where


def _mesh(ctx, param, text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    from gptoss_jax.sharding import parse_mesh

    try:
        sizes = parse_mesh(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if not sizes:
        raise click.BadParameter("names no axis; give for example data=2,expert=4.")
    return sizes
