"""On a GPU: a run killed and resumed has the losses of one that was not, but for rounding."""

import os

import pytest
from train_cases import killed, losses, write_run

from gptoss_jax.train import run

pytestmark = pytest.mark.gpu

STEPS, KILL_AFTER = 40, 17
# Largest relative difference of a loss. On a GPU a process may pick other algorithms than the one
# before it, and atomic sums take any order; both reorder sums. In bfloat16 a sum that falls on the
# other side of a rounding moves a gradient by 2**-9, and 40 steps at a rate of 3.5e-3 amplify that.
# Measured on an H200 (2026-11-30), killed at 17 and resumed from 10, against a run that was not:
#             steps before the kill   first after   largest after
#   float32         1.2e-7              8.4e-8          3.3e-7
#   bfloat16        1.2e-2              4.7e-3          4.1e-2
#   another run     8.6e-3              1.0e-2
# What a wrong resume does, measured on a CPU, where a right one has the same bits (bfloat16):
#   the next batch instead of this one                  9.2e-2          2.7e-1
#   batches from the start again                        8.9e-3          2.2e-1
#   moments of zero                                     0               1.8e-1
# Weights rounded to bfloat16 hide there (7.1e-5, 3.4e-2), and float32 sees them (1.2e-3, 2.7e-2).
# Float32 is given 1e-3: one program may take its products in tf32 and another not.
FAR = {"float32": 1e-3, "bfloat16": 6e-2}
# Of the first step after resuming alone, or three times what the two runs differed by before the
# kill, when neither had been interrupted: that is the largest of about ten steps, so that one more
# may well be larger; a batch late is ten times it.
NEAR = {"float32": 1e-4, "bfloat16": 4e-3}


@pytest.mark.parametrize("compute", FAR)
def test_killed_and_resumed_gives_the_same_losses(tmp_path, compute):
    changes = {"run_compute": compute, "optimizer_peak": 3.5e-3, "run_checkpoint_every": 5}
    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    whole, broken = (write_run(folder, steps=STEPS, **changes) for folder in folders)
    run(whole, progress=False)
    reached = killed(broken, KILL_AFTER)
    kept = os.listdir(folders[1] / "run" / "checkpoints")
    saved = max(int(name) for name in kept if name.isdigit())  # others were being written
    assert 0 < saved <= reached < STEPS
    run(broken, progress=False)
    expected, got = losses(folders[0] / "run"), losses(folders[1] / "run")
    assert list(got) == list(range(1, STEPS + 1))
    apart = {step: abs(got[step] - expected[step]) / expected[step] for step in got}
    before, after = range(1, saved + 1), range(saved + 1, STEPS + 1)
    unbroken = max(apart[s] for s in before)
    print(
        f"{compute}: killed at {reached}, resumed from {saved}; relative difference before "
        f"{unbroken:.1e}, first after {apart[saved + 1]:.1e}, "
        f"largest after {max(apart[s] for s in after):.1e}"
    )
    assert apart[saved + 1] <= max(NEAR[compute], 3 * unbroken)
    assert max(apart.values()) <= FAR[compute]
