"""What each kernel of a call takes on the GPU itself, by JAX's profiler: no host time in it."""

import collections
import glob
import tempfile
from collections.abc import Callable

import jax


def kernel_times(call: Callable[[], object], calls: int = 1) -> list[dict]:
    """Runs `call` (which must wait for its result) and sums up its kernels, the longest first.

    Each entry: name, us and launches, both divided by `calls`, the number of repetitions inside.
    Empty where there is no GPU. Inside a CUDA graph the profiler may see fewer kernels than ran;
    compile with compiler_options={"xla_gpu_enable_command_buffer": ""} to see each.
    """
    taken, launches = collections.Counter(), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        for file in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
            for plane in jax.profiler.ProfileData.from_file(file).planes:
                if "GPU" not in plane.name:
                    continue
                for line in plane.lines:
                    if "Stream" not in line.name:
                        continue
                    for event in line.events:
                        taken[event.name] += event.duration_ns
                        launches[event.name] += 1
    return [
        {"name": name, "us": round(ns / 1e3 / calls, 2), "launches": launches[name] / calls}
        for name, ns in taken.most_common()
    ]
