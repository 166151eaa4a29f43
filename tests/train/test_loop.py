"""Whole runs: learning, SIGKILL and resume to the bit, NaN, devices, export."""

import json
import os
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_cases import (
    SMALL,
    counting,
    harmony_tokenizer,
    killed,
    lines,
    losses,
    network,
    parameters,
    recipe_tokenizer,
    start,
    write_run,
)

import gptoss_jax as gj
from gptoss_jax.train import Batches, Documents, NotFinite, Settings, Trainer, optimizer, run
from gptoss_jax.train.checkpoints import Checkpoints
from gptoss_jax.train.loop import Metrics, export
from gptoss_jax.train.quantise import is_expert_weight, rounded
from gptoss_jax.train.step import initial

STEPS = 25  # no multiple of checkpoint_every, 2: the last step is saved for its own sake


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    counting(20, seed=1).save(folder / "valid.npz")
    config = write_run(folder, steps=STEPS, run_export="out", data_valid="valid.npz")
    return folder, run(config, progress=False)


def same_bits(a: dict, b: dict):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), err_msg=name)


def test_a_run_learns_and_says_so(unbroken):
    folder, result = unbroken
    written = lines(folder / "run")
    assert [line["step"] for line in written if "loss" in line] == list(range(1, STEPS + 1))
    first, last = written[0], result.metrics
    assert last["step"] == result.step == STEPS
    assert last["loss"] < 0.75 * first["loss"]
    valid = written[-1]["valid_loss"]
    assert valid == pytest.approx(held_out_loss(folder, result.params), rel=1e-6)
    # 53 ids, random weights: the first loss is not far above that of guessing.
    assert first["loss"] == pytest.approx(np.log(SMALL.vocab), rel=0.2)
    assert first["rate"] == 0.0 and written[2]["rate"] == pytest.approx(0.01)
    assert all(1 <= line["aux"] < SMALL.experts for line in written if "aux" in line)
    assert last["loss"] * 0.5 < valid < first["loss"]
    assert (folder / "run" / "loss.png").read_bytes()[:4] == b"\x89PNG"


def held_out_loss(folder, params):
    """Of the rounded model, which is what will be exported: a mean over tokens, not over rows."""
    batches = Batches(Documents.load(folder / "valid.npz"), row=24, rows=4, seed=0)
    loss = jax.jit(lambda params, batch: network(SMALL, 24).loss(params, batch, quantised=True)[0])
    count = -(-len(batches.packed) // 4)
    assert count > 1
    parts = [batches.at(i) for i in range(count)]
    weights = [part["weights"].sum() for part in parts]
    return np.average([float(loss(params, part)) for part in parts], weights=weights)


def test_killed_at_any_step_and_resumed_gives_the_same_bits(unbroken, tmp_path):
    folder, whole = unbroken
    config = write_run(tmp_path, steps=STEPS)
    for kill_after in (3, 6):
        assert killed(config, kill_after) < STEPS
    result = run(config, progress=False)
    same_bits(result.params, whole.params)
    assert losses(tmp_path / "run") == losses(folder / "run")
    written = [line["step"] for line in lines(tmp_path / "run")]
    assert written == list(range(1, STEPS + 1))  # steps done twice are told once


def test_killed_while_a_checkpoint_is_written(unbroken, tmp_path):
    folder, whole = unbroken
    config = write_run(tmp_path, steps=STEPS)
    code = """
import os, signal
from gptoss_jax.train import checkpoints, run
save = checkpoints.Checkpoints.save
def cut_off(self, step, *rest):
    if step == 4: self._manager.wait_until_finished()  # step 2 is whole
    save(self, step, *rest)
    if step == 4: os.kill(os.getpid(), signal.SIGKILL)
checkpoints.Checkpoints.save = cut_off
run({path!r}, progress=False)
"""
    assert start(config, code).wait() == -signal.SIGKILL
    names = os.listdir(tmp_path / "run" / "checkpoints")
    assert "2" in names and "4" not in names
    same_bits(run(config, progress=False).params, whole.params)
    assert losses(tmp_path / "run") == losses(folder / "run")
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == [str(STEPS - 1), str(STEPS)]


def test_a_finished_run_is_not_run_again(unbroken):
    folder, whole = unbroken
    before = (folder / "run" / "metrics.jsonl").read_text()
    config = write_run(folder, steps=STEPS, data_valid="valid.npz")
    same_bits(run(config, progress=False).params, whole.params)
    assert (folder / "run" / "metrics.jsonl").read_text() == before


def test_another_run_s_folder_is_refused(unbroken, tmp_path):
    folder, _ = unbroken
    changed = {"optimizer_peak": 0.02, "run_seed": 1}
    config = write_run(folder, steps=STEPS, name="other.toml", **changed)
    with pytest.raises(ValueError, match=r"differs in optimizer\.peak, run\.seed"):
        run(config, progress=False)
    counting(41).save(tmp_path / "train.npz")
    shutil.copytree(folder / "run", tmp_path / "run")
    with pytest.raises(ValueError, match="holds another run, which differs in data"):
        run(write_run(tmp_path, steps=STEPS), progress=False)


def test_two_devices_train_as_one_does(unbroken, tmp_path):
    folder, _ = unbroken
    run(write_run(tmp_path, steps=STEPS, run_data_parallel=2), progress=False)
    one, two = losses(folder / "run"), losses(tmp_path / "run")
    # The same sums in another order: float32 rounding, grown by Adam over the steps. Rounding the
    # experts to MXFP4 (from step 4) makes steps of it.
    for step in range(1, 5):
        assert two[step] == pytest.approx(one[step], rel=1e-5)
    assert two[STEPS] == pytest.approx(one[STEPS], rel=0.02)


def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    at = Batches.at

    def poisoned(self, step):
        batch = at(self, step)
        if step == 7:
            batch["weights"] = np.full_like(batch["weights"], np.nan)
        return batch

    monkeypatch.setattr(Batches, "at", poisoned)
    config = write_run(tmp_path, steps=STEPS)
    with pytest.raises(
        NotFinite, match=r"step 8: the loss is nan.* checkpoints before it are kept"
    ):
        run(config, progress=False)
    written = lines(tmp_path / "run")
    assert written[-1]["step"] == 8 and written[-1]["loss"] is None
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=2)
    assert checkpoints.steps() == [4, 6]
    kept = checkpoints._manager.restore(6)["state"]["params"]
    assert all(np.isfinite(x).all() for x in kept.values())
    checkpoints.close()
    assert (tmp_path / "run" / "loss.png").exists()


def test_a_step_with_nan_changes_nothing(unbroken, monkeypatch):
    folder, _ = unbroken
    for what in ("loss", "gradient"):
        if what == "gradient":
            monkeypatch.setattr(optimizer, "norm", lambda tree: jnp.float32(jnp.inf))
        trainer, state, batch = at_start(folder)
        if what == "loss":
            batch["weights"][0, 0] = np.inf
        before = jax.tree.map(np.asarray, state)
        after, measured = trainer._step(state, jax.device_put(batch, trainer.over_rows))
        assert not bool(measured["finite"]) and int(after["step"]) == 0
        same_bits(after["params"], before["params"])
        jax.tree.map(np.testing.assert_array_equal, after["optimizer"], before["optimizer"])


def at_start(folder):
    """(trainer, a state before the first step, the first batch)"""
    trainer = Trainer(Settings.load(write_run(folder, steps=STEPS, name="other_run.toml")))
    state = initial(SMALL, 0, trainer.transformation)
    return trainer, jax.device_put(state, trainer.everywhere), trainer.batches.at(0)


def test_rounding_begins_at_its_step(unbroken):
    trainer, state, batch = at_start(unbroken[0])
    placed = jax.device_put(batch, trainer.over_rows)
    start = trainer.settings.run.quantise_from
    seen = {}
    for step in (0, start - 1, start, start + 9):
        again = jax.tree.map(jnp.array, state) | {"step": jnp.int32(step)}  # donated
        seen[step] = float(trainer._step(again, placed)[1]["loss"])
    assert seen[0] == seen[start - 1] and seen[start] == seen[start + 9]
    assert seen[start] != pytest.approx(seen[start - 1], rel=1e-5)


def test_metrics_every_so_many_steps(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 1.0}\n{"step": 3, "lo')
    metrics = Metrics(file, 1, every=3)
    for step in range(2, 9):
        values = {"step": step, "loss": float("inf") if step == 7 else 0.5, "tokens": 10}
        assert metrics.note(values)["tokens_per_s"] > 0
    metrics.close()
    assert losses(tmp_path) == {1: 1.0, 3: 0.5, 6: 0.5, 7: None}


def test_export_brings_the_tokenizer_and_every_token_that_ends_a_turn(tmp_path):
    tokenizer = harmony_tokenizer()
    (tmp_path / "t").mkdir()
    recipe_tokenizer().letters().save(str(tmp_path / "t" / "tokenizer.json"))
    settings = Settings.load(
        write_run(
            tmp_path,
            model_vocab=tokenizer.size,
            data_tokenizer="t/tokenizer.json",
            run_export="out",
        )
    )
    export(settings, parameters(settings.model))
    ends = {tokenizer.special[name] for name in ("<|return|>", "<|call|>", "<|endoftext|>")}
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert set(written["eos_token_id"]) == ends == set(gj.load(tmp_path / "out").stop_tokens)
    assert gj.Tokenizer.load(tmp_path / "out").encode("To be") == tokenizer.encode("To be")


def test_data_that_cannot_be_learned_is_refused(tmp_path):
    config = write_run(tmp_path)
    docs = counting(4)
    np.savez(
        tmp_path / "train.npz", tokens=docs.tokens, counts=docs.counts & False, starts=docs.starts
    )
    with pytest.raises(ValueError, match="no token of the data counts"):
        run(config)
    np.savez(
        tmp_path / "train.npz", tokens=docs.tokens + 60, counts=docs.counts, starts=docs.starts
    )
    with pytest.raises(ValueError, match=r"token id \d+ and model.vocab is 53"):
        run(config)
    assert not (tmp_path / "run").exists()


def test_the_exported_model_is_the_trained_one(unbroken):
    folder, result = unbroken
    model = gj.load(folder / "out", dtype=jnp.float32)
    tokens = np.arange(24)[None] % SMALL.vocab
    params = {
        name: rounded(x) if is_expert_weight(name) else x.astype(jnp.bfloat16).astype(jnp.float32)
        for name, x in result.params.items()
    }
    expected = network(SMALL, 24).model(params)(tokens)
    # Other sums of the same numbers (packed experts; windows of 24 where the sequence is 24 long).
    np.testing.assert_allclose(model(tokens), expected, atol=2e-5)
    with pytest.raises(ValueError, match=r"run\.export .* exists already"):
        run(write_run(folder, steps=STEPS, name="again.toml", run_export="out"), progress=False)


def test_a_run_starts_from_a_checkpoint(unbroken, tmp_path):
    folder, result = unbroken

    changed = {"run_start": str(folder / "out"), "model_window": SMALL.window}
    run_ = Trainer(Settings.load(write_run(tmp_path, steps=STEPS, **changed)))
    state, step = run_._start(Checkpoints(tmp_path / "run" / "checkpoints", keep=1))
    assert step == 0
    for name, x in result.params.items():
        stored = rounded(x) if is_expert_weight(name) else x.astype(jnp.bfloat16)
        np.testing.assert_array_equal(state["params"][name], stored.astype(jnp.float32))
    config = write_run(tmp_path, name="other.toml", **changed | {"model_window": 4})
    with pytest.raises(ValueError, match=r"differ in window \(4 here, 5 there\)"):
        run(config, progress=False)


def test_a_progress_bar_with_loss_and_speed(unbroken, tmp_path, capfd):
    run(write_run(tmp_path, steps=STEPS), progress=True)
    shown = capfd.readouterr().err
    assert f"{STEPS}/{STEPS}" in shown and "loss " in shown and "tok/s" in shown
