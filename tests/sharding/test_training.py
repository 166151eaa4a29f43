"""Training with the experts shared out: the losses of one device, and each device its own part."""

import numpy as np
import pytest
from train_cases import losses, write_run

from gptoss_jax.train import Settings, Trainer, run

STEPS = 4


def test_experts_shared_out_train_as_on_one_device(tmp_path):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for folder in (alone, shared):
        folder.mkdir()
    how = dict(steps=STEPS, run_quantise_from=-1)
    run(write_run(alone, **how), progress=False)
    parted = write_run(shared, **how, run_data_parallel=2, run_expert_parallel=2)
    trained = run(parted, progress=False)
    # The same sums in another order.
    assert losses(shared / "run") == pytest.approx(losses(alone / "run"), rel=1e-5)
    gate_up = trained.params["blocks.1.moe.experts.gate_up"]
    assert {shard.data.shape[0] for shard in gate_up.addressable_shards} == {2}  # of 4

    # One device takes up what four wrote (here at the last step): a checkpoint knows no mesh.
    taken = run(write_run(shared, **how), progress=False)
    for name, array in trained.params.items():
        assert len(taken.params[name].sharding.device_set) == 1
        np.testing.assert_array_equal(taken.params[name], array, name)


def test_moments_lie_with_their_weights(tmp_path):
    trainer = Trainer(Settings.load(write_run(tmp_path, run_expert_parallel=4)))
    name = "blocks.0.moe.experts.down"
    state = {"params": {name: 0}, "optimizer": ({"mu": {name: 0}, "count": 0},), "step": 0}
    lies = trainer._lies(state)
    moment = lies["optimizer"][0]["mu"][name]
    assert moment == lies["params"][name] and moment.spec[0] == "expert"
    assert lies["step"] == lies["optimizer"][0]["count"] == trainer.everywhere


def test_experts_that_cannot_be_shared_out_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.experts 4 cannot be divided over .* 3 devices"):
        Settings.load(write_run(tmp_path, run_expert_parallel=3))
