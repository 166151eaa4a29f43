"""recipes/random_checkpoint.py writes folders that load, with the published sizes."""

import dataclasses

import edited
import numpy as np

from gptoss_jax.checkpoint import load
from gptoss_jax.checkpoint.names import fills
from gptoss_jax.config import Config


def test_a_small_one_loads(tmp_path):
    config = dataclasses.replace(
        Config.gpt_oss_20b(), layers=3, sliding=None, embed=96, ffn=64, experts=4,
        kv_heads=2, q_per_kv=3, head_width=10, vocab=201, eos=(200,), pad=None,
    )  # fmt: skip
    folder = edited.recipe().random_checkpoint(config, tmp_path / "x", limit=40_000)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 3
    model = load(folder, dtype="float32")
    assert model.config == config and model.stop_tokens == (200,)
    weight, scale = model.embed.weight_VD[...], model.norm.scale_D[...]
    assert 0.5 < float(np.std(weight)) * 64 / 1.5 < 2 and np.all(np.asarray(scale) >= 1)
    assert np.all(np.asarray(scale) < 2)


def test_every_tensor_of_20b_can_be_made():
    """One slice of each; sizes and cuts of the files are tested in test_names."""
    module, config = edited.recipe(), Config.gpt_oss_20b()
    read = module.Random(config)
    for fill in fills("hf-mxfp4", dataclasses.replace(config, layers=1, sliding=None)):
        part = read(fill.param, slice(1, 2))
        assert part.shape == (1, *fill.shape[1:])
