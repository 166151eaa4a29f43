"""examples/generate.py as people run it, with the embedded model."""

import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "generate.py"


def test_the_example_answers_both_questions(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("What is 27 + 58?") and "85" in first and first.endswith("stop)")
    assert second.startswith("What is 9 * 7?") and second.endswith("stop)")
