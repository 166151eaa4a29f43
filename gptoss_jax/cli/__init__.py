"""The command line, `gptoss-jax`. Each command lies in a module of its own, loaded when it runs.

Exit codes: 0; 1 bad data, with one line on stderr; 2 bad usage; 130 interrupted.
"""

import contextlib
import importlib
import os
import sys

import click

COMMANDS = ("generate", "chat", "inspect", "parity", "download", "bench", "export", "train")


INTERRUPTED = 130  # what a shell gives for a program that SIGINT ended


class BadData(click.ClickException):
    """One line on stderr and exit code 1."""

    exit_code = 1

    def format_message(self) -> str:
        return " ".join(self.message.split())

    def show(self, file=None) -> None:
        click.echo(f"gptoss-jax: {self.format_message()}", err=True)


class Main(click.Group):
    """Finds commands by name, and turns errors about data into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        return importlib.import_module(f".{name}", __package__).command

    def invoke(self, ctx: click.Context):
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt:
            # At once: threads that compile crash an interpreter that is taken down beside them.
            with contextlib.suppress(OSError):  # nobody may read any more
                click.echo("gptoss-jax: interrupted", err=True)
                sys.stdout.flush()
            os._exit(INTERRUPTED)
        except (ValueError, OSError, NotImplementedError, ImportError) as error:
            raise BadData(str(error) or type(error).__name__) from error
        except RuntimeError as error:
            if _is_jax_error(error):  # out of memory, a peer that died
                raise BadData(str(error).strip().splitlines()[0]) from error
            raise


def _is_jax_error(error: RuntimeError) -> bool:
    jax = sys.modules.get("jax")  # not imported for the sake of asking
    return jax is not None and isinstance(error, jax.errors.JaxRuntimeError)


@click.group(
    cls=Main,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="gptoss_jax", prog_name="gptoss-jax")
def main():
    """gpt-oss in JAX: text, checkpoints, comparisons, measurements, training."""
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal that knows no emoji shows a question mark, and the answer goes on.
        sys.stdout.reconfigure(errors="replace")
