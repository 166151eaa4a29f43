"""Loading holds the model and one tensor, never the checkpoint twice."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import edited
import pytest

from gptoss_jax.config import Config

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")

# 12 layers of 7 MB; the largest tensors are the embeddings, 12 MB each.
CONFIG = dataclasses.replace(
    Config.gpt_oss_20b(), layers=12, sliding=None, embed=512, ffn=512, experts=16, kv_heads=2,
    q_per_kv=4, head_width=32, vocab=12_000, eos=(2,), pad=None,
)  # fmt: skip

PROGRAM = """
import json, sys, threading, time
import jax
from gptoss_jax.checkpoint import export, load
def memory(key):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) * 1024
def peak_of(work):
    highest, done = memory("VmRSS:"), threading.Event()
    def watch():
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, memory("VmRSS:"))
    thread = threading.Thread(target=watch); thread.start()
    before = memory("VmRSS:")
    kept = work()
    done.set(); thread.join()
    return highest - before, kept
load(sys.argv[2])  # compiled programs, libraries and pools of a first load are not what is measured
loaded, model = peak_of(lambda: jax.block_until_ready(load(sys.argv[1])))
exported, _ = peak_of(lambda: export(sys.argv[1], sys.argv[3], format="original"))
print(json.dumps({"load": loaded, "export": exported}))
"""


def test_peak_memory_of_load_and_export(tmp_path):
    module = edited.recipe()
    folder = module.random_checkpoint(CONFIG, tmp_path / "big", limit=40_000_000)
    small = module.random_checkpoint(
        dataclasses.replace(CONFIG, layers=1, sliding=None, vocab=300), tmp_path / "small"
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(small), str(tmp_path / "out")],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    peak = json.loads(done.stdout.splitlines()[-1])
    whole = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    largest = 2 * CONFIG.vocab * CONFIG.embed
    # The parameters, the largest tensor and its mapped pages, and 16 MB for what Python does.
    assert peak["load"] < whole + 2 * largest + 16e6, (peak, whole)
    assert peak["export"] < 2 * largest + 16e6, peak
    assert whole > 2 * (2 * largest + 16e6)  # else the two lines above would say nothing


def test_the_measuring_program_runs(tmp_path):
    """recipes/measure_load.py, whose docstring has the figures of 20b on a GPU."""
    small = dataclasses.replace(CONFIG, layers=2, sliding=None, vocab=300)
    folder = edited.recipe().random_checkpoint(small, tmp_path / "x")
    program = Path(__file__).parents[2] / "recipes" / "measure_load.py"
    done = subprocess.run(
        [sys.executable, str(program), str(folder), "--times", "1"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parameters_GiB"] == found["files_GiB"] > 0.01
    assert 0 < found["stages_s"]["fill"] <= found["seconds"]
