"""What a checkpoint says about its tokens: which end a turn, and how many have a text."""

import os
from pathlib import Path

from ..errors import CheckpointError
from ..text import Tokenizer, harmony
from .files import read_json
from .layouts import Checkpoint

GENERATION = "generation_config.json"


def side_folder(found: Checkpoint) -> Path:
    """Where tokenizer and generation_config lie: for original/, in the folder above."""
    folder = found.folder
    above = found.layout == "original" and folder.name == "original"
    return folder.parent if above and not (folder / "tokenizer.json").is_file() else folder


def tokens(found: Checkpoint) -> tuple[tuple[int, ...], int | None]:
    """The union of all stop tokens, and the number of ids that have a text (None: not known).

    Stops: eos of config.json and of generation_config.json, and Harmony's by their names in
    tokenizer.json. Raises CheckpointError for files that are broken or disagree with the config.
    """
    folder, config = side_folder(found), found.config
    problems, more, tokenizer = [], [], None
    try:
        more = _ids(read_json(folder / GENERATION))
    except FileNotFoundError:
        pass
    except ValueError as e:
        problems.append(str(e))
    if os.path.lexists(folder / "tokenizer.json"):  # a link that leads nowhere is no missing file
        try:
            tokenizer = Tokenizer.load(folder)
        except ValueError as e:
            problems.append(str(e))
    if tokenizer is not None and tokenizer.size > config.vocab:
        problems.append(
            f"tokenizer.json has ids up to {tokenizer.size - 1}; vocab_size is {config.vocab}."
        )
    if beyond := [i for i in (*config.eos, *more) if i >= config.vocab]:
        problems.append(f"eos_token_id {beyond} lies outside vocab_size {config.vocab}.")
    if problems:
        raise CheckpointError(found.folder, problems)
    stops = harmony.stop_tokens(tokenizer, config.eos, more)
    return stops, tokenizer and tokenizer.size


def _ids(generation) -> list[int]:
    if not isinstance(generation, dict):
        raise ValueError(f"{GENERATION} must hold a JSON object.")
    value = generation.get("eos_token_id")
    listed = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in listed):
        raise ValueError(f"{GENERATION}: eos_token_id must be token ids; got {value!r:.80}.")
    return listed
