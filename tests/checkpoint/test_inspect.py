"""The report: what a folder is, without building a model."""

import json

import checkpoints
import edited
import pytest

import gptoss_jax as gj
from gptoss_jax.checkpoint import CheckpointError

WEIGHTS = checkpoints.make_weights(edited.SMALL)


@pytest.mark.parametrize(
    "layout, name", [("mxfp4", "hf-mxfp4"), ("mxfp4-sharded", "hf-mxfp4"), ("bf16", "hf-bf16"),
                     ("original", "original")],
)  # fmt: skip
def test_report_of_a_good_folder(tmp_path, layout, name):
    folder = checkpoints.write(tmp_path / "x", edited.SMALL, WEIGHTS, layout, tokenizer=True)
    report = gj.inspect(folder)
    assert report.ok and report.problems == () and report.layout == name
    stored = edited.tensors(WEIGHTS, layout)
    assert {t["name"]: (t["dtype"], tuple(t["shape"]), t["bytes"]) for t in report.tensors} == {
        name: (kind, value.shape, value.nbytes) for name, (kind, value) in stored.items()
    }
    sizes = {p.name: p.stat().st_size for p in folder.glob("*.safetensors")}
    assert report.files == sizes
    values = {n: v for n, v in checkpoints.as_bf16(WEIGHTS).items()}
    assert report.parameters["total"] == sum(v.size for v in values.values())
    assert set(report.stop_tokens) == {257, 258, 264} and report.text_vocab == 265


def test_json_is_plain_and_whole(tmp_path):
    folder = checkpoints.write(tmp_path / "x", edited.SMALL, WEIGHTS, "mxfp4")
    values = json.loads(json.dumps(gj.inspect(folder).to_json(), allow_nan=False))
    assert values["ok"] is True and values["layout"] == "hf-mxfp4"
    assert values["config"]["experts"] == 4 and values["config"]["sliding"] == [True]
    assert values["size_bytes"] == (folder / "model.safetensors").stat().st_size
    assert len(values["tensors"]) == 22


def test_text_has_one_line_for_all_layers(tmp_path):
    numbers = edited.SMALL.replace(layers=11)
    folder = checkpoints.write(
        tmp_path / "x", numbers, checkpoints.make_weights(numbers), "mxfp4-sharded"
    )
    text = str(gj.inspect(folder))
    assert "model.layers.*.self_attn.q_proj.weight" in text and "11 x BF16" in text
    assert len(text.splitlines()) < 45
    assert text.splitlines()[-1].split() == ["problems", "none"]


def test_problems_are_in_the_text_and_the_json(tmp_path):
    folder = edited.folder(tmp_path / "x", change=lambda t: t.pop("model.norm.weight"))
    report = gj.inspect(folder)
    assert not report.ok and report.to_json()["ok"] is False
    assert "model.norm.weight is missing; norm.scale_D needs it, [96]." in str(report)
    assert "values were not read" in report.notes[0]


def test_a_folder_without_a_config_still_shows_its_tensors(tmp_path):
    folder = edited.folder(tmp_path / "x")
    (folder / "config.json").unlink()
    report = gj.inspect(folder)
    assert report.config is None and len(report.tensors) == 22 and report.parameters == {}
    assert report.problems == ("config.json is missing.",) and str(report)


def test_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        gj.inspect(tmp_path / "x")
