"""As many devices as there are against one of them: `pytest -m gpu tests/sharding/test_gpus.py`.

The same lines run on CPU devices with `-m slow`. Every wait has an end: a collective that hangs
ends the run with all threads' traces.
"""

import faulthandler
import functools
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import cells
import jax
import numpy as np
import pytest
from processes import answers, free_port, run, workers
from tolerances import BFLOAT16_ROW, assert_logits, clear_choices, row_difference, spread

NEW = 24  # tokens
# CPUs: two devices and two launches, since two cores do the work of all.
HANGS_S = {"gpu": 280, "cpu": 900}
LAUNCHES = {"gpu": 20, "cpu": 2}
BESIDE = {"gpu": 4, "cpu": 1}  # launches under way at a time


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("cpu", marks=pytest.mark.slow),
    ],
)
def platform(request):
    if count(request.param) < 2:
        pytest.skip("needs several devices")
    return request.param


@pytest.fixture(autouse=True)
def no_hang(platform):
    faulthandler.dump_traceback_later(HANGS_S[platform], exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def count(platform: str) -> int:
    return len(jax.devices()) if platform == "gpu" else 2


@functools.cache
def alone(dtype: str):
    """What one device says: tokens, logits."""
    return cells.said(cells.folder(), dtype, NEW)


def as_alone(dtype: str, tokens, logits, name: str):
    """float32: the same tokens, logits that differ by the order of sums. bfloat16: the same choice
    wherever the two likeliest differ by four times what the logits do."""
    expected_tokens, expected = alone(dtype)
    assert np.isfinite(logits).all(), name
    if dtype == "float32":
        assert_logits(logits, expected)
        assert tokens == expected_tokens, name
        return
    clear = clear_choices(logits, expected)
    assert clear.mean() > 0.5, name
    np.testing.assert_array_equal(logits.argmax(-1)[clear], expected.argmax(-1)[clear], name)
    assert np.median(row_difference(logits, expected)) < BFLOAT16_ROW * spread(expected), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_process_says_on_every_mesh_what_one_device_says(platform, dtype):
    n = count(platform)
    for axes, how in cells.cells(n):
        mesh = cells.mesh_of(axes, jax.devices()[:n])
        as_alone(dtype, *cells.said(cells.folder(), dtype, NEW, mesh, how), cells.named(axes, how))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_process_a_device_says_so_too(platform, dtype, tmp_path):
    n = count(platform)
    task = {"folder": str(cells.folder()), "dtype": dtype, "new": NEW, "out": str(tmp_path)}
    said = answers(workers("cells", n, timeout_s=HANGS_S[platform] - 20, platform=platform, **task))
    assert [(one["devices"], one["here"]) for one in said] == [(n, 1)] * n
    # "own": joined processes, each with a mesh of its own device. No expert parallelism there.
    names = [cells.named(*cell) for cell in cells.cells(n)] + ["own"]
    for name in names:
        for rank, one in enumerate(said):
            logits = np.load(tmp_path / f"{name}.{rank}.npy")
            as_alone(dtype, one["tokens"][name], logits, f"{name}, process {rank}")
            assert one["tokens"][name] == said[0]["tokens"][name], (name, rank)


def command(*more: str) -> list[str]:
    program = "from gptoss_jax.cli import main; main()"
    ids = [part for prompt in cells.PROMPTS for part in ("--ids", ",".join(map(str, prompt)))]
    fixed = ["--dtype", "float32", "--temperature", "0", "--max-new-tokens", "8", "--json"]
    model = ["--model", str(cells.folder())]
    return [sys.executable, "-c", program, "generate", *model, *ids, *fixed, *more]


def test_launched_again_and_again(platform):
    """The command line, one process a device, from nothing to the answer: none hangs or dies."""
    n = count(platform)
    expected = [tokens[:8] for tokens in alone("float32")[0]]

    def launch(i: int):
        joined = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(n)]
        mesh = f"expert={n}" if i % 4 else f"data={n}"  # every fourth time each has all experts
        joined += ["--mesh", mesh, "--process-id"]
        commands = [command(*joined, str(rank)) for rank in range(n)]
        said = run(commands, timeout_s=100, platform=platform)
        for code, _, err, _ in said:
            assert code == 0, f"launch {i}: {err[-2000:]}"
        assert json.loads(said[0][1])["tokens"] == expected, i
        assert [out for _, out, _, _ in said[1:]] == [""] * (n - 1)

    with ThreadPoolExecutor(BESIDE[platform]) as pool:
        list(pool.map(launch, range(LAUNCHES[platform])))
