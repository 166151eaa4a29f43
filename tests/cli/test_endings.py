"""What ends a command before its work: a platform that JAX does not have, and Ctrl-C."""

import os
import signal
import subprocess
import sys
import time


def test_a_platform_that_is_not_there_is_named():
    program = "from gptoss_jax.cli import main; main()"
    command = [sys.executable, "-c", program, "generate", "hi", "--compilation-cache", "off"]
    env = os.environ | {"JAX_PLATFORMS": "tpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert "JAX finds no device (JAX_PLATFORMS='tpu')" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_an_interrupt_ends_at_once_with_a_shells_code():
    """Also while XLA's threads compile, beside which Python's own way out may crash."""
    program = "import sys; from gptoss_jax.cli import main; print('here', flush=True); main()"
    command = [sys.executable, "-c", program, "generate", "hi", "--compilation-cache", "off"]
    command += ["--max-new-tokens", "5000"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "here\n"
        time.sleep(6)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "gptoss-jax: interrupted" and "Traceback" not in said
