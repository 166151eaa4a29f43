"""Fetches a published checkpoint into Hugging Face's local cache."""

from pathlib import Path

from ..errors import CheckpointError
from ..places import REPOSITORY
from .layouts import open_checkpoint

# The repositories of OpenAI also hold original/ and metal/, two more copies of the weights.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "LICENSE*", "USAGE_POLICY*"]
_DEEPER = ["*/*"]


def download(name: str, *, revision: str | None = None) -> Path:
    """Downloads the top folder of a repository such as openai/gpt-oss-20b; returns its folder.

    `load(name)` finds it from then on. Files that are there already are not fetched again. Needs
    the optional extra `hub`. Raises CheckpointError, in one line, for whatever goes wrong.
    """
    if not REPOSITORY.fullmatch(name):
        raise CheckpointError(name, ["not a repository's name; they look like openai/gpt-oss-20b."])
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
    except ImportError:
        raise CheckpointError(
            name, ["downloading needs huggingface_hub: pip install 'gptoss_jax[hub]'."]
        ) from None
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=_WANTED, ignore_patterns=_DEEPER
        )
    except RepositoryNotFoundError as e:
        raise CheckpointError(
            name, ["no such repository on the hub, or it needs `hf auth login`."]
        ) from e
    except HfHubHTTPError as e:
        raise CheckpointError(name, [f"the hub refused: {_first_line(e)}"]) from e
    except Exception as e:  # whatever the HTTP client of the day raises without a network
        raise CheckpointError(
            name,
            [
                f"cannot be downloaded ({type(e).__name__}: {_first_line(e)}); is there a network? "
                "A folder copied from elsewhere can be given by its path."
            ],
        ) from e
    open_checkpoint(folder).require()
    return Path(folder)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
