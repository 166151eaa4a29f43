"""The command line through click's runner, on a tiny checkpoint in the published layout."""

import io
import json
import re
import shutil
import sys
import time

import click
import jax
import pytest
from checkpoints import CALL, ENDOFTEXT, RETURN, TINY, make
from click.testing import CliRunner

import gptoss_jax as gj
from gptoss_jax import bench, compile_cache, parity
from gptoss_jax.cli import COMMANDS, common, main

SMALL = TINY.replace(layers=1, sliding=(False,), max_context=512)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "checkpoint"
    make(folder, SMALL, tokenizer=True)
    return folder


@pytest.fixture
def gptoss(monkeypatch):
    """Runs the command line; `gptoss(...)` has exit_code, stdout, stderr."""
    monkeypatch.setenv("GPTOSS_COMPILATION_CACHE", "off")
    runner = CliRunner()

    def run(*args, stdin=None):
        return runner.invoke(main, [str(a) for a in args], input=stdin)

    return run


def ok(result):
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def bad(result, code, *words):
    """The exit code, nothing on stdout, and (for bad data) one line on stderr with these words."""
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stdout == ""
    if code == 1:
        assert result.stderr.count("\n") == 1 and result.stderr.startswith("gptoss-jax: ")
    for word in words:
        assert word in result.stderr


# --- generate ------------------------------------------------------------------------------------

# One token a prompt ("H" is 72): no prefill to compile.
FLAGS = ("--dtype", "float32", "--max-new-tokens", 6, "--temperature", 0)


def test_generate_json_equals_the_library(gptoss, checkpoint):
    model = gj.load(checkpoint, dtype="float32")
    sampler = gj.Sampler(temperature=0.0)
    tokenizer = gj.Tokenizer.load(checkpoint)
    common = ["generate", "--model", checkpoint, "--json", *FLAGS]
    for ids, logprobs in (([[72], [9]], False), ([[72]], True)):
        out = gj.generate(model, ids, max_new_tokens=6, sampler=sampler, logprobs=logprobs)
        right = {
            "tokens": out.tokens,
            "texts": [tokenizer.decode(row) for row in out.tokens],
            "finish_reasons": out.finish_reasons,
        }
        flags = [part for row in ids for part in ("--ids", row[0])]
        if logprobs:
            right["logprobs"] = out.logprobs
            flags.append("--logprobs")
        assert json.loads(ok(gptoss(*common, *flags)).stdout) == right


def test_generate_takes_text_files_and_stdin(gptoss, checkpoint, tmp_path):
    common = ["generate", "--model", checkpoint, *FLAGS]
    by_argument = json.loads(ok(gptoss(*common, "H", "--json")).stdout)
    file = tmp_path / "a.txt"
    file.write_text("H\n\nH\n")
    by_file = json.loads(ok(gptoss(*common, "--input", file, "--json")).stdout)
    assert by_file["tokens"] == by_argument["tokens"] * 2
    by_stdin = json.loads(ok(gptoss(*common, "--input", "-", "--json", stdin="H\nH\n")).stdout)
    assert by_stdin == by_file
    lines = tmp_path / "a.jsonl"
    lines.write_text('"H"\n[72]\n')
    assert json.loads(ok(gptoss(*common, "--input", lines, "--json")).stdout) == by_file
    # Without --json one prompt is streamed, several are written one a line.
    text = by_argument["texts"][0]
    assert ok(gptoss(*common, "H")).stdout == text + "\n"
    both = ok(gptoss(*common, "--input", file))
    assert both.stdout == (text + "\n") * 2
    assert [line for line in both.stderr.splitlines() if line[:1] == "["] == ["[1] H", "[2] H"]


def test_generate_works_on_ids_where_there_is_no_tokenizer(gptoss, checkpoint, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare, ignore=shutil.ignore_patterns("tokenizer.json"))
    common = ["generate", "--model", bare, *FLAGS]
    result = json.loads(ok(gptoss(*common, "--ids", "72", "--json")).stdout)
    assert result["texts"] == [None]
    written = ok(gptoss(*common, "--ids", "72")).stdout
    assert [int(token) for token in written.split(",")] == result["tokens"][0]
    bad(gptoss(*common, "H"), 1, "tokenizer.json")


def test_generate_on_a_mesh(gptoss, checkpoint):
    args = ["generate", "--model", checkpoint, "--ids", "72", "--ids", "9", "--json", *FLAGS]
    alone = json.loads(ok(gptoss(*args)).stdout)
    spread = gptoss(*args, "--mesh", "data=2,expert=4", "--dispatch", "all_reduce")
    assert json.loads(ok(spread).stdout) == alone


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--ids", "1,x"], ["1,x"]),
        (["--ids", ""], ["--ids"]),
        (["--ids", "1," + "9" * 5000], ["--ids"]),
        ([], ["PROMPT"]),
        (["Hi", "--ids", "1"], ["one of"]),
        (["Hi", "--max-new-tokens", "0"], ["--max-new-tokens"]),
        (["Hi", "--temperature", "-1"], ["--temperature"]),
        (["Hi", "--temperature", "nan"], ["--temperature"]),
        (["Hi", "--temperature", "inf"], ["--temperature"]),
        (["Hi", "--top-p", "1.5"], ["--top-p"]),
        (["Hi", "--top-p", "nan"], ["--top-p"]),
        (["Hi", "--top-k", "0"], ["--top-k"]),
        (["Hi", "--repetition-penalty", "1e-7"], ["--repetition-penalty"]),
        (["Hi", "--seed", "-1"], ["--seed"]),
        (["Hi", "--dtype", "float16"], ["float16"]),
        (["Hi", "--mesh", "experts=2"], ["experts=2"]),
        (["Hi", "--mesh", ""], ["names no axis"]),
        (["Hi", "--dispatch", "ring"], ["ring"]),
        (["Hi", "--no-such-option"], ["--no-such-option"]),
        (["Hi", "--logprobs"], ["--json"]),
        (["Hi", "--distributed"], ["--mesh"]),
        (["Hi", "--coordinator", "h:1"], ["--process-id"]),
        (
            "Hi --coordinator h:1 --processes 2 --process-id 2 --mesh data=2".split(),
            ["--processes minus 1"],
        ),
        (
            "Hi --coordinator h:1 --processes 2 --process-id 0 --distributed --mesh data=2".split(),
            ["not both"],
        ),
    ],
)
def test_bad_usage_is_2(gptoss, args, words):
    bad(gptoss("generate", *args), 2, *words)


def test_bad_data_is_1_with_one_line(gptoss, checkpoint, tmp_path):
    run = ["generate", "--model", checkpoint, *FLAGS]
    bad(gptoss(*run, "--ids", "288"), 1, "prompts[0][0] = 288", "0..287")
    bad(gptoss(*run, "--ids", "1", "--max-new-tokens", 512), 1, "context of 512")
    bad(gptoss(*run, "--input", tmp_path / "none.txt"), 1, "none.txt")
    bad(gptoss(*run, "--input", "-", stdin="\n"), 1, "no prompt")
    (tmp_path / "a.jsonl").write_text('"Hi"\n{"text": "Hi"}\n')
    bad(gptoss(*run, "--input", tmp_path / "a.jsonl"), 1, "line 2")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    bad(gptoss(*run, "--input", tmp_path / "c.txt"), 1, "utf-8")
    bad(gptoss(*run, "--input", tmp_path), 1, str(tmp_path))
    bad(gptoss(*run, ""), 1, "prompt 1 of 1 is empty")
    (tmp_path / "b.jsonl").write_text('"Hi"\n[]\n')
    bad(gptoss(*run, "--input", tmp_path / "b.jsonl"), 1, "prompt 2 of 2 is empty")
    bad(gptoss("generate", "Hi", "--model", tmp_path), 1, str(tmp_path))
    bad(gptoss("generate", "Hi", "--model", ""), 1, "a path or a name")
    bad(gptoss(*run, "--ids", "1", "--mesh", "data=16"), 1, "16 devices", "8")
    bad(gptoss(*run, "--ids", "1", "--mesh", "expert=8"), 1, "12 experts")


# --- chat ----------------------------------------------------------------------------------------


@pytest.fixture
def scripted(monkeypatch, checkpoint):
    """`scripted(text, reason)`: what every answer will be, whatever the model; returns prompts."""
    tokenizer = gj.Tokenizer.load(checkpoint)
    prompts = []

    def script(text, reason="stop"):
        tokens = []
        for part in text.replace("<|", "\0<|").replace("|>", "|>\0").split("\0"):
            tokens += (
                [tokenizer.special[part]] if part in tokenizer.special else tokenizer.encode(part)
            )

        def stream(model, prompt, **keywords):
            prompts.append((tokenizer.decode(prompt), keywords))
            for i, token in enumerate(tokens):
                yield gj.generation.Step(token, None, reason if i == len(tokens) - 1 else None)

        monkeypatch.setattr(gj, "stream", stream)
        return prompts

    return script


ANSWER = (
    "<|channel|>analysis<|message|>Seven and\neight.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Fünfzehn: 15."
)


def test_chat_once_writes_the_answer_alone_and_thinking_to_stderr(gptoss, checkpoint, scripted):
    prompts = scripted(ANSWER)
    args = ["chat", "7 + 8?", "--model", checkpoint]
    result = ok(gptoss(*args, "--reasoning", "low", "--system", "Be brief.", "--seed", 3))
    assert result.stdout == "Fünfzehn: 15.\n"
    assert "Seven and\neight.\n" in result.stderr
    prompt, keywords = prompts[0]
    assert "Reasoning: low" in prompt and "Be brief." in prompt and "7 + 8?" in prompt
    assert keywords["seeds"] == [3]
    # The context's rest, as that is less than --max-new-tokens.
    rest = gj.Tokenizer.load(checkpoint).encode(re.sub(r"<\|\w+\|>", "#", prompt))
    assert keywords["max_new_tokens"] == 512 - len(rest)

    data = json.loads(ok(gptoss(*args, "--json")).stdout)
    assert data["final"] == "Fünfzehn: 15." and data["analysis"] == "Seven and\neight."
    assert data["finish_reason"] == "stop" and len(data["tokens"]) > 30


def test_chat_cut_short_says_length_and_has_no_answer(gptoss, checkpoint, scripted):
    scripted("<|channel|>analysis<|message|>Hm", "length")
    args = ["chat", "7 + 8?", "--model", checkpoint]
    data = json.loads(ok(gptoss(*args, "--json")).stdout)
    assert data["final"] is None and data["analysis"] == "Hm" and data["finish_reason"] == "length"
    result = ok(gptoss(*args))
    assert result.stdout == "" and "cut short" in result.stderr


def test_chat_remembers_until_reset_and_obeys(gptoss, checkpoint, scripted):
    prompts = scripted("<|channel|>final<|message|>15.")
    talk = "7 + 8?\n/reasoning high\nplus 1?\n/nonsense\n/reset\nagain?\n/quit\nnever\n"
    result = ok(gptoss("chat", "--model", checkpoint, stdin=talk))
    assert result.stdout.count("15.") == 3
    first, second, third = (prompt for prompt, _ in prompts)
    assert "Reasoning: medium" in first
    assert "7 + 8?" in second and "15." in second and "Reasoning: high" in second
    assert "7 + 8?" not in third and "again?" in third


def test_ctrl_c_stops_an_answer_and_the_talk_goes_on(gptoss, checkpoint, scripted, monkeypatch):
    prompts = scripted("<|channel|>final<|message|>15.")
    whole, calls = gj.stream, []

    def interrupted(*args, **keywords):
        steps = whole(*args, **keywords)
        calls.append(1)
        for step in steps:
            if len(calls) == 1 and step.token == ord("1"):
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(gj, "stream", interrupted)
    result = ok(gptoss("chat", "--model", checkpoint, stdin="first?\nsecond?\n"))
    assert "stopped" in result.stderr and result.stdout.count("15.") == 1
    assert "first?" not in prompts[1][0]


def test_chat_with_the_model_itself(gptoss, checkpoint):
    """Random weights say nothing, but through every part that a real one goes."""
    data = json.loads(ok(gptoss("chat", "Hi", "--model", checkpoint, "--json", *FLAGS)).stdout)
    assert len(data["tokens"]) <= 6 and data["finish_reason"] in ("stop", "length")


def test_an_empty_question_is_bad_data(gptoss, checkpoint):
    bad(gptoss("chat", " ", "--model", checkpoint), 1, "the question is empty")


def test_a_conversation_beyond_the_context_is_bad_data(gptoss, checkpoint):
    bad(gptoss("chat", "x" * 600, "--model", checkpoint), 1, "context 512")


# --- the others ----------------------------------------------------------------------------------


def test_inspect(gptoss, checkpoint, tmp_path):
    report = json.loads(ok(gptoss("inspect", checkpoint, "--json")).stdout)
    assert report["layout"] == "hf-mxfp4" and report["problems"] == []
    assert set(report["stop_tokens"]) == {RETURN, ENDOFTEXT, CALL}
    assert "hf-mxfp4" in ok(gptoss("inspect", checkpoint)).stdout

    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[:-10])
    result = gptoss("inspect", broken, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"]
    assert result.stderr.count("\n") == 1 and "cannot be loaded" in result.stderr
    bad(gptoss("generate", "Hi", "--model", broken), 1)


def test_export_writes_a_folder_that_loads(gptoss, checkpoint, tmp_path):
    target = tmp_path / "dense"
    assert ok(gptoss("export", checkpoint, target, "--format", "bf16")).stdout == f"{target}\n"
    assert json.loads(ok(gptoss("inspect", target, "--json")).stdout)["layout"] == "hf-bf16"
    bad(gptoss("export", checkpoint, target, "--format", "bf16"), 1, str(target))
    bad(gptoss("export", checkpoint, target), 2, "--format")


def test_download_without_a_network_is_one_line(gptoss, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    bad(gptoss("download", "not a name"), 1, "openai/gpt-oss-20b")


def test_parity_and_train_name_what_is_missing(gptoss, tmp_path):
    bad(gptoss("parity", tmp_path / "none"), 1, "none")
    bad(gptoss("train", tmp_path / "none.toml"), 1, "none.toml")
    bad(gptoss("train"), 2, "CONFIG.toml")


@pytest.mark.parametrize("as_json", [False, True])
def test_bench_and_parity_pass_their_options_on(gptoss, monkeypatch, capsys, as_json):
    calls = []

    class Report:
        problems = ()

        def __init__(self, *args, **keywords):
            calls.append((args, keywords))

        def to_json(self):
            return {"rows": [1]}

        def __str__(self):
            return "a table"

        table = __str__

    monkeypatch.setattr(bench, "run", Report)
    monkeypatch.setattr(parity, "parity", Report)
    common_flags = ["--mesh", "expert=2"] + (["--json"] if as_json else [])
    flags = ["--model", "20b", "--batch", "1,8", "--context", "1024", "--plot", "a.png"]
    first = ok(gptoss("bench", *flags, *common_flags))
    flags = ["--length", 3, "--length", 9, "--dtype", "bfloat16", "--backend", "xla"]
    second = ok(gptoss("parity", "tiny", *flags, *common_flags))
    shown = '{"rows": [1]}\n' if as_json else "a table\n"
    assert (first.stdout, second.stdout) == (shown, shown)
    (args, keywords), (path, how) = calls
    assert keywords.pop("mesh").shape == how.pop("mesh").shape == dict(data=1, expert=2, tensor=1)
    assert args == ("20b",) and path == ("tiny",)
    for options in (keywords, how):
        options.pop("progress")("half of it is done")
    assert capsys.readouterr().err == "half of it is done\n" * 2
    assert keywords == {"batches": [1, 8], "contexts": [1024], "plot": "a.png"}
    assert how["lengths"] == (3, 9) and how["dtype"] == "bfloat16" and how["backend"] == "xla"
    bad(gptoss("bench", "--batch", "1,x"), 2, "1,x")
    bad(gptoss("bench", "--plot", "no/such/a.png"), 1, "no/such/a.png")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(gptoss, name):
    result = ok(gptoss(name, "--help"))
    assert "Usage:" in result.stdout
    assert isinstance(main.get_command(click.Context(main), name), click.Command)


def test_an_unknown_command_is_2(gptoss):
    bad(gptoss("serve"), 2, "serve")


def test_a_terminal_is_told_what_takes_long_and_a_file_is_not(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def told(stream, seconds):
        monkeypatch.setattr(sys, "stderr", stream)
        with common.waiting("reading"):
            time.sleep(seconds)
        return stream.getvalue()

    assert told(Terminal(), 1.2) == "\rreading 1 s \r\x1b[K"
    assert told(Terminal(), 0.05) == ""
    assert told(io.StringIO(), 1.2) == ""


def test_json_on_an_output_that_holds_ascii_alone(monkeypatch, capsysbinary):
    """And paths that are no text (a lone surrogate stands for a byte of them) can be written."""
    common.say_json({"é": "\udcff"})
    assert json.loads(capsysbinary.readouterr().out) == {"é": "\udcff"}
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    common.say_json(["é"])
    sys.stdout.flush()
    assert json.loads(written.getvalue()) == ["é"]


# --- the compilation cache -----------------------------------------------------------------------


@pytest.fixture
def restored():
    """The compilation cache's settings, put back afterwards."""
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()


def test_the_compilation_cache_holds_what_took_long(restored, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "_WORTH_KEEPING_S", 0.0)
    folder = gj.enable_compilation_cache(tmp_path / "programs")
    assert folder == tmp_path / "programs" and folder.is_dir()
    jax.jit(lambda x: x * 3 + 41)(2.0)
    assert list(folder.iterdir())


def test_the_cache_is_the_users_by_default_and_can_be_elsewhere_or_off(
    gptoss, restored, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.delenv("GPTOSS_COMPILATION_CACHE")
    failing = ["generate", "--ids", "1", "--model", tmp_path]  # a folder, but no checkpoint
    gptoss(*failing)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "user/gptoss_jax/programs")
    gptoss(*failing, "--compilation-cache", tmp_path / "mine")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    jax.config.update("jax_compilation_cache_dir", None)
    gptoss(*failing, "--compilation-cache", "off")
    assert jax.config.jax_compilation_cache_dir is None


def test_a_users_cache_that_cannot_be_is_done_without_and_a_named_one_is_not(
    gptoss, checkpoint, restored, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("GPTOSS_COMPILATION_CACHE")
    run = ["generate", "--ids", "72", "--model", checkpoint, *FLAGS]
    result = ok(gptoss(*run))
    assert "compiled programs are not kept" in result.stderr and result.stdout
    bad(gptoss(*run, "--compilation-cache", tmp_path / "file" / "x"), 1, "no compilation cache in")
