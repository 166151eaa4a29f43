"""Real processes under jax.distributed, each with one CPU device and a launcher's environment."""

import functools
import json
import shutil
import sys
from pathlib import Path

import jax
import meshed
import numpy as np
import pytest
from processes import AMBIENT, answers, free_port, run, workers

from gptoss_jax import sharding

NEW = 12  # tokens
IDS = [part for prompt in meshed.PROMPTS for part in ("--ids", ",".join(map(str, prompt)))]


def command(*more: str) -> list[str]:
    """The command line, as installed."""
    program = "from gptoss_jax.cli import main; main()"
    fixed = ["--dtype", "float32", "--temperature", "0", "--max-new-tokens", str(NEW), "--json"]
    model = ["--model", str(meshed.folder(layers=1)), "--compilation-cache", "off"]
    return [sys.executable, "-c", program, "generate", *model, *IDS, *fixed, *more]


@functools.cache
def alone() -> list[list[int]]:
    """What one process says that was not told of any other."""
    ((code, out, err, _),) = run([command()])
    assert code == 0, err
    return json.loads(out)["tokens"]


def test_a_launchers_environment_alone_changes_nothing():
    ((code, out, err, _),) = run([command()], **AMBIENT)
    assert code == 0, err
    assert json.loads(out)["tokens"] == alone()


@pytest.mark.parametrize(
    "processes, meshes",
    [
        (2, [("expert", {"expert": 2}, "all_to_all"), ("data", {"data": 2}, "auto")]),
        (4, [("both", {"data": 2, "expert": 2}, "all_reduce")]),
    ],
)
def test_every_rank_says_what_one_process_says(processes, meshes):
    folder = meshed.folder(layers=1)
    task = {"folder": str(folder), "prompts": meshed.PROMPTS, "new": NEW, "meshes": meshes}
    said = answers(workers("generate", processes, **task))
    # "own": a mesh of each process's own device. Many processes, expert=1: no expert parallelism.
    for name in [*(mesh[0] for mesh in meshes), "own"]:
        for rank in range(processes):
            assert said[rank][name]["tokens"] == alone(), (name, rank)
    # Each process read its share of what is cut and all of what is not.
    for name, axes, _ in meshes:
        for rank in range(processes):
            assert said[rank][name]["read"] == share(**axes), (name, rank)
        assert (said[0]["own"]["read"] == share()) and share() > share(expert=2)


def share(**axes) -> int:
    """Bytes of the checkpoint that one device of a mesh must have."""
    numbers = meshed.NUMBERS.replace(layers=1)
    sizes = tuple(axes.get(axis, 1) for axis in sharding.AXES)
    from jax.sharding import AbstractMesh

    rules = sharding.Rules.fit(numbers, AbstractMesh(sizes, sharding.AXES))
    total = 0
    for name, shape in sharding.parameter_shapes(numbers).items():
        spec = sharding.parameter_spec(name.replace(".N.", ".0."), rules)
        names = [axis for entry in spec if entry for axis in np.atleast_1d(entry)]
        cut = int(np.prod([axes.get(axis, 1) for axis in names]))
        width = 1 if name.endswith(("blocks", "scales")) else 2  # bytes as stored
        total += width * int(np.prod(shape)) // cut
    return total


def test_the_command_says_it_once():
    address = f"127.0.0.1:{free_port()}"
    joined = ["--mesh", "expert=2", "--coordinator", address, "--processes", "2", "--process-id"]
    (code, out, err, _), (code1, out1, err1, _) = run([command(*joined, str(i)) for i in (0, 1)])
    assert code == code1 == 0, err + err1
    assert json.loads(out)["tokens"] == alone()
    assert out1 == ""


def test_the_example_runs_on_two_hosts():
    example = str(Path(__file__).parents[2] / "examples" / "multihost.py")
    joined = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process-id"]
    model = ["--model", str(meshed.folder(layers=1)), "--mesh", "expert=2"]
    program = [sys.executable, example, *model, "--max-new-tokens", "4", *joined]
    (code, out, err, _), (code1, out1, err1, _) = run([[*program, str(i)] for i in (0, 1)])
    assert code == code1 == 0, err + err1
    assert "blocks.N.moe.experts.gate_up_blocks" in out and out.count(" -> '") == 2
    assert [line for line in out1.splitlines() if not line.startswith("[Gloo]")] == []


def test_a_shard_that_one_host_lacks_fails_everywhere_alike(tmp_path):
    whole = meshed.folder(layers=1)
    lacking = tmp_path / "lacking"
    shutil.copytree(whole, lacking)
    shard = sorted(lacking.glob("*.safetensors"))[1]
    shard.unlink()
    first, second = answers(workers("missing", 2, folders=[str(whole), str(lacking)]))
    assert shard.name in second["message"] and second["kind"] == "CheckpointError"
    assert first == {"kind": "PeerError", "message": second["message"]}


@pytest.mark.parametrize("killed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_lost_process_stops_the_others(killed):
    # Noticed within the 10 s of the heartbeat, acted on within 10 more; a process that fails waits
    # 10 s for the others on its way out, while its heart still beats.
    said = workers("lost", 2, timeout_s=150, killed=killed)
    (code, out, _, seconds), (lost, out1, err1, died) = said
    assert "ready 2.0" in out and "ready 2.0" in out1
    assert lost == -9 if killed else (lost != 0 and "this one fails" in err1)
    assert code not in (0, None)
    assert seconds - died < 30, (seconds, died)


def test_jax_is_told_when_a_peer_is_dead_and_not_to_look_around(monkeypatch):
    told = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **k: told.append((a, k)))
    assert sharding.start(coordinator="here:1", processes=2, process_id=1, heartbeat_s=7)
    ((where, how),) = told
    assert where == ("here:1", 2, 1) and how["cluster_detection_method"] == "deactivate"
    assert how["heartbeat_timeout_seconds"] == how["shutdown_timeout_seconds"] == 7


def test_start_needs_a_whole_triple_or_a_cluster():
    assert sharding.start() is False
    for given, message in (
        ({"coordinator": "here:1"}, "coordinator needs processes, process_id as well"),
        ({"process_id": 0}, "process_id needs coordinator, processes"),
        ({"detect": True, "processes": 2}, "either detect the cluster or give"),
        ({"coordinator": "here", "processes": 2, "process_id": 0}, "coordinator is HOST:PORT"),
        ({"coordinator": "here:1", "processes": 2, "process_id": 2}, "got 2 of 2"),
    ):
        with pytest.raises(ValueError, match=message):
            sharding.start(**given)
    assert sharding.is_first()
    sharding.stop()
