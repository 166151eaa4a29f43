"""gptoss-jax train: trains as a TOML file says."""

import click

from .common import compilation_cache_option, json_option, say_json, use_compilation_cache


@click.command("train")
@click.argument("config", metavar="CONFIG.toml")
@compilation_cache_option
@json_option
def command(config: str, compilation_cache: str | None, as_json: bool):
    """Train as CONFIG.toml says, going on from its newest checkpoint if there is one."""
    open(config, "rb").close()  # is it there? asked before the seconds that importing JAX takes
    use_compilation_cache(compilation_cache)
    from gptoss_jax.train import run

    result = run(config)
    if as_json:
        say_json({"step": result.step, **result.metrics})
    else:
        listed = ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
        click.echo(f"step {result.step}: {listed}")
