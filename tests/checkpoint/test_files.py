"""Which folder is meant, which files belong to it, and what is not a checkpoint for us."""

import json
import os
import shutil

import checkpoints
import edited
import numpy as np
import pytest

import gptoss_jax as gj
from gptoss_jax.checkpoint import CheckpointError, find, load, open_checkpoint
from gptoss_jax.places import TINY

INDEX = "model.safetensors.index.json"
WEIGHTS = checkpoints.make_weights(edited.SMALL)


@pytest.fixture
def sharded(tmp_path):
    return checkpoints.write(tmp_path / "sharded", edited.SMALL, WEIGHTS, "mxfp4-sharded")


@pytest.fixture
def plain(tmp_path):
    return edited.folder(tmp_path / "plain", weights=WEIGHTS)


def problems(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


# --- shards and index --------------------------------------------------------------------


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_missing_shard(sharded, shard):
    name = f"model-{shard:05}-of-00002.safetensors"
    (sharded / name).unlink()
    assert f"{name} is missing" in problems(sharded)


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_missing_shard_without_index(sharded, shard):
    (sharded / INDEX).unlink()
    assert open_checkpoint(sharded).problems == []
    name = f"model-{shard:05}-of-00002.safetensors"
    (sharded / name).unlink()
    if (
        shard == 0
    ):  # cannot be told from shards counted from 1: its tensors are missing all the same
        name = "model.layers.0.input_layernorm.weight"
    assert f"{name} is missing" in problems(sharded)


def test_openais_shards_count_from_one(tmp_path):
    folder = checkpoints.write(tmp_path / "o", edited.SMALL, WEIGHTS, "original")
    tensors = list(edited.tensors(WEIGHTS, "original").items())
    (folder / "model.safetensors").unlink()
    for i, part in enumerate((tensors[:9], tensors[9:]), 1):
        checkpoints.save(folder / f"model--0000{i}-of-00002.safetensors", dict(part))
    assert open_checkpoint(folder).problems == []
    (folder / "model--00002-of-00002.safetensors").unlink()
    assert "model--00002-of-00002.safetensors is missing" in problems(folder)


@pytest.mark.parametrize(
    "entry",
    [
        "../plain/model.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "..",
        "",
        "C:\\x.safetensors",
        "~/model.safetensors",
        "model.bin",
        ".hidden.safetensors",
        "a\u0000.safetensors",
        "http://x/model.safetensors",
    ],
)
def test_index_entry_outside_the_folder(sharded, plain, entry):
    name = "model.layers.0.self_attn.sinks"
    edit_index(sharded, lambda weight_map: weight_map.update({name: entry}))
    text = problems(sharded)
    assert repr(entry) in text and "of this very folder" in text


@pytest.mark.parametrize("value", [7, None, ["a"], {"a": 1}])
def test_index_entry_that_is_no_name(sharded, value):
    edit_index(sharded, lambda weight_map: weight_map.update({"lm_head.weight": value}))
    assert "holds no weight_map" in problems(sharded)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": 3}',
        '{"weight_map": {"\\n": "a"}}',
    ],
)
def test_broken_index(sharded, text):
    (sharded / INDEX).write_text(text)
    assert INDEX in problems(sharded)


def test_index_that_names_the_wrong_shard(sharded):
    name = "model.layers.0.input_layernorm.weight"
    edit_index(sharded, lambda m: m.update({name: "model-00002-of-00002.safetensors"}))
    assert f"{name} is in model-00000-of-00002.safetensors; {INDEX} says" in problems(sharded)


def test_tensor_that_the_index_leaves_out(sharded):
    edit_index(sharded, lambda m: m.pop("lm_head.weight"))
    assert f"lm_head.weight is in model-00002-of-00002.safetensors but not in {INDEX}" in problems(
        sharded
    )


def test_tensor_that_only_the_index_has(sharded):
    edit_index(sharded, lambda m: m.update({"x": "model-00000-of-00002.safetensors"}))
    assert "x is not in model-00000-of-00002.safetensors" in problems(sharded)


def test_tensor_in_two_shards(sharded):
    first, second = (sharded / f"model-0000{i}-of-00002.safetensors" for i in (0, 1))
    name = "model.layers.0.input_layernorm.weight"
    tensors = edited.tensors(WEIGHTS, "mxfp4")
    (sharded / INDEX).unlink()
    kept = {n: tensors[n] for n in open_checkpoint(sharded).files.files[1].tensors}
    checkpoints.save(second, kept | {name: tensors[name]})
    assert f"{name} is in {first.name} and in {second.name}" in problems(sharded)


def test_single_file_beside_an_index(sharded, plain):
    shutil.copy(plain / "model.safetensors", sharded)
    assert "both model.safetensors and" in problems(sharded)


def test_files_that_do_not_say_how_they_belong_together(plain):
    (plain / "model.safetensors").rename(plain / "a.safetensors")
    load(plain)
    shutil.copy(plain / "a.safetensors", plain / "b.safetensors")
    assert "do not say which belong together" in problems(plain)
    (plain / "a.safetensors").rename(plain / "model-00001-of-00001.safetensors")
    (plain / "b.safetensors").rename(plain / "model-00002-of-00002.safetensors")
    assert "do not say which belong together" in problems(plain)


@pytest.mark.parametrize("name", [INDEX, "model-00001-of-00002.safetensors", "config.json",
                                  "generation_config.json", "tokenizer.json"])  # fmt: skip
@pytest.mark.parametrize("target", ["nowhere", "itself", "a folder", "a pipe"])
def test_what_stands_where_a_file_should(sharded, name, target):
    """Links that lead nowhere (a cache half deleted), folders, pipes: named, and not waited for."""
    path = sharded / name
    path.unlink(missing_ok=True)
    if target == "a folder":
        path.mkdir()
    elif target == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if target == "itself" else sharded / "nothing")
    if (name, target) == ("generation_config.json", "nowhere"):
        return  # as good as none
    assert name in problems(sharded)
    assert any(name in problem for problem in gj.inspect(sharded).problems)


def test_total_size_that_lies_is_a_note(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["metadata"]["total_size"] += 1
    (sharded / INDEX).write_text(json.dumps(index))
    report = gj.inspect(sharded)
    assert report.ok and "total_size" in report.notes[0]


# --- config.json -------------------------------------------------------------------------


def test_config_missing_or_broken(plain):
    config = plain / "config.json"
    text = config.read_text()
    for wrong in ("{", "[1]", text.replace('"gpt_oss"', '"llama"').replace("GptOss", "Llama")):
        config.write_text(wrong)
        problems(plain)
    config.unlink()
    assert "config.json is missing" in problems(plain)


def test_all_problems_come_together(sharded):
    """A missing shard, a lying header and a config that cannot be: one error names all."""
    (sharded / "model-00001-of-00002.safetensors").unlink()
    edited.raw(sharded / "model-00002-of-00002.safetensors", {"a": [1]})
    values = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps(values | {"hidden_act": "relu"}))
    text = problems(sharded)
    for part in ("00001-of-00002.safetensors is missing", "00002.safetensors: a: ", "hidden_act"):
        assert part in text


def test_dense_experts_under_a_config_that_says_mxfp4(tmp_path):
    """What some programs leave behind. The tensors decide."""
    config = checkpoints.config_hf(edited.SMALL)
    folder = edited.folder(tmp_path / "x", "bf16", config=lambda c: c.update(config))
    assert "quantization_config" in open_checkpoint(folder).files.config
    assert load(folder).blocks[0].moe.experts.layout == "dense"
    assert "mxfp4" in gj.inspect(folder).notes[0]


# --- what is no checkpoint for us --------------------------------------------------------


def only(tmp_path, *names):
    for name in names:
        (tmp_path / name).write_bytes(b"\x80\x04 whatever")
    return tmp_path


@pytest.mark.parametrize(
    "names, message",
    [
        (["pytorch_model.bin", "config.json"], "pickle, which can run code"),
        (["consolidated.00.pth"], "pickle, which can run code"),
        (["model.pt"], "pickle, which can run code"),
        (["gpt-oss-20b-mxfp4.gguf"], "GGUF"),
        (["model.bin"], "Metal"),
        (["adapter_config.json", "adapter_model.safetensors"], "LoRA adapter.*merge"),
        (["_CHECKPOINT_METADATA"], "Orbax"),
        ([], "no safetensors here; what works is"),
    ],
)
def test_formats_that_are_named(tmp_path, names, message):
    with pytest.raises(CheckpointError, match=message):
        load(only(tmp_path, *names))


def test_a_file_instead_of_a_folder(tmp_path, plain):
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF")
    assert "GGUF" in problems(gguf)
    assert f"give its folder, {plain}" in problems(plain / "model.safetensors")


def rename(tensors, old, new):
    for name in [n for n in tensors if old in n]:
        tensors[name.replace(old, new)] = tensors.pop(name)


def as_bnb(tensors):
    tensors["model.layers.0.self_attn.q_proj.weight.absmax"] = ("F32", np.ones(3, np.float32))
    tensors["model.layers.0.self_attn.q_proj.weight.quant_map"] = ("F32", np.ones(16, np.float32))


def as_mlx(tensors):
    rename(tensors, "gate_up_proj_blocks", "gate_proj.weight")
    rename(tensors, "gate_up_proj_scales", "gate_proj.scales")


def as_quark(tensors):
    rename(tensors, "experts.gate_up_proj_scales", "experts.0.gate_up_proj.weight_scale")


@pytest.mark.parametrize(
    "change, config, message",
    [
        (as_bnb, {}, "bitsandbytes"),
        (None, {"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        (as_mlx, {}, "MLX"),
        (None, {"quantization": {"group_size": 32, "bits": 4}}, "MLX"),
        (as_quark, {}, "Quark"),
        (None, {"quantization_config": {"quant_method": "quark"}}, "Quark"),
        (None, {"quantization_config": {"quant_method": "fp8"}}, "FP8"),
        (None, {"quantization_config": {"quant_method": "new"}}, "'new'"),
        (lambda t: rename(t, "model.layers", "blk"), {}, "llama.cpp"),
    ],
)
def test_other_quantisations_are_named(tmp_path, change, config, message):
    folder = edited.folder(tmp_path / "x", change=change, config=lambda c: c.update(config))
    text = problems(folder)
    assert message in text and "published MXFP4 checkpoint" in text and "\n" not in text


def test_another_model(tmp_path):
    folder = edited.folder(tmp_path / "x", change=lambda t: rename(t, "model.", "transformer."))
    assert "not the tensors of a gpt-oss model" in problems(folder) or "missing" in problems(folder)


def test_blocks_of_fifteen_bytes(tmp_path):
    """The last axis is checked, and a flattened one is refused."""
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    for shape in (slice(15), None):

        def change(tensors, shape=shape):
            kind, value = tensors[name]
            cut = value[..., shape] if shape else value.reshape(*value.shape[:2], -1)
            tensors[name] = (kind, np.ascontiguousarray(cut))

        folder = edited.folder(tmp_path / str(shape is None), change=change)
        assert f"{name} is [4, 320, " in problems(folder)


# --- names -------------------------------------------------------------------------------


def cached(root, folder, revision, *, main=True):
    """Hugging Face's layout: snapshots hold links into blobs."""
    repository = root / "models--openai--gpt-oss-20b"
    snapshot = repository / "snapshots" / revision
    (repository / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(folder.iterdir())):
        blob = repository / "blobs" / f"{revision}{i}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    if main:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(revision + "\n")  # as an editor leaves it
    return snapshot


@pytest.fixture
def clean(monkeypatch):
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    "variable, below",
    [("HF_HOME", "hub"), ("HF_HUB_CACHE", ""), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_name_in_the_local_cache(tmp_path, clean, plain, variable, below):
    clean.setenv(variable, str(tmp_path / "cache"))
    clean.chdir(tmp_path)
    snapshot = cached(tmp_path / "cache" / below, plain, "abc123")
    cached(tmp_path / "cache" / below, plain, "older", main=False)
    assert find("openai/gpt-oss-20b") == snapshot
    assert load("openai/gpt-oss-20b").config.layers == 1


def test_name_in_the_cache_of_the_home_folder(tmp_path, clean, plain):
    clean.setenv("HOME", str(tmp_path))
    snapshot = cached(tmp_path / ".cache/huggingface/hub", plain, "abc", main=False)
    assert find("openai/gpt-oss-20b") == snapshot


def test_name_that_is_not_in_the_cache(tmp_path, clean, plain):
    clean.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match="gptoss-jax download openai/gpt-oss-20b") as caught:
        load("openai/gpt-oss-20b")
    assert str(tmp_path) in str(caught.value)
    cached(tmp_path / "hub", plain, "a", main=False)
    cached(tmp_path / "hub", plain, "b", main=False)
    with pytest.raises(CheckpointError, match="2 revisions"):
        load("openai/gpt-oss-20b")


def test_a_folder_comes_before_a_name(tmp_path, clean, plain):
    clean.chdir(tmp_path)
    shutil.copytree(plain, tmp_path / "openai" / "gpt-oss-20b")
    assert load("openai/gpt-oss-20b").config.layers == 1


def test_no_such_folder(tmp_path):
    assert "no such folder" in problems(tmp_path / "nothing here")


@pytest.mark.parametrize("path", ["", "~no such user/x", "x" * 5000, "a\0b", "tiny/", "tiny\n"])
def test_what_can_be_no_path(path):
    assert "no such folder" in problems(path) or "a path or a name is expected" in problems(path)


def test_tiny_is_the_embedded_model_whatever_lies_here(tmp_path, clean):
    clean.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert find("tiny") == TINY and (TINY / "model.safetensors").is_file()
    assert "config.json is missing" in problems("./tiny")


@pytest.mark.parametrize("named", ["", "..", "../../elsewhere", "\xff", "gone"])
def test_a_cache_whose_reference_leads_nowhere(tmp_path, clean, plain, named):
    clean.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = cached(tmp_path / "cache", plain, "abc")
    (tmp_path / "cache" / "models--openai--gpt-oss-20b" / "refs" / "main").write_text(named)
    assert find("openai/gpt-oss-20b") == snapshot  # the only one there is


def test_folder_above_the_one_that_is_meant(tmp_path):
    checkpoints.make(tmp_path / "original", edited.SMALL, "original")
    assert f"lies in {tmp_path / 'original'}: give that" in problems(tmp_path)
