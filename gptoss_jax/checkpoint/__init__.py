"""Checkpoints in the published layouts: read strictly, looked into, written back."""

from .config_json import config_from_json, config_to_hf, config_to_original
from .errors import CheckpointError
from .files import find
from .layouts import Checkpoint, open_checkpoint
from .load import load
from .safetensors_file import count_bytes

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "config_from_json",
    "config_to_hf",
    "config_to_original",
    "count_bytes",
    "find",
    "load",
    "open_checkpoint",
]
