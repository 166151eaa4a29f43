"""What is written: the same bytes where nothing changed, the same values everywhere, or nothing."""

import errno
import json
import os
import subprocess
import sys

import checkpoints
import edited
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from needed import need

import gptoss_jax as gj
from gptoss_jax.checkpoint import CheckpointError, export, export_model, load, open_checkpoint
from gptoss_jax.checkpoint.export import size_in_bytes

FORMATS = ("mxfp4", "bf16", "original")
NUMBERS = checkpoints.SQUARE.replace(layers=3)
WEIGHTS = checkpoints.make_weights(NUMBERS)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return {
        layout: checkpoints.write(root / layout, NUMBERS, WEIGHTS, layout, tokenizer=True)
        for layout in checkpoints.LAYOUTS
    }


def tensors(folder) -> dict[str, tuple[str, tuple, bytes]]:
    found = open_checkpoint(folder).require()
    return {n: (t.stored, t.shape, t[...].tobytes()) for n, t in found.files.tensors.items()}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", checkpoints.LAYOUTS)
def test_all_layouts_to_all_formats(tmp_path, sources, layout, format):
    """Bytes as an independent writer has them. From dense too: these values lie on the grid."""
    folder = export(sources[layout], tmp_path / "out", format=format, max_shard_size="100KB")
    assert tensors(folder) == tensors(sources[format])
    files = [p.name for p in folder.glob("*.safetensors")]
    assert len(files) > 2 and gj.inspect(folder).ok
    assert (folder / "tokenizer.json").read_bytes() == (
        sources[layout] / "tokenizer.json"
    ).read_bytes()
    assert load(folder).stop_tokens == load(sources[layout]).stop_tokens
    quantized = "quantization_config" in json.loads((folder / "config.json").read_text())
    assert quantized == (format == "mxfp4")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("experts", ["packed", "dense"])
def test_load_then_export_gives_the_same_bytes(tmp_path, sources, format, experts):
    model = load(sources["mxfp4"], experts=experts)
    folder = export_model(model, tmp_path / "out", format=format, tokenizer=sources["mxfp4"])
    assert tensors(folder) == tensors(sources[format])
    assert (folder / "model.safetensors").is_file() and not list(folder.glob("*index*"))
    assert set(load(folder).stop_tokens) == set(model.stop_tokens)


def test_pytorch_reads_every_format(tmp_path, sources):
    """transformers and OpenAI's code: nothing missing, nothing unexpected, the same logits."""
    need("torch", "transformers", "gpt_oss.torch.model")
    from gptoss_jax.references import open_reference

    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 89, 79]
    truth = open_reference(sources["bf16"]).logits(tokens)
    for format in FORMATS:
        folder = export(
            sources["original"], tmp_path / format, format=format, max_shard_size="200KB"
        )
        assert len(list(folder.glob("*.safetensors"))) > 1
        # The two programs sum in another order; a swapped pair of tensors is off by 1 and more.
        assert np.abs(open_reference(folder).logits(tokens) - truth).max() < 1e-4 * truth.std()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_transformers_saves_is_read(tmp_path, dtype):
    """Its own initialisation, with every bias zero, its own names, shards and config."""
    need("torch", "transformers")
    import torch
    import transformers

    values = checkpoints.config_hf(NUMBERS, family=5, quantized=False)
    config = transformers.GptOssConfig(**values)
    torch.manual_seed(0)
    theirs = transformers.GptOssForCausalLM(config).to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "x", max_shard_size="200KB")
    assert len(list((tmp_path / "x").glob("*.safetensors"))) > 1
    model = load(tmp_path / "x", dtype=dtype)
    state = {n: t.float().numpy() for n, t in theirs.state_dict().items()}
    for n, block in enumerate(model.blocks):
        stem = f"model.layers.{n}.mlp.experts."
        for ours, name in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            value = np.asarray(getattr(block.moe.experts, ours)[...], np.float32)
            assert np.array_equal(value, state[stem + name].swapaxes(1, 2))
    value = np.asarray(model.unembed.weight_VD[...], np.float32)
    assert np.array_equal(value, state["lm_head.weight"])


def test_meshed_model_exports_the_same_bytes(tmp_path, sources):
    model = load(sources["mxfp4"], mesh=gj.make_mesh(expert=4, devices=jax.devices("cpu")))
    assert tensors(export_model(model, tmp_path / "out")) == tensors(sources["mxfp4"])


def test_trained_weights_are_rounded_and_quantised(tmp_path, sources):
    """float32 off every grid: bfloat16 to nearest even, experts by the one quantiser."""
    model = load(sources["bf16"], dtype="float32")
    down, embed = model.blocks[0].moe.experts.down, model.embed.weight_VD
    down[...], embed[...] = down[...] * 1.0371, embed[...] * 1.0001
    model.stop_tokens = (52, 51)
    packed = load(export_model(model, tmp_path / "mxfp4"), dtype="float32", experts="dense")
    dense = load(export_model(model, tmp_path / "bf16", format="bf16"), dtype="float32")
    assert {51, 52} <= set(packed.stop_tokens) and packed.config == model.config
    rounded = np.asarray(embed[...]).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert not np.array_equal(rounded, np.asarray(embed[...]))
    for other in (packed, dense):
        assert np.array_equal(np.asarray(other.embed.weight_VD[...]), rounded)
    blocks, scales = checkpoints.mxfp4_encode(np.asarray(down[...]))
    assert np.array_equal(
        np.asarray(packed.blocks[0].moe.experts.down[...], np.float64),
        checkpoints.mxfp4_decode(blocks, scales),
    )


def test_config_keeps_what_it_does_not_understand(tmp_path):
    source = edited.folder(tmp_path / "x", family=5, config=lambda c: c.update(unsloth_fixed=True))
    packed = json.loads((export(source, tmp_path / "a") / "config.json").read_text())
    dense = json.loads((export(source, tmp_path / "b", format="bf16") / "config.json").read_text())
    assert packed["unsloth_fixed"] and packed["quantization_config"]["quant_method"] == "mxfp4"
    assert dense["dtype"] == "bfloat16" and "torch_dtype" not in dense
    assert packed["rope_parameters"] == dense["rope_parameters"] and "rope_scaling" not in dense


def test_dtypes_json_of_the_original_layout(tmp_path, sources):
    export(sources["mxfp4"], tmp_path / "out", format="original")
    ours = json.loads((tmp_path / "out" / "dtypes.json").read_text())
    assert ours == json.loads((sources["original"] / "dtypes.json").read_text())


def test_shard_names_are_those_of_the_publishers(tmp_path, sources):
    hf = export(sources["mxfp4"], tmp_path / "hf", max_shard_size=400_000)
    names = sorted(p.name for p in hf.glob("*.safetensors"))
    last = len(names) - 1
    assert names == [f"model-{i:05}-of-{last:05}.safetensors" for i in range(len(names))]
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names)
    openai = export(sources["mxfp4"], tmp_path / "o", format="original", max_shard_size=400_000)
    names = sorted(p.name for p in openai.glob("*.safetensors"))
    assert names[0] == f"model--00001-of-{len(names):05}.safetensors"
    # OpenAI's loader reads every file of the folder; so do we where the index is missing.
    (openai / "model.safetensors.index.json").unlink()
    assert tensors(openai) == tensors(sources["original"])


def test_widths_that_mxfp4_cannot_pack(tmp_path):
    def narrower(tensors):
        cuts = {"gate_up_proj": np.s_[..., :160], "gate_up_proj_bias": np.s_[..., :160],
                "down_proj": np.s_[:, :80]}  # fmt: skip
        for leaf, cut in cuts.items():
            name = f"model.layers.0.mlp.experts.{leaf}"
            tensors[name] = ("BF16", tensors[name][1][cut])

    source = edited.folder(
        tmp_path / "dense", "bf16", narrower, config=lambda c: c.update(intermediate_size=80)
    )
    with pytest.raises(ValueError, match="intermediate_size 80"):
        export(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense"]
    assert tensors(export(source, tmp_path / "out", format="bf16")) == tensors(source)


def test_original_refuses_what_it_cannot_say(tmp_path):
    source = edited.folder(tmp_path / "x", config=lambda c: c.update(rms_norm_eps=1e-6))
    with pytest.raises(ValueError, match="norm_eps 1e-06"):
        export(source, tmp_path / "out", format="original")
    assert not (tmp_path / "out").exists()


# --- nothing half-written ----------------------------------------------------------------


def left(folder):
    return sorted(p.name for p in folder.rglob("*"))


def test_target_that_holds_something(tmp_path, sources):
    (tmp_path / "out").mkdir()
    export(sources["mxfp4"], tmp_path / "out")  # an empty folder is taken over
    before = tensors(tmp_path / "out")
    with pytest.raises(ValueError, match="not an empty folder"):
        export(sources["bf16"], tmp_path / "out", format="bf16")
    assert tensors(tmp_path / "out") == before
    with pytest.raises(ValueError, match="not an empty folder"):
        export(sources["bf16"], tmp_path / "out" / "config.json")


@pytest.mark.parametrize("format", ["fp8", "gguf", ""])
def test_formats_are_checked(tmp_path, sources, format):
    with pytest.raises(ValueError, match="format must be one of mxfp4, bf16, original"):
        export(sources["mxfp4"], tmp_path / "out", format=format)


@pytest.mark.parametrize(
    "size, expected",
    [(5, 5), ("5", 5), ("4.8GB", 4_800_000_000), ("2KiB", 2048), ("1 MB", 10**6), ("0.5kb", 500)],
)
def test_sizes(size, expected):
    assert size_in_bytes(size) == expected


@pytest.mark.parametrize("size", [0, -1, "GB", "4.8TB!", "", "1e9"])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match="max_shard_size"):
        size_in_bytes(size)


def test_values_that_are_wrong_leave_nothing(tmp_path):
    def poison(tensors):
        kind, value = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = (kind, np.full_like(value, 0x7FC0))

    source = edited.folder(tmp_path / "x", change=poison)
    with pytest.raises(CheckpointError, match=f"{source}: lm_head.weight: .* not finite"):
        export(source, tmp_path / "out" / "deep")
    assert left(tmp_path / "out") == []


def test_nan_in_a_live_model_is_refused(tmp_path, sources):
    model = load(sources["bf16"])
    model.norm.scale_D[...] = model.norm.scale_D[...].at[3].set(jnp.nan)
    with pytest.raises(CheckpointError, match="norm.scale_D: 1 of 96 values are not finite"):
        export_model(model, tmp_path / "out")
    assert left(tmp_path) == []


def test_disk_that_is_too_small(tmp_path, sources, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: _Usage)
    with pytest.raises(CheckpointError, match="the export takes .* bytes; the disk has 1,000 left"):
        export(sources["mxfp4"], tmp_path / "out")
    assert left(tmp_path) == []


class _Usage:
    free = 1000


FULL_DISK = """
import resource, sys
from gptoss_jax.checkpoint import CheckpointError, export
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    export(sys.argv[1], sys.argv[2])
except CheckpointError as error:
    print(error)
    sys.exit(3)
"""


def test_disk_that_fills_up_while_writing(tmp_path, sources):
    """A file may not grow past 200 kB: the kernel's own error, in the middle of a tensor."""
    source = str(sources["mxfp4"])
    command = [sys.executable, "-c", FULL_DISK, source, str(tmp_path / "out")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 3, done.stderr
    assert os.strerror(errno.EFBIG) in done.stdout and "nothing was left behind" in done.stdout
    assert left(tmp_path) == []


def test_interrupt_leaves_nothing(tmp_path, sources, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(sources["mxfp4"], tmp_path / "out")
    assert left(tmp_path) == []
