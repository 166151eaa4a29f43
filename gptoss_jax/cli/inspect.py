"""gptoss-jax inspect: what a checkpoint is, and all that is wrong with it."""

import click

from gptoss_jax.places import find

from .common import json_option, say_json


@click.command("inspect")
@click.argument("path", default="tiny")
@click.option("--allow-zero", is_flag=True, help="Weights that are all zero are no problem.")
@json_option
def command(path: str, allow_zero: bool, as_json: bool):
    """Layout, config, tensors and problems of the checkpoint at PATH (default: tiny).

    Reads every value but builds no model. Exit code 1 where the checkpoint cannot be loaded.
    """
    find(path)  # before the seconds that importing JAX takes
    from gptoss_jax.checkpoint import inspect

    report = inspect(path, allow_zero=allow_zero)
    if as_json:
        say_json(report.to_json())
    else:
        click.echo(str(report))
    if not report.ok:
        more = len(report.problems) - 1
        raise ValueError(
            f"{report.path} cannot be loaded: {report.problems[0]}"
            + (f" (and {more} more)" if more else "")
        )
