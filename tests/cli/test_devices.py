"""A platform that JAX does not have is one line, not a traceback."""

import os
import subprocess
import sys


def test_a_platform_that_is_not_there_is_named():
    program = "from gptoss_jax.cli import main; main()"
    command = [sys.executable, "-c", program, "generate", "hi", "--compilation-cache", "off"]
    env = os.environ | {"JAX_PLATFORMS": "tpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert "JAX finds no device (JAX_PLATFORMS='tpu')" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
