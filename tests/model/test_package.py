"""What importing does, and what the folder names must not do to others."""

import importlib.metadata
import pathlib
import subprocess
import sys

from needed import need

import gptoss_jax as gj

ROOT = pathlib.Path(__file__).parents[2]


def run(code: str, cwd=ROOT) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=cwd
    )
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
    """Not even started from the repository's root, where `import kernels` would find the folder."""
    need("transformers")
    installed = any(d.name == "kernels" for d in importlib.metadata.distributions())
    out = run("from transformers.utils import is_kernels_available; print(is_kernels_available())")
    assert out.split() == [str(installed)]


def test_installing_takes_no_bare_names(tmp_path):
    out = run(
        "import importlib.util as u, gptoss_jax.kernels, gptoss_jax.sharding\n"
        "for name in ('kernels', 'sharding'):\n"
        "    spec = u.find_spec(name)\n"
        "    print(spec and spec.origin)",
        cwd=tmp_path,
    )
    assert str(ROOT) not in out
