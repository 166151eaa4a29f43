"""gptoss-jax parity: the same checkpoint here and in PyTorch, compared layer by layer."""

import click

from .common import BACKENDS, DTYPES, Where, json_option, say_json, tell, where_options


@click.command("parity")
@click.argument("path", default="tiny")
@click.option("--length", "lengths", type=click.IntRange(min=1), multiple=True, metavar="N")
@click.option("--new-tokens", type=click.IntRange(min=0), default=16, show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--experts", type=click.Choice(("packed", "dense")))
@click.option("--backend", type=click.Choice(BACKENDS))
@click.option("--device", default="cpu", show_default=True, help="The reference's, for torch.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random tokens.")
@where_options
@json_option
def command(path: str, lengths: tuple[int, ...], where: Where, as_json: bool, **how):
    """Compare the checkpoint at PATH (default: tiny) with PyTorch's model.

    The reference is transformers for Hugging Face's layouts, OpenAI's own model for original/.
    Exit code 1 where the two differ by more than rounding.
    """
    with where.running(path) as mesh:
        from gptoss_jax.parity import parity
        from gptoss_jax.sharding import distributed

        if mesh is not None:
            how["mesh"] = mesh
        if distributed.is_first():
            how["progress"] = tell
        report = parity(path, lengths=lengths or None, **how)
        if distributed.is_first() and as_json:
            say_json(report.to_json())
        elif distributed.is_first():
            click.echo(report.table())
    if report.problems:
        raise ValueError(f"{path} differs from {report.reference}: {report.problems[0]}")
