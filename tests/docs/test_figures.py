"""README's figures are the recorded ones, and their floors are the formulas'."""

import json
import pathlib

import pytest

from gptoss_jax.config import Config
from gptoss_jax.floors import decode_floor_ms, prefill_floor_ms

ROOT = pathlib.Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs/measured/h200-2026-11-30.json").read_text("utf-8"))
LINES = [line for line in (ROOT / "README.md").read_text("utf-8").splitlines() if "|" in line]
LABELS = {
    ("decode", 1): "one decode step, batch 1, 1k context",
    ("decode", 32): "one decode step, batch 32, 1k context",
    ("prefill", 1): "prefill of 2048 tokens",
}


def digits(value: float, n: int = 3) -> str:
    """2.869 -> 2.87, 41.82 -> 41.8."""
    return f"{value:#.{n}g}"


@pytest.mark.parametrize("row", RECORD["rows"], ids=lambda r: f"{r['what']}-{r['batch']}")
def test_speed(row):
    (line,) = [one for one in LINES if LABELS[row["what"], row["batch"]] in one]
    config = Config.gpt_oss_20b()
    if row["what"] == "decode":
        floor = decode_floor_ms(config, row["batch"], row["context"])
    else:
        floor = prefill_floor_ms(config, row["context"])
    _, _, measured, least, percent, rival, _ = (cell.strip() for cell in line.split("|"))
    assert measured.startswith(f"{digits(row['ms'])} ms")
    assert least == f"{floor:.2f} ms" or least == f"{floor:.1f} ms"
    assert percent.split()[0] == f"{100 * floor / row['ms']:.0f}"
    (other,) = [
        one
        for one in RECORD["rivals"]
        if (one["what"], one["batch"]) == (row["what"], row["batch"])
    ]
    assert other["engine"].split()[0] in rival
    if "tok/s" in rival:
        assert f"{other['tokens_per_s']:,} tok/s" in rival
    else:
        assert f"{digits(1e3 / other['tokens_per_s'])} ms" in rival


def test_loading():
    load = RECORD["load"]
    (line,) = [one for one in LINES if "loading" in one]
    assert f"{load['bytes'] / 1e9:.2f} GB" in line and f"{load['seconds']:.1f} s" in line
    assert f"{load['bytes'] / load['seconds'] / 1e9:.2f} GB/s" in line


def test_the_profile_accounts_for_the_step():
    for name, row in zip(RECORD["profiles"], RECORD["rows"], strict=True):
        total = sum(kernel["us"] for kernel in RECORD["profiles"][name])
        assert total == pytest.approx(1e3 * row["kernels_ms"], rel=0.02), name
