"""Checkpoints of training (Orbax): written whole or not at all, the last few kept."""

import pathlib

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """step -> state, in a folder. A write that was cut off (SIGKILL) leaves a temporary folder
    which is never taken for a checkpoint and is cleared when the folder is opened again."""

    def __init__(self, folder: str | pathlib.Path, *, keep: int):
        self.folder = pathlib.Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state, about: dict) -> None:
        """Starts a write and returns; `about` is what must be the same when resuming."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about)
            ),
        )

    def restore(self, step: int, like):
        """(state, about): arrays shaped, typed and placed like `like`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        kept = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract), about=ocp.args.JsonRestore()
            ),
        )
        return kept["state"], kept["about"]

    def about(self, step: int) -> dict:
        """What `save` was told, without the arrays."""
        return self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))[
            "about"
        ]

    def close(self) -> None:
        """Waits for the write in progress."""
        self._manager.wait_until_finished()
        self._manager.close()
