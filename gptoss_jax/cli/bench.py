"""gptoss-jax bench: speed of the whole model beside what the memory's speed allows."""

from pathlib import Path

import click

from .common import Where, json_option, say_json, tell, where_options

RANDOM = ("20b", "120b")  # no checkpoints: shapes, with random weights


def _numbers(ctx, param, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of whole numbers like 1,8,32.")
    return [int(part) for part in parts]


@click.command("bench")
@click.option("--model", default="tiny", show_default=True, metavar="tiny|20b|120b|PATH")
@click.option("--batch", "batches", callback=_numbers, default="1", show_default=True)
@click.option("--context", "contexts", callback=_numbers, default="1024", show_default=True)
@click.option("--plot", metavar="FILE", help="Also draw speed against the floor.")
@where_options
@json_option
def command(model: str, batches, contexts, plot: str | None, where: Where, as_json: bool):
    """Measure decoding and prefill; 20b and 120b have random weights of the published shapes.

    --batch and --context take lists: every pair is measured.
    """
    if plot is not None and not Path(plot).absolute().parent.is_dir():
        raise ValueError(f"--plot {plot}: no such folder.")
    with where.running(*(() if model in RANDOM else (model,))) as mesh:
        from gptoss_jax import bench
        from gptoss_jax.sharding import distributed

        first = distributed.is_first()
        report = bench.run(
            model,
            batches=batches,
            contexts=contexts,
            plot=plot if first else None,
            mesh=mesh,
            progress=tell if first else lambda line: None,
        )
        if first and as_json:
            say_json(report.to_json())
        elif first:
            click.echo(str(report))
