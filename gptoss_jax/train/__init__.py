"""Training: packed documents in, a checkpoint that `load` reads out.

run(path)   trains as a TOML file says; `gptoss-jax train CONFIG.toml`
train       the same function
"""

from .data import Batches, Documents, conversation, text_document
from .loop import NotFinite, Result, Trainer, run
from .settings import Data, Optimizer, Run, Settings

train = run

__all__ = [
    "Batches",
    "Data",
    "Documents",
    "NotFinite",
    "Optimizer",
    "Result",
    "Run",
    "Settings",
    "Trainer",
    "conversation",
    "run",
    "text_document",
    "train",
]
