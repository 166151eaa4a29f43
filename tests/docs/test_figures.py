"""The pages' figures are the recorded ones, their floors are the formulas', and none is missing."""

import importlib.util
import json
import pathlib

import pytest

from gptoss_jax.bench_mesh import compared
from gptoss_jax.config import Config
from gptoss_jax.floors import decode_floor_ms, prefill_floor_ms

ROOT = pathlib.Path(__file__).parents[2]
MEASURED = ROOT / "docs/measured"
RECORD = json.loads((MEASURED / "h200-2026-11-30.json").read_text("utf-8"))
TWO = json.loads((MEASURED / "h200-x2-2026-11-30.json").read_text("utf-8"))
EXPERTS = json.loads((ROOT / "kernels/tuned/nvidia_h200_experts.json").read_text("utf-8"))
CONFIGS = {"20b": Config.gpt_oss_20b(), "120b": Config.gpt_oss_120b()}
ROWS = [(report["model"], row) for report in RECORD["models"] for row in report["rows"]]
LENGTHS = {1024: "1k", 32768: "32k", 130944: "131k"}


def section(page: str, heading: str) -> str:
    """From its heading to the next one, in one line a paragraph."""
    text = (ROOT / page).read_text("utf-8")
    start = text.index(f"{heading}\n")
    return text[start : text.index("\n#", start + 1)]


def table(text: str, head: str) -> dict[str, list[str]]:
    """Of the Markdown table whose first line begins so: the cells behind each row's first one."""
    lines = iter(text[text.index(head) :].splitlines()[2:])
    found: dict[str, list[str]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        assert label not in found, f"two rows of {label!r}"
        found[label] = cells
    return found


README = section("README.md", "## Measured")
WORDS = " ".join(README.split())
SPEED = table(README, "| | time |")
KERNELS = (ROOT / "kernels/README.md").read_text("utf-8")


def digits(value: float, n: int = 3) -> str:
    """2.869 -> 2.87, 41.82 -> 41.8, 103.4 -> 103."""
    return f"{value:#.{n}g}".rstrip(".")


def label(model: str, row: dict) -> str:
    if row["what"] == "prefill":
        return f"{model} prefill, {row['context']} tokens"
    return f"{model} decode, batch {row['batch']}, {LENGTHS[row['context']]}"


def floor_ms(model: str, row: dict) -> float:
    if row["what"] == "prefill":
        return prefill_floor_ms(CONFIGS[model], row["context"])
    return decode_floor_ms(CONFIGS[model], row["batch"], row["context"])


@pytest.mark.parametrize(("model", "row"), ROWS, ids=[label(*one) for one in ROWS])
def test_speed(model, row):
    time, rate, least, percent, rival = SPEED[label(model, row)]
    floor = floor_ms(model, row)
    expected = f"{digits(row['ms'])} ms"
    if row["what"] == "prefill":
        expected += f"; first token {digits(row['first_token_ms'])} ms"
        assert row["first_token_ms"] > row["ms"]
    assert time == expected
    tokens = row["context"] if row["what"] == "prefill" else row["batch"]
    assert row["tokens_per_s"] == pytest.approx(1e3 * tokens / row["ms"], rel=1e-3)
    assert rate == f"{row['tokens_per_s']:,.0f}"
    assert row["floor_ms"] == pytest.approx(floor, rel=1e-3)
    assert least == f"{digits(floor)} ms"
    assert percent == f"{100 * floor / row['ms']:.0f}"
    others = [one for one in RECORD["rivals"] if rivals(model, row, one)]
    assert rival.split(" (")[0] == "".join(
        f"{one['tokens_per_s']:,}, {one['engine'].split()[0]}" for one in others
    )
    assert ("context unknown" in rival) == any(one["context"] is None for one in others)


def rivals(model: str, row: dict, one: dict) -> bool:
    """None is a context that was not written down: beside the shortest."""
    context = one["context"] or 1024
    return (model, row["what"], row["batch"], row["context"]) == (
        one["model"],
        one["what"],
        one["batch"],
        context,
    )


def test_every_row_of_the_table_and_every_rival_is_recorded():
    assert set(SPEED) == {label(*one) for one in ROWS} | {"20b loading 13.76 GB, page cache warm"}
    for one in RECORD["rivals"]:
        assert sum(rivals(model, row, one) for model, row in ROWS) == 1, one
    for commit in (RECORD["commit"], RECORD["load"]["commit"]):
        assert f"commit {commit}" in WORDS or f"loading: {commit}" in WORDS
    assert all(report["commit"] == RECORD["commit"] for report in RECORD["models"])


def test_the_picture_shows_what_is_recorded():
    file = ROOT / "recipes/record_speed.py"
    recipe = importlib.util.module_from_spec(
        spec := importlib.util.spec_from_file_location("record_speed", file)
    )
    spec.loader.exec_module(recipe)
    (axes,) = recipe.picture(RECORD).axes
    rows = [row["ms"] for report in RECORD["models"] for row in report["rows"]]
    drawn = [bar.get_height() for bar in axes.patches]
    assert len(drawn) == len(rows) - 3 and set(drawn) <= set(rows)
    assert "docs/pictures/speed.png" in (ROOT / "README.md").read_text("utf-8")


def test_loading():
    load = RECORD["load"]
    (row,) = [one for one in SPEED if "loading" in one]
    assert f"{load['bytes'] / 1e9:.2f} GB" in row
    assert SPEED[row][0] == f"{load['seconds']:.1f} s"
    assert SPEED[row][1] == f"{load['bytes'] / load['seconds'] / 1e9:.2f} GB/s"


def test_first_token_from_the_command_line():
    first = RECORD["first_token_from_the_command_line"]
    cold, warm = first["cold_compilation_cache_s"], first["warm_compilation_cache_s"]
    words = f"{cold:.0f} s with an empty compilation cache and {warm:.0f} s with a full one"
    assert words in WORDS and "alone it has not been measured" in WORDS


def test_the_profile_accounts_for_the_step():
    """Of both models, and of the steps that were profiled before."""
    profiled = [(model, row) for model, row in ROWS if "kernels" in row]
    assert [model for model, _ in profiled] == list(CONFIGS)
    percents = []
    for _, row in profiled + [("20b", row) for row in RECORD["profiles"]["rows"]]:
        share = sum(kernel["us"] for kernel in row["kernels"]) / (1e3 * row["ms"])
        assert 0.9 < share <= 1, row["what"]
        percents.append(f"{100 * share:.0f} %")
    assert "{} (20b) and {} (120b) of a step".format(*percents) in WORDS


# Rows of the kernels' page: what the kernels' names begin with.
PARTS = {
    "experts: gate_up": ("experts_gate_up",),
    "experts: down": ("experts_down",),
    "experts: choice, schedule, order of x, combine": (
        "routing_",
        "experts_combine",
        "input_transpose_fusion",
    ),
    "qkv and out, with norm, bias, residual": ("linear_", "fusion_133"),
    "unembedding (XLA)": ("gemm_fusion_dot",),
    "attention, with rotation and cache": ("attention_",),
    "norm and router": ("norm_router",),
}


def test_kernels_of_a_step():
    step = section("kernels/README.md", "## Results: a step of the whole model")
    rows = table(step, "| | 20b, 1 row")
    profiled = [row for _, row in ROWS if "kernels" in row] + RECORD["profiles"]["rows"][:1]
    assert [(row["what"], row["batch"]) for row in profiled] == [
        ("decode", 1),
        ("decode", 1),
        ("decode", 32),
    ]
    for column, row in enumerate(profiled):
        kernels, known = row["kernels"], 0.0
        for name, starts in PARTS.items():
            us = sum(k["us"] for k in kernels if k["name"].startswith(starts))
            known += us
            cell = rows[name][column]
            assert (us == 0) if cell.startswith("in ") else number(cell) == near(us), name
        total, launches = (sum(k[key] for k in kernels) for key in ("us", "launches"))
        assert number(rows["the rest: embedding, sampling, copies"][column]) == near(total - known)
        us, count = rows["kernels"][column].removesuffix(" launches").split(", ")
        assert number(us) == near(total) and int(count) == round(launches)
        assert number(rows["the step"][column]) == near(1e3 * row["ms"])


def number(text: str) -> float:
    return float(text.replace(",", "").replace("*", ""))


def near(us: float):
    """As it is printed, to a tenth."""
    return pytest.approx(us, abs=0.051)


def layer_us(us: float) -> str:
    return f"{us:,.1f}" if us < 1000 else f"{us:,.0f}"


@pytest.mark.parametrize("model", CONFIGS)
def test_one_layer_of_experts(model):
    results = section("kernels/README.md", "## Results: experts")
    rows = table(results, f"| {model}, tokens |")
    recorded = {row["shape"]: row for row in EXPERTS["rows"]}
    ours = {name for name, row in rows.items() if row[1] != "-"}
    assert ours == {name.split("/")[1] for name in recorded if name.split("/")[0] == model}
    for tokens in ours:
        row = recorded[f"{model}/{tokens}"]
        floor, runs, _, _, rival, bars = rows[tokens]
        kind, us, percent = runs.replace("(", "").replace(")", "").split()
        # Mosaic rounds its rows to bfloat16 before they are added up: that error tells which ran.
        assert kind == ("Mosaic" if row["relative_error"] > 2e-3 else "Triton")
        assert us == layer_us(row["us"])
        assert int(percent) == pytest.approx(row["floor_percent"], abs=0.501)
        assert floor == layer_us(row["floor_us"])
        assert rival == "-" or row["us"] < number(rival)
        for bar in bars.split(" / ") if bars else []:
            assert bar.startswith("**") == (row["us"] <= number(bar)), f"{model}, {tokens}: {bar}"
    assert f"commit {EXPERTS['commit']}" in results


def test_two_gpus():
    page = section("docs/sharding.md", "### What was measured")
    rows = table(page, "| | one GPU, ms |")
    two = [row for row in compared(TWO["rows"]) if row["gpus"] == 2]
    alone = {(model, *key(row)): row["ms"] for model, row in ROWS}
    assert len(rows) == len(two)
    for row in two:
        one_gpu = alone[row["model"], *key(row)]
        expected = [digits(one_gpu), digits(row["ms"]), f"{row['tokens_per_s']:,.0f}"]
        expected.append(f"{one_gpu / row['ms']:.2f}")
        busy = f"{row['collectives_ms']:.1f} ({100 * row['share']:.0f} %)"
        expected.append("-" if row["what"] == "decode" else busy)
        assert rows[f"{label(row['model'], row)}, `{row['mesh']}`"] == expected
    assert f"commit {TWO['commit']}" in page

    # One row on expert=2: milliseconds more than alone, and microseconds of them a sum.
    decode = {r["model"]: r for r in two if r["mesh"] == "expert=2" and r["what"] == "decode"}
    more = {m: r["ms"] - alone[m, *key(r)] for m, r in decode.items()}
    twice = {m: 2 * CONFIGS[m].layers for m in CONFIGS}  # sums
    each = {m: 1e3 * more[m] / twice[m] for m in CONFIGS}
    words = " ".join(page.split())
    assert f"{more['20b']:.2f} (20b) and {more['120b']:.2f} ms (120b) more than one GPU" in words
    assert f"over {twice['20b']} and {twice['120b']} sums" in words
    assert f"{each['20b']:.0f} and {each['120b']:.0f} us a sum" in words
    # Prefill: float32 sums of all but the last layer, and the embedding's in bfloat16.
    for row in two:
        if row["what"] == "prefill" and row["mesh"] == "expert=2":
            sums = row["collectives"] - 1
            moved = (4 * sums + 2) * row["context"] * CONFIGS[row["model"]].embed
            assert f"{sums:.0f} ({row['model']})" in words
            assert moved / row["collectives_ms"] / 1e6 == pytest.approx(270, rel=0.02)
            assert "at 270 GB/s" in words
            rest = row["ms"] - row["collectives_ms"]
            percent = 100 * rest / alone[row["model"], *key(row)]
            if row["model"] == "20b":
                assert f"20b took {rest:.1f} ms, {percent:.0f} % of one GPU's" in words

    speedup = {(r["model"], r["what"]): f"{r['speedup']:.2f}" for r in two if r["mesh"][0] == "e"}
    assert "prefill of 8192 tokens is {} (20b) and {} (120b) times as fast".format(
        *(speedup[model, "prefill"] for model in CONFIGS)
    ) in WORDS  # fmt: skip
    assert "one row is slower, {} and {} times".format(
        *(speedup[model, "decode"] for model in CONFIGS)
    ) in WORDS  # fmt: skip


def key(row: dict) -> tuple:
    return row["what"], row["batch"], row["context"]
