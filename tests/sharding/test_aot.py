"""What XLA makes of a mesh of H200s, compiled where there are none: `pytest -m aot`."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from gptoss_jax.kernels.expert_matmul.weights import _shapes

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


def lanes(layout, backend, *, experts, ffn=2880):
    """Shapes of one layer's packed weights as kernels of that backend are given them."""
    shapes = _shapes(layout, experts, 2880, ffn)
    found = [shapes["gate_up_blocks"], shapes["down_blocks"]]
    if layout == "mosaic" and backend == "triton":  # a tile flat
        found = [(*shape[:3], 4 * 256) for shape in found]
    return [f"u16[{','.join(map(str, shape))}]" for shape in found]


@pytest.mark.parametrize(
    "model, batch, sizes",
    [
        ("20b", 8, {"expert": 4}),
        ("20b", 32, {"expert": 4}),  # 4 rows an expert in all, not 16: Triton's, not Mosaic's
        ("120b", 8, {"expert": 8}),
        ("120b", 1, {"expert": 2}),  # one row: XLA alone would gather the embedding
        ("20b", 1, {"tensor": 2}),
    ],
)
def test_a_decode_step_is_two_sums_a_layer(model, batch, sizes):
    said = compiled(model=model, batch=batch, tokens=1, **sizes)
    # After attention and after the experts of each of 2 layers, and the embedding's rows.
    assert len(said["collectives"].pop("all-reduce")) == 2 * 2 + 1
    # The logits become whole for sampling; no weight ever does.
    (gathered,) = said["collectives"].pop("all-gather")
    assert gathered.startswith("f32[201088]" if batch == 1 else f"f32[{batch},201088]")
    assert said["collectives"] == {}
    # Each of these runs in a shard_map, as Triton kernels where they serve: the embedding, and in
    # each layer attention and what projects to and from it, the router, and the experts.
    assert said["shard_maps"] == 1 + 2 * 5
    # Two kernels a layer read the packed experts of this device and no others. A tensor axis cuts
    # the widths of each, which fragments do not allow.
    hopper = "mosaic" if jax.__version_info__ >= (0, 11) and "tensor" not in sizes else "triton"
    assert said["layout"] == hopper
    part = dict(
        experts={"20b": 32, "120b": 128}[model] // sizes.get("expert", 1),
        ffn=2880 // sizes.get("tensor", 1),
    )
    assert said["experts"] == {"triton": 2 * lanes(hopper, "triton", **part), "mosaic": []}
    assert said["moved"] == []
    # Beside them, in each layer: attention and the router; and both projections of one row.
    assert said["kernels"]["triton"] >= 2 * 2 + 2 * (4 if batch == 1 else 2)
    assert said["temporary"] < 32 * MIB


def test_prefill_sends_tokens_not_weights():
    said = compiled(model="120b", tokens=1024, expert=8)
    # Tokens go, their routes go, sums come back: three exchanges in the loop of each layer but the
    # last, of which prefill needs the keys and values only.
    assert len(said["collectives"]["all-to-all"]) == 3
    moved = [shape for shapes in said["collectives"].values() for shape in shapes]
    assert not any("201088" in shape for shape in moved), moved
    # The tokens that meet on a device are enough for the Mosaic kernels, where jax has them.
    of_layer = lanes(said["layout"], said["layout"], experts=128 // 8)
    other = {"mosaic": "triton", "triton": "mosaic"}[said["layout"]]
    assert said["experts"] == {said["layout"]: of_layer, other: []}
    assert said["moved"] == []
    assert said["temporary"] < 2048 * MIB
