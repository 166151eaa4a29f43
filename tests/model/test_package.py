"""What importing does, and what the folder names must not do to others."""

import subprocess
import sys

import gptoss_jax as gj


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_touches_nothing():
    out = run(
        "import os; before = dict(os.environ)\n"
        "import gptoss_jax, sys\n"
        "assert dict(os.environ) == before\n"
        "assert 'jax' not in sys.modules, 'import gptoss_jax loads jax'\n"
        "import gptoss_jax.model, jax\n"
        "assert dict(os.environ) == before\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized(), 'importing started a device'\n"
        "print(jax.config.jax_enable_x64, jax.config.jax_numpy_dtype_promotion)\n"
    )
    assert out.split() == ["False", "standard"]


def test_public_names_resolve():
    for name in gj.__all__:
        assert getattr(gj, name) is not None


def test_transformers_does_not_take_our_folder_for_hugging_faces():
    out = run(
        "import importlib.util, gptoss_jax.kernels\n"
        "print(importlib.util.find_spec('kernels'), importlib.util.find_spec('sharding'))\n"
    )
    assert out.split() == ["None", "None"]
