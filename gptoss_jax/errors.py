"""The one error of this package, raised once with everything that is wrong."""

from collections.abc import Iterable
from pathlib import Path

SHOWN = 60  # problems printed; a wrong folder can have one for each of 687 tensors


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is. `problems` holds every reason, one line each."""

    def __init__(self, where: str | Path, problems: Iterable[str]):
        self.where, self.problems = str(where), tuple(problems)
        assert self.problems
        if len(self.problems) == 1:
            text = f"{where}: {self.problems[0]}"
        else:
            lines = [f"{where}: {len(self.problems)} problems", *self.problems[:SHOWN]]
            if len(self.problems) > SHOWN:
                lines.append(f"and {len(self.problems) - SHOWN} more")
            text = "\n  ".join(lines)
        super().__init__(text)
