"""Configs: what a good one gives, and every bad value refused by its name."""

import pytest
from train_cases import SMALL, write_run

from gptoss_jax.train import Settings


def test_a_config_file(tmp_path):
    settings = Settings.load(write_run(tmp_path, run_export="out", optimizer_peak=1))
    assert settings.model == SMALL
    assert settings.data.train == str(tmp_path / "train.npz")  # relative to the file
    assert settings.run.folder == str(tmp_path / "run")
    assert settings.run.export == str(tmp_path / "out")
    assert settings.optimizer.peak == 1.0 and isinstance(settings.optimizer.peak, float)


def test_a_start_is_a_folder_beside_the_file_or_a_name(tmp_path):
    file = write_run(tmp_path, run_start="before")
    assert Settings.load(file).run.start == "before"
    (tmp_path / "before").mkdir()
    assert Settings.load(file).run.start == str(tmp_path / "before")


def test_lists_become_tuples(tmp_path):
    settings = Settings.load(write_run(tmp_path, model_sliding=[True, True], model_eos=[3, 4]))
    assert settings.model.sliding == (True, True) and settings.model.eos == (3, 4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"run_steps": 0}, r"run\.steps must be at least 1; got 0"),
        ({"run_steps": "many"}, r"run\.steps must be int; got 'many'"),
        ({"run_steps": 2.5}, r"run\.steps must be int; got 2\.5"),
        ({"run_steps": True}, r"run\.steps must be int; got True"),
        ({"run_steps": None}, r"run\.steps is missing"),
        ({"run_stepz": 4}, r"\[run\] key 'stepz' is unknown \(did you mean 'steps'\?\)"),
        ({"run_compute": "float16"}, r"run\.compute must be 'bfloat16' or 'float32'"),
        ({"run_router_aux": -1.0}, r"run\.router_aux must be at least 0"),
        ({"run_data_parallel": 3}, r"data\.rows 4 cannot be divided over run\.data_parallel 3"),
        ({"run_export": "x", "run_export_format": "gguf"}, r"run\.export_format must be"),
        ({"optimizer_peak": 0.0}, r"optimizer\.peak must be finite and above 0"),
        ({"optimizer_beta2": 1.0}, r"optimizer\.beta2 must lie in \[0, 1\)"),
        ({"optimizer_floor": 2}, r"optimizer\.floor must be in 0\.\.1"),
        ({"data_row": 1}, r"data\.row must be at least 2"),
        ({"model_window": 0}, r"\[model\]: .*window must be a whole number of at least 1"),
        ({"model_experts_per_token": 9}, r"\[model\]: .*experts_per_token 9 exceeds experts 4"),
        ({"model_ffn": 33}, r"model\.ffn 33 is no multiple of 32"),
        ({"model_layers": None}, r"model\.layers is missing"),
    ],
)
def test_bad_values_are_refused_by_name(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        Settings.load(write_run(tmp_path, **change))


def test_nan_is_refused():
    with pytest.raises(ValueError, match=r"optimizer\.weight_decay must be at least 0; got nan"):
        Settings.of(tables(optimizer={"weight_decay": float("nan")}))


def test_every_problem_is_told_at_once():
    with pytest.raises(ValueError) as caught:
        Settings.of(tables(run={"folder": "x"}, optimizer={"peek": 1.0}, extra={}))
    for part in ("run.steps is missing", "did you mean 'peak'?", "table 'extra' is unknown"):
        assert part in str(caught.value)


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(ValueError, match="cannot read the training config"):
        Settings.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[run\n")
    with pytest.raises(ValueError, match=r"bad\.toml is not TOML"):
        Settings.load(tmp_path / "bad.toml")


def tables(**changed) -> dict:
    import dataclasses

    model = {k: v for k, v in dataclasses.asdict(SMALL).items() if v is not None}
    return {
        "model": model,
        "data": {"train": "train.npz"},
        "run": {"folder": "x", "steps": 1},
        **changed,
    }


def test_loss_picture(tmp_path):
    from gptoss_jax.train import picture

    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "valid_loss": 2.0}\n')
    assert picture.losses(file, tmp_path / "loss.png") is None
    assert not (tmp_path / "loss.png").exists()
    file.write_text(
        '{"step": 1, "loss": 4.0}\n{"step": 2, "loss": null}\n{"step": 2, "valid_loss": 3.0}\n'
        '{"step": 3, "loss": 2.0}\n'
    )
    axes = picture.losses(file).axes[0]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert drawn["training"] == [[1, 4], [3, 2]]
    assert drawn["held out"] == [[2, 3]]
