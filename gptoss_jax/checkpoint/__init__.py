"""Checkpoints in the published layouts: read strictly, looked into, written back."""

from ..errors import CheckpointError
from ..places import find
from .config_json import config_from_json, config_to_hf, config_to_original
from .download import download
from .export import export, export_model
from .inspect import Report, inspect
from .layouts import Checkpoint, open_checkpoint
from .load import load
from .safetensors_file import count_bytes

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Report",
    "config_from_json",
    "config_to_hf",
    "config_to_original",
    "count_bytes",
    "download",
    "export",
    "export_model",
    "find",
    "inspect",
    "load",
    "open_checkpoint",
]
