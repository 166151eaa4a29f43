"""gptoss-jax generate: continues text or ids, one prompt or many."""

import json
import sys
from typing import Any

import click

from .common import (
    ModelOptions,
    SamplingOptions,
    Where,
    json_option,
    model_options,
    sampling_options,
    say_json,
    waited,
    waiting,
    where_options,
)


def _ids(ctx, param, texts: tuple[str, ...]) -> list[list[int]]:
    lists = []
    for text in texts:
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() and len(part) < 19 for part in parts):
            raise click.BadParameter(f"{text!r} is not a list of ids like 1,2,3.")
        lists.append([int(part) for part in parts])
    return lists


@click.command("generate")
@click.argument("prompt", required=False)
@model_options
@where_options
@click.option(
    "--ids", multiple=True, callback=_ids, metavar="1,2,3", help="Token ids; repeat for a batch."
)
@click.option(
    "--input",
    "source",
    metavar="FILE|-",
    help="One prompt a line; a .jsonl file holds a string or a list of ids a line. - is stdin.",
)
@sampling_options(max_new_tokens=128)
@click.option("--logprobs", is_flag=True, help="Add the tokens' log probabilities to the JSON.")
@json_option
def command(
    prompt: str | None,
    ids: list[list[int]],
    source: str | None,
    how: ModelOptions,
    where: Where,
    sampling: SamplingOptions,
    logprobs: bool,
    as_json: bool,
):
    """Continue PROMPT, --ids, or every line of --input."""
    if sum((prompt is not None, bool(ids), source is not None)) != 1:
        raise click.UsageError("give one of PROMPT, --ids and --input.")
    if logprobs and not as_json:
        raise click.UsageError("--logprobs goes with --json.")
    prompts: list[str | list[int]] = [prompt] if prompt is not None else list(ids)
    if source is not None:
        prompts = _read(source)

    with where.running(how.model) as mesh:
        _run(prompts, how, mesh, sampling, logprobs, as_json)


def _run(prompts, how: ModelOptions, mesh, sampling: SamplingOptions, logprobs, as_json):
    import gptoss_jax as gj
    from gptoss_jax.sharding import distributed

    tokenizer = _tokenizer(how.model, needed=any(isinstance(p, str) for p in prompts))
    rows = [tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
    if not all(rows):
        raise ValueError(f"prompt {rows.index([]) + 1} of {len(rows)} is empty.")
    model = how.load(mesh)
    keywords = sampling.keywords(len(rows))

    if as_json:
        with waiting("generating"):
            out = gj.generate(model, rows, logprobs=logprobs, **keywords)
        texts = [None if tokenizer is None else tokenizer.decode(row) for row in out.tokens]
        result: dict[str, Any] = {
            "tokens": out.tokens,
            "texts": texts,
            "finish_reasons": out.finish_reasons,
        }
        if logprobs:
            result["logprobs"] = out.logprobs
        if distributed.is_first():
            say_json(result)
    elif len(rows) == 1:
        _show_as_it_comes(waited(gj.stream(model, rows[0], **keywords)), tokenizer)
    else:
        with waiting("generating"):
            out = gj.generate(model, rows, **keywords)
        for i, (prompt, row) in enumerate(zip(prompts, out.tokens, strict=True), 1):
            if distributed.is_first():  # on stderr: texts hold newlines, and stdout is theirs
                click.echo(
                    f"[{i}] {prompt if isinstance(prompt, str) else _written(prompt)}", err=True
                )
            distributed.say(_written(row) if tokenizer is None else tokenizer.decode(row))


def _show_as_it_comes(steps, tokenizer) -> None:
    from gptoss_jax.sharding import distributed
    from gptoss_jax.text import StreamDecoder

    decoder = None if tokenizer is None else StreamDecoder(tokenizer)
    before = ""
    for step in steps:
        if step.token is None:
            break
        text = before + str(step.token) if decoder is None else decoder.push(step.token)
        before = "," if decoder is None else ""
        distributed.say(text, end="", flush=True)
    distributed.say("" if decoder is None else decoder.flush())


def _tokenizer(path: str, *, needed: bool):
    """The model's tokenizer, or None where there is none and ids suffice."""
    import gptoss_jax as gj

    try:
        return gj.Tokenizer.load(path)
    except ValueError:
        if needed:
            raise
        return None


def _read(source: str) -> list[str | list[int]]:
    if source == "-" and sys.stdin is None:
        raise ValueError("there is no standard input to read.")
    with click.open_file(source, encoding="utf-8") as file:
        lines = [(n, line.rstrip("\r\n")) for n, line in enumerate(file, 1) if line.strip()]
    if not lines:
        raise ValueError(f"{source} holds no prompt: one a line is expected.")
    if not source.endswith(".jsonl"):
        return [line for _, line in lines]
    return [_from_json(line, f"{source} line {n}") for n, line in lines]


def _from_json(line: str, where: str) -> str | list[int]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if isinstance(value, str) or (isinstance(value, list) and all(type(i) is int for i in value)):
        return value
    raise ValueError(f"{where} must be a string or a list of token ids; it is {line:.60}")


def _written(ids: list[int]) -> str:
    return ",".join(map(str, ids))
