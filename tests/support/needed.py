"""Packages that tests compare with."""

import os

import pytest


def need(*modules: str) -> None:
    """Skips without these packages, except in CI, where their absence is a failure."""
    for name in modules:
        try:
            __import__(name)
        except ImportError as e:
            if os.environ.get("CI"):
                pytest.fail(f"CI must have {name}: {e}")
            pytest.skip(f"needs {name}: {e}")
