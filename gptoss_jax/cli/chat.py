"""gptoss-jax chat: a conversation in Harmony, interactive or one question."""

import sys

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
    where_options,
)

EFFORTS = ("low", "medium", "high")
_HELP = "/reasoning low|medium|high, /reset forgets the conversation, /quit (or Ctrl-D) ends it."


@click.command("chat")
@click.argument("prompt", required=False)
@model_options
@where_options
@click.option("--reasoning", type=click.Choice(EFFORTS), default="medium", show_default=True)
@click.option("--system", metavar="TEXT", help="Instructions that hold for the conversation.")
@sampling_options(max_new_tokens=1024)
@json_option
def command(
    prompt: str | None,
    reasoning: str,
    system: str | None,
    how: ModelOptions,
    where: Where,
    sampling: SamplingOptions,
    as_json: bool,
):
    """Ask PROMPT, or talk.

    Asked once, the answer alone goes to stdout and what the model thinks before it to stderr. With
    --json: final (null where it was cut short before), analysis, finish_reason and tokens.
    """
    if as_json and prompt is None:
        raise click.UsageError("--json answers one PROMPT.")
    if prompt is None and sys.stdin is None:
        raise ValueError("there is no standard input to talk over; give a PROMPT.")
    if prompt is None and where.several:
        raise click.UsageError("several processes answer one PROMPT; they cannot share a keyboard.")
    with where.running(how.model) as mesh:
        talk = Talk(how, mesh, sampling, reasoning, system)
        if prompt is None:
            talk.interactive()
        else:
            talk.once(prompt, as_json)


class Talk:
    """A model, its tokenizer, and the messages so far."""

    def __init__(self, how: ModelOptions, mesh, sampling: SamplingOptions, reasoning, system):
        import gptoss_jax as gj

        self.tokenizer = gj.Tokenizer.load(how.model)
        self.model = how.load(mesh)
        self.sampling, self.reasoning, self.system = sampling, reasoning, system
        self.messages: list = []
        self.reset()

    def reset(self) -> None:
        # In chat APIs "system" is what Harmony calls the developer's message.
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def once(self, prompt: str, as_json: bool) -> None:
        from gptoss_jax.sharding import distributed

        if not prompt.strip():
            raise ValueError("the question is empty.")
        talks = distributed.is_first()
        show = Show(thinking=sys.stderr, answer=sys.stdout, quiet=as_json or not talks)
        tokens, parsed, finish = self.answer(prompt, show)
        if not talks:
            return
        if as_json:
            final = [m.content for m in parsed if m.channel == "final"]
            thought = [m.content for m in parsed if m.channel == "analysis"]
            say_json(
                {
                    "final": "".join(final) if final else None,
                    "analysis": "\n".join(thought) if thought else None,
                    "finish_reason": finish,
                    "tokens": tokens,
                }
            )
        elif finish == "length":
            click.echo(f"(cut short after {len(tokens)} tokens; see --max-new-tokens)", err=True)

    def interactive(self) -> None:
        click.echo(_HELP, err=True)
        with_history()
        while True:
            try:
                line = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                click.echo()
                return
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self.obey(line)
            elif line:
                self.turn(line)

    def turn(self, line: str) -> None:
        """One question; Ctrl-C, or a conversation too long, leaves the messages as they were."""
        before = list(self.messages)
        show = Show(thinking=sys.stdout, answer=sys.stdout)
        try:
            _, _, finish = self.answer(line, show)
            if finish == "length":
                click.echo("(cut short; see --max-new-tokens)", err=True)
        except KeyboardInterrupt:
            self.messages = before
            show.end()
            click.echo("(stopped; the question is forgotten)", err=True)
        except ValueError as error:
            self.messages = before
            show.end()
            click.echo(f"gptoss-jax: {error}", err=True)

    def obey(self, line: str) -> None:
        words = line.split()
        if words == ["/reset"]:
            self.reset()
        elif words[0] == "/reasoning" and len(words) == 2 and words[1] in EFFORTS:
            self.reasoning = words[1]
        else:
            click.echo(_HELP, err=True)

    def answer(self, text: str, show: "Show"):
        """(tokens, messages, finish reason) of the next turn, which joins the conversation."""
        import gptoss_jax as gj

        self.messages.append({"role": "user", "content": text})
        ids = gj.harmony.render(self.messages, self.tokenizer, reasoning=self.reasoning)
        keywords = self.sampling.keywords()
        left = self.model.config.max_context - len(ids)
        if left < 1:
            raise ValueError(
                f"the conversation has {len(ids)} tokens, the model's context "
                f"{self.model.config.max_context}. Start anew (/reset)."
            )
        keywords["max_new_tokens"] = min(keywords["max_new_tokens"], left)
        parser = gj.harmony.Parser(self.tokenizer)
        tokens, finish = [], None
        for step in waited(gj.stream(self.model, ids, **keywords)):
            finish = step.finish_reason
            if step.token is not None:
                tokens.append(step.token)
                show.deltas(parser.feed(step.token))
        show.deltas(parser.finish())
        show.end()
        parsed = parser.messages
        self.messages.extend(parsed)
        return tokens, parsed, finish


class Show:
    """Writes thinking and answer apart, as they come."""

    def __init__(self, *, thinking, answer, quiet: bool = False):
        self.thinking, self.answer, self.quiet = thinking, answer, quiet
        self.open = None  # the stream whose last line is unfinished
        self.channel = None

    def deltas(self, deltas) -> None:
        for delta in deltas:
            if self.quiet or not delta.text:
                continue
            final = delta.header.channel == "final"
            file = self.answer if final else self.thinking
            if self.channel != (delta.index, final):
                self.end()
                self.channel = (delta.index, final)
            click.secho(delta.text, file=file, nl=False, dim=not final)
            file.flush()
            self.open = file

    def end(self) -> None:
        if self.open is not None:
            click.echo(file=self.open)
        self.open = self.channel = None


def with_history() -> None:
    """Arrow keys and line editing in `input`, where Python has them."""
    try:
        import readline  # noqa: F401
    except ImportError:
        pass
