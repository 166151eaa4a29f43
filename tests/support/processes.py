"""Starts programs side by side, as a launcher does, and gathers what they said."""

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WORKER = Path(__file__).with_name("process_worker.py")
# What launchers leave in the environment: none of it may mean anything unless it is asked for.
AMBIENT = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1:1",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "nowhere",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
}


def environment(platform: str = "cpu", place: int | None = None, **more: str) -> dict[str, str]:
    """Of one process that shall see one device, or (gpu, place None) all of them.

    cpu: compiled quickly rather than well. gpu: memory as it is needed, since the process that
    tests holds some too; what says how GPUs may talk (NCCL_*) stays as it is.
    """
    clean = {name: value for name, value in os.environ.items() if name not in AMBIENT}
    if platform == "cpu":
        flags = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
        return clean | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags} | more
    clean["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if place is not None:
        visible = clean.get("CUDA_VISIBLE_DEVICES")
        clean["CUDA_VISIBLE_DEVICES"] = visible.split(",")[place] if visible else str(place)
    return clean | more


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(commands: list[list[str]], *, timeout_s: float = 240, platform: str = "cpu", **more: str):
    """All at once. [(exit code, stdout, stderr, seconds until it ended)], in their order.

    The i-th gets the i-th device of the platform. Raises subprocess.TimeoutExpired, and ends all,
    where one does not end in time.
    """
    start = time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [
        subprocess.Popen(c, env=environment(platform, i, **more), **pipes)
        for i, c in enumerate(commands)
    ]

    def ended(process):
        out, err = process.communicate(timeout=timeout_s)
        return process.returncode, out, err, time.monotonic() - start

    try:
        with ThreadPoolExecutor(len(running)) as pool:
            return list(pool.map(ended, running))
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()


def workers(job: str, processes: int, *, timeout_s: float = 240, platform: str = "cpu", **task):
    """`process_worker.py` in so many processes that joined each other, one device each."""
    shared = {"job": job, "processes": processes, "coordinator": f"127.0.0.1:{free_port()}"} | task
    commands = [
        [sys.executable, str(WORKER), json.dumps(shared | {"process_id": i})]
        for i in range(processes)
    ]
    return run(commands, timeout_s=timeout_s, platform=platform, **AMBIENT)


def answers(results) -> list[dict]:
    """The JSON each said, all having ended well."""
    for code, _, err, _ in results:
        assert code == 0, err[-3000:]
    return [json.loads(out.splitlines()[-1]) for _, out, _, _ in results]
