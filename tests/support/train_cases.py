"""What the training tests share: a small model, a tokenizer, a run's settings and data."""

import functools
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from gptoss_jax.config import Config
from gptoss_jax.text import Tokenizer
from gptoss_jax.train import Documents
from gptoss_jax.train.step import Network, initial

RECIPES = pathlib.Path(__file__).parents[2] / "recipes" / "tiny"

# Two layers, one of each kind; D and F are MXFP4 blocks.
SMALL = Config(
    layers=2,
    embed=32,
    kv_heads=2,
    q_per_kv=3,
    head_width=10,
    experts=4,
    experts_per_token=2,
    ffn=64,
    vocab=53,
    window=5,
)


@functools.cache
def harmony_tokenizer() -> Tokenizer:
    """A token is a byte; Harmony's control tokens by name."""
    return Tokenizer(recipe_tokenizer().letters())


def recipe_tokenizer():
    """The recipe's module that makes tokenizers."""
    spec = importlib.util.spec_from_file_location("tiny_tokenizer", RECIPES / "tokenizer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def network(config: Config, row: int) -> Network:
    return Network.of(config, compute=jnp.float32, row=row, remat=False)


@functools.cache
def parameters(config: Config, seed: int = 0) -> dict:
    """Master weights; biases and sinks, which start at zero, are made random."""
    params = initial(config, seed, SimpleNamespace(init=lambda params: ()))["params"]
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=x.shape) * 0.3, jnp.float32)
        if "bias" in name or "sinks" in name
        else x
        for name, x in params.items()
    }


def packed_logits(config: Config, row: int):
    """batch -> logits [B, T, V] of a small model whose windows fit rows of that length."""

    @jax.jit
    def run(params, tokens, positions):
        model = network(config, row).model(params)
        return model.logits(model.hidden(tokens, positions)[0])

    return lambda batch: np.asarray(run(parameters(config), batch["tokens"], batch["positions"]))


def write_run(folder: pathlib.Path, *, steps=6, name="run.toml", **changes) -> pathlib.Path:
    """A config of a short run on SMALL and its data; `run_steps=...` changes run.steps."""
    tables = {
        "model": {
            key: getattr(SMALL, key)
            for key in "layers embed kv_heads q_per_kv head_width experts experts_per_token ffn "
            "vocab window".split()
        },
        "data": {"train": "train.npz", "row": 24, "rows": 4},
        "optimizer": {"peak": 0.01, "warmup": 2},
        "run": {
            "folder": "run",
            "steps": steps,
            "compute": "float32",
            "checkpoint_every": 2,
            "quantise_from": 3,
            "router_aux": 0.01,
            "remat": False,
        },
    }
    for key, value in changes.items():
        table, field = key.split("_", 1)
        if value is None:
            tables[table].pop(field, None)
        else:
            tables[table][field] = value
    lines = []
    for table, fields in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {toml(value)}" for key, value in fields.items()]
    (folder / name).write_text("\n".join(lines) + "\n")
    if not (folder / "train.npz").exists():
        counting(40).save(folder / "train.npz")
    return folder / name


def toml(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return repr(value) if not isinstance(value, str) else f'"{value}"'


def lines(folder: pathlib.Path) -> list[dict]:
    """What a run wrote into its metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: pathlib.Path) -> dict[int, float]:
    """step -> loss, of a run's folder."""
    return {line["step"]: line["loss"] for line in lines(folder) if "loss" in line}


RUN = "from gptoss_jax.train import run; run({path!r}, progress=False)"


def start(config: pathlib.Path, code: str = RUN) -> subprocess.Popen:
    """A process that runs the config. It shares a GPU with this one."""
    alone = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return subprocess.Popen([sys.executable, "-c", code.format(path=str(config))], env=alone)


def killed(config: pathlib.Path, after: int) -> int:
    """Runs the config in a process that is killed once it has written `after` lines of metrics;
    how many were there when it was."""
    child = start(config)
    file = config.parent / "run" / "metrics.jsonl"
    deadline, reached = time.monotonic() + 300, 0
    while child.poll() is None and time.monotonic() < deadline and reached < after:
        reached = file.read_text().count("\n") if file.exists() else 0
        time.sleep(0.002)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    return reached


def counting(n: int, seed=0) -> Documents:
    """Sequences that count upwards: learnable in a few steps."""
    rng = np.random.default_rng(seed)

    def one():
        start, length = rng.integers(0, 40), rng.integers(3, 12)
        return (start + np.arange(length)) % SMALL.vocab, [False] + [True] * (length - 1)

    return Documents.of(one() for _ in range(n))
