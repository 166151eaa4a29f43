"""The installed command in processes of its own: entry point, exit codes, a pipe, two processes."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import TINY, make

COMMAND = shutil.which("gptoss-jax", path=str(Path(sys.executable).parent)) or "gptoss-jax"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("process") / "checkpoint"
    make(folder, TINY.replace(layers=1, sliding=None), tokenizer=True)
    return folder


def start(*args, devices=1):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "GPTOSS_COMPILATION_CACHE": "off",
        # Left over from a launcher; they must mean nothing.
        "RANK": "1",
        "WORLD_SIZE": "4",
    }
    return subprocess.Popen(
        [COMMAND, *map(str, args)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_share_one_model_and_one_speaks(checkpoint):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = ["generate", "--model", checkpoint, "--ids", "72", "--json"]
    common += ["--max-new-tokens", 3, "--temperature", 0, "--dtype", "float32"]
    together = [
        start(
            *common,
            *("--mesh", "data=1,expert=2"),
            *("--coordinator", f"127.0.0.1:{port}", "--processes", 2, "--process-id", i),
        )
        for i in range(2)
    ]
    alone = start(*common)
    (first, second), (one, log) = (
        [p.communicate(timeout=300) for p in together],
        alone.communicate(timeout=300),
    )
    assert [p.returncode for p in (*together, alone)] == [0, 0, 0], (first[1], second[1], log)
    assert second[0] == ""
    assert json.loads(first[0]) == json.loads(one)


EARLY = """
import json, sys
from gptoss_jax.cli import main
sys.stdin = None  # closed, as some launchers leave it
for args in json.loads(sys.argv[1]):
    try:
        main(args)
    except SystemExit as end:
        print(end.code)
for slow in ("jax", "numpy", "tokenizers"):
    assert slow not in sys.modules, slow
"""


def test_a_wrong_path_or_number_is_noticed_before_anything_heavy_is_imported(tmp_path):
    none, full = str(tmp_path / "none"), str(tmp_path)
    (tmp_path / "file").touch()
    bad = [
        ["generate", "Hi", "--model", none],
        ["generate", "--input", none],
        ["chat", "Hi", "--model", none],
        ["inspect", none],
        ["parity", none],
        ["bench", "--model", none],
        ["bench", "--plot", none + "/a.png"],
        ["export", none, none + "2", "--format", "bf16"],
        ["export", "tiny", full, "--format", "bf16"],
        ["train", none],
        ["generate", "--input", "-"],
        ["chat"],
        ["inspect", "owner/no-such-name"],
        ["inspect", "~no such user/x"],
        ["inspect", "x" * 5000],
    ]
    usage = [["generate"], ["generate", "Hi", "--temperature", "nan"], ["bench", "--batch", "0"]]
    done = subprocess.run(
        [sys.executable, "-c", EARLY, json.dumps(bad + usage)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"] * len(bad) + ["2"] * len(usage)
    assert "Traceback" not in done.stderr


def test_bad_data_and_bad_usage(tmp_path):
    missing = start("generate", "Hi", "--model", tmp_path / "none")
    usage = start("generate")
    out, err = missing.communicate(timeout=120)
    assert (missing.returncode, out) == (1, "")
    assert err.count("\n") == 1 and str(tmp_path / "none") in err
    out, err = usage.communicate(timeout=120)
    assert (usage.returncode, out) == (2, "")
    assert "Usage:" in err
