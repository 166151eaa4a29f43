"""gptoss-jax export: a checkpoint in another of the published layouts."""

import click

from gptoss_jax.places import find, vacant


@click.command("export")
@click.argument("src")
@click.argument("dst")
@click.option("--format", type=click.Choice(("mxfp4", "bf16", "original")), required=True)
@click.option("--max-shard-size", default="4.8GB", show_default=True, metavar="SIZE")
@click.option("--allow-zero", is_flag=True, help="Weights that are all zero are no problem.")
def command(src: str, dst: str, format: str, max_shard_size: str, allow_zero: bool):
    """Write the checkpoint SRC as the new folder DST."""
    find(src)  # before the seconds that importing JAX takes
    vacant(dst)
    from gptoss_jax.checkpoint import export

    written = export(src, dst, format=format, max_shard_size=max_shard_size, allow_zero=allow_zero)
    click.echo(str(written))
