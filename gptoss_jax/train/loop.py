"""The training loop: batches in, checkpoints, metrics and a picture out.

A run is a function of its settings and data alone. Step n's batch depends on n; nothing else is
random after the initial weights; so a run killed at any step and started again computes the same
bits as one that was not (on one CPU; on a GPU float sums may be ordered anew on each start: on an
H200 the losses of 40 steps parted by at most 3.3e-7 in float32 and 4.1e-2 in bfloat16, where two
runs that nobody killed had parted by 1.2e-2 within ten; tests/train/test_gpu.py bounds it).
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import math
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax.sharding import NamedSharding, PartitionSpec

from ..sharding import make_mesh, parameter_sharding
from ..text import Tokenizer, harmony
from . import optimizer, picture
from .checkpoints import Checkpoints
from .data import Batches, Documents
from .settings import Settings
from .step import Network, initial, make_step

# Steps that may be under way on the device while the host reads earlier metrics: none waits.
AHEAD = 2


class NotFinite(ValueError):
    """The loss or its gradient became infinite or NaN."""


@dataclasses.dataclass
class Result:
    """params: float32 master weights by dotted name. metrics: the last line of metrics.jsonl."""

    params: dict[str, jax.Array]
    step: int
    metrics: dict[str, float]


def run(path: str | pathlib.Path, *, progress: bool | None = None) -> Result:
    """Trains as the TOML file says, from its newest checkpoint if its folder holds one.

    progress: a bar on stderr; None shows it on a terminal.
    Writes into run.folder: checkpoints/, metrics.jsonl (a line a step: loss in nats, gradient norm,
    learning rate, tokens per second), loss.png; and the finished model into run.export.
    Raises ValueError for a bad config, empty data, or a folder that holds another run; NotFinite
    (also a ValueError) when the loss is NaN or infinite, the last good checkpoint staying.
    """
    return Trainer(Settings.load(path), progress=progress).run()


class Trainer:
    def __init__(self, settings: Settings, *, progress: bool | None = None):
        self.settings, self.progress = settings, progress
        run, data = settings.run, settings.data
        if run.export is not None and pathlib.Path(run.export).exists():
            raise ValueError(
                f"run.export {run.export} exists already; give a folder that does not."
            )
        tokenizer = None if data.tokenizer is None else Tokenizer.load(data.tokenizer)
        documents = Documents.load(data.train, tokenizer)
        self.batches = self._batches(documents)
        self.valid = None
        if data.valid is not None:
            self.valid = self._batches(Documents.load(data.valid, tokenizer))
        self.about = {"settings": described(settings), "data": fingerprint(documents)}
        self.folder = pathlib.Path(run.folder)

        self.mesh = make_mesh(data=run.data_parallel, expert=run.expert_parallel)
        self.over_rows = NamedSharding(self.mesh, PartitionSpec("data"))
        self.everywhere = NamedSharding(self.mesh, PartitionSpec())
        self.network = Network.of(
            settings.model,
            compute=jnp.dtype(run.compute),
            row=data.row,
            remat=run.remat,
            mesh=self.mesh if run.expert_parallel > 1 else None,
        )
        self.transformation = optimizer.make(settings.optimizer, run.steps)
        self._step = jax.jit(
            make_step(self.network, settings, self.transformation), donate_argnums=0
        )
        self._valid_loss = jax.jit(self.network.loss, static_argnames=("quantised", "aux"))

    def _batches(self, documents: Documents) -> Batches:
        data = self.settings.data
        largest = int(documents.tokens.max())
        if largest >= self.settings.model.vocab:
            raise ValueError(
                f"the data holds token id {largest} and model.vocab is {self.settings.model.vocab}."
            )
        if not documents.counts.any():
            raise ValueError("no token of the data counts: there is nothing to learn from it.")
        return Batches(documents, row=data.row, rows=data.rows, seed=self.settings.run.seed)

    def run(self) -> Result:
        """Trains to the last step; see `run`."""
        run = self.settings.run
        self.folder.mkdir(parents=True, exist_ok=True)
        checkpoints = Checkpoints(self.folder / "checkpoints", keep=run.keep)
        try:
            state, step = self._start(checkpoints)
            metrics = Metrics(self.folder / "metrics.jsonl", step, every=run.log_every)
            show = self.progress
            with tqdm.tqdm(
                total=run.steps,
                initial=step,
                unit="step",
                disable=None if show is None else not show,
            ) as bar:
                try:
                    state = self._train(state, step, checkpoints, metrics, bar)
                finally:
                    metrics.close()
                    picture.losses(self.folder / "metrics.jsonl", self.folder / "loss.png")
        finally:
            checkpoints.close()
        if run.export is not None:
            export(self.settings, state["params"])
        return Result(state["params"], run.steps, metrics.last)

    def _start(self, checkpoints: Checkpoints):
        """(state, step): from the newest checkpoint, else from the seed."""
        run = self.settings.run
        # A run that goes on needs the shapes alone; its first weights may be gone.
        start = run.start if checkpoints.latest() is None else None
        state = initial(self.settings.model, run.seed, self.transformation, start)
        state = jax.device_put(state, self._lies(state))
        step = checkpoints.latest()
        if step is None:
            return state, 0
        then = checkpoints.about(step)
        if changed := differences(then, self.about):
            raise ValueError(
                f"{self.folder} holds another run, which differs in {', '.join(changed)}. "
                "Give run.folder another value, or take that folder away."
            )
        state, _ = checkpoints.restore(step, state)
        return state, step

    def _lies(self, state):
        """Where each array of a state is kept: weights and moments of the same name alike."""
        if self.settings.run.expert_parallel == 1:
            return self.everywhere

        def lies(path, array):
            name = path[-1].key if isinstance(path[-1], jax.tree_util.DictKey) else None
            if name not in self.network.dtypes:
                return self.everywhere
            return parameter_sharding(name, self.settings.model, self.mesh, "dense")

        return jax.tree_util.tree_map_with_path(lies, state)

    def _train(self, state, first: int, checkpoints: Checkpoints, metrics: "Metrics", bar):
        run = self.settings.run
        pending = collections.deque()
        for step, batch in self._prefetched(first, run.steps):
            state, measured = self._step(state, batch)
            done = step + 1
            pending.append((done, measured))
            saves = done % run.checkpoint_every == 0 or done == run.steps
            while pending and (len(pending) > AHEAD or saves):
                self._note(*pending.popleft(), metrics, bar)
            if self.valid is not None and (
                done == run.steps or (run.valid_every and done % run.valid_every == 0)
            ):
                metrics.write({"step": done, "valid_loss": self.valid_loss(state["params"])})
            if saves:
                checkpoints.save(done, state, self.about)
        return state

    def _prefetched(self, first: int, last: int):
        """(step, batch on the devices), the next batch being made while this one is used."""
        with concurrent.futures.ThreadPoolExecutor(1) as maker:
            following = maker.submit(self.batches.at, first)
            for step in range(first, last):
                batch = following.result()
                if step + 1 < last:
                    following = maker.submit(self.batches.at, step + 1)
                yield step, jax.device_put(batch, self.over_rows)

    def _note(self, step: int, measured: dict, metrics: "Metrics", bar) -> None:
        values = {name: np.asarray(value).item() for name, value in measured.items()}
        finite = values.pop("finite")
        values |= {"step": step}
        line = metrics.note(values)
        if not finite:
            raise NotFinite(
                f"step {step}: the loss is {values['loss']} and the gradient's norm "
                f"{values['gradient']}. Training stops; the checkpoints before it are kept. "
                "Lower optimizer.peak or optimizer.clip, or look at the data of that step."
            )
        bar.set_postfix_str(f"loss {line['loss']:.4f}, {line['tokens_per_s']:,.0f} tok/s")
        bar.update(1)

    def valid_loss(self, params: dict) -> float:
        """Mean cross entropy in nats over the first data.valid_batches batches of data.valid."""
        run, data = self.settings.run, self.settings.data
        total = weight = 0.0
        count = min(data.valid_batches, math.ceil(len(self.valid.packed) / data.rows))
        for i in range(count):
            batch = self.valid.at(i)
            placed = jax.device_put(batch, self.over_rows)
            _, measured = self._valid_loss(params, placed, quantised=run.quantise_from >= 0)
            tokens = float(batch["weights"].sum())
            total += float(measured["loss"]) * tokens
            weight += tokens
        return total / weight


class Metrics:
    """metrics.jsonl, one object a line. Lines of steps after `step` (a killed run's) are dropped,
    so that a resumed run leaves the file that an unbroken one does, times aside."""

    def __init__(self, path: pathlib.Path, step: int, *, every: int):
        self.every, self.last = every, {}
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:  # the line that was being written
                    continue
                if record["step"] <= step:
                    kept.append(line)
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._time, self._step = time.perf_counter(), step

    def note(self, values: dict) -> dict:
        """Adds tokens per second since the last call; writes every `every`-th step and bad ones."""
        now = time.perf_counter()
        seconds, self._time = now - self._time, now
        tokens = values.pop("tokens")
        self.last = values | {"tokens_per_s": tokens / max(seconds, 1e-9)}
        if values["step"] % self.every == 0 or not math.isfinite(values["loss"]):
            self.write(self.last)
        return self.last

    def write(self, values: dict) -> None:
        # JSON knows no NaN: null stands for it.
        known = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._file.write(json.dumps(known) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def described(settings: Settings) -> dict:
    """What must stay the same for a resumed run to be the same run, as JSON has it."""
    kept = dataclasses.asdict(settings)
    for name in ("train", "valid", "tokenizer", "valid_batches"):
        del kept["data"][name]
    free = "folder export export_format checkpoint_every keep valid_every log_every data_parallel "
    free += "expert_parallel"
    for name in free.split():
        del kept["run"][name]
    return json.loads(json.dumps(kept))


def fingerprint(documents: Documents) -> str:
    """sha256 of the tokens, what counts, and where documents start."""
    digest = hashlib.sha256()
    for array in (documents.tokens, documents.counts, documents.starts):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def differences(then, now, name: str = "") -> list[str]:
    """Dotted names whose values differ."""
    if isinstance(then, dict) and isinstance(now, dict):
        return [
            found
            for key in sorted({*then, *now})
            for found in differences(then.get(key), now.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if then == now else [name.removeprefix("settings.")]


def export(settings: Settings, params: dict) -> None:
    """Writes the trained model as a checkpoint folder, its tokenizer beside it."""
    from ..checkpoint import export_model

    # float32: export rounds each tensor once, to what its format holds.
    network = Network.of(settings.model, compute=jnp.float32, row=settings.data.row, remat=False)
    model = network.model(params)
    tokenizer = settings.data.tokenizer
    if tokenizer is not None:
        # For generation_config.json: every token that ends a turn, not <|return|> alone.
        model.stop_tokens = harmony.stop_tokens(Tokenizer.load(tokenizer), model.stop_tokens)
        if pathlib.Path(tokenizer).is_file():
            tokenizer = pathlib.Path(tokenizer).parent
    export_model(
        model,
        settings.run.export,
        format=settings.run.export_format,
        tokenizer=tokenizer,
    )
