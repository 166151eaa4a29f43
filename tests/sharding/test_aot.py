"""What XLA makes of a mesh of H200s, compiled where there are none: `pytest -m aot`."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MIB = 2**20

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_plugins.xla_cuda13") is None
        if importlib.util.find_spec("jax_plugins")
        else True,
        reason="needs jax-cuda13-plugin and jax-cuda13-pjrt",
    ),
]


def compiled(**task):
    task = {"layers": 2, "batch": 8, "slots": 1024, "dispatch": "auto"} | task
    worker = ROOT / "tests" / "support" / "aot_worker.py"
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(worker), json.dumps(task)], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("model, sizes", [("20b", {"expert": 4}), ("120b", {"expert": 8})])
def test_a_decode_step_is_two_sums_a_layer(model, sizes):
    said = compiled(model=model, tokens=1, **sizes)
    # After attention and after the experts of each of 2 layers, and the embedding's rows.
    assert len(said["collectives"].pop("all-reduce")) == 2 * 2 + 1
    # The logits of 8 rows become whole for sampling; no weight ever does.
    (gathered,) = said["collectives"].pop("all-gather")
    assert gathered.startswith("f32[8,201088]")
    assert said["collectives"] == {}
    # Attention and experts of each layer run in a shard_map each, as Triton kernels: one at least
    # for attention, and two that read the packed experts of this device and no others.
    assert said["shard_maps"] == 2 * 2
    assert said["on_local_experts"] == 2 * 2
    assert said["kernels"] >= said["on_local_experts"] + 2
    assert said["temporary"] < 32 * MIB


def test_prefill_sends_tokens_not_weights():
    said = compiled(model="120b", tokens=1024, expert=8)
    # Tokens go, their routes go, sums come back: three exchanges in the loop of each layer but the
    # last, of which prefill needs the keys and values only.
    assert len(said["collectives"]["all-to-all"]) == 3
    moved = [shape for shapes in said["collectives"].values() for shape in shapes]
    assert not any("201088" in shape for shape in moved), moved
    assert said["temporary"] < 2048 * MIB
