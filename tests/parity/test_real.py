"""The same comparison with real weights: GPTOSS_CHECKPOINT=PATH pytest -m real

GPTOSS_DTYPE=float32 asks for exact greedy ids and needs four bytes a parameter of host memory for
the reference (84 GB for 20b); the default, bfloat16, half of that.
"""

import os

import pytest
from needed import need

from gptoss_jax import references
from gptoss_jax.parity import parity

pytestmark = pytest.mark.real


def test_real_checkpoint_agrees_with_pytorch(capsys):
    path = os.environ.get("GPTOSS_CHECKPOINT")
    assert path, "set GPTOSS_CHECKPOINT to a checkpoint's folder"
    need("torch", "transformers")
    try:
        report = parity(path, dtype=os.environ.get("GPTOSS_DTYPE", "bfloat16"))
    except references.ReferenceMissing as e:
        pytest.fail(str(e))
    with capsys.disabled():
        print("\n" + report.table())
    assert report.problems == []
