"""gptoss-jax download: a published checkpoint into Hugging Face's local cache."""

import click


@click.command("download")
@click.argument("name")
@click.option("--revision", help="A branch, tag or commit.")
def command(name: str, revision: str | None):
    """Fetch NAME (like openai/gpt-oss-20b) and print the folder it is in.

    Only the top folder's files: not original/ and metal/, which hold the weights again.
    """
    from gptoss_jax.checkpoint import download

    click.echo(str(download(name, revision=revision)))
