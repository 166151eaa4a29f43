"""Loads a folder as often as asked and prints seconds by stage, and host and device memory.

    python recipes/random_checkpoint.py 20b /dev/shm/20b
    XLA_PYTHON_CLIENT_PREALLOCATE=false python recipes/measure_load.py /dev/shm/20b --times 3

Measured on an H200 (jax 0.11.2, commit e5a3f0d, experts turned to lanes; fragments not timed yet),
20b in a memory disk, under a profiler: 8.3 s, 1.7 GB/s (14.8 s the first time, which compiles the
change of layout); host memory beyond the page cache 0.2 GiB before and 0.8 GiB at the peak; device
memory 13.4 GiB in use and 14.3 at the peak, for 12.8 GiB of files. Where the 0.6 GiB above the
files' size go is not known yet: `live_arrays_GiB` was not printed then.
"""

import argparse
import collections
import json
import sys
import threading
import time
from pathlib import Path

import jax
from flax import nnx

import gptoss_jax.checkpoint as checkpoint
from gptoss_jax.checkpoint.parts import Part

GIB = 2**30


class Stages:
    """Seconds spent inside functions, by label; an inner stage is also in the outer one's time."""

    def __init__(self):
        self.seconds = collections.Counter()
        load = sys.modules["gptoss_jax.checkpoint.load"]  # the package's `load` is the function
        for owner, name in (
            (load, "open_checkpoint"),
            (load, "tokens"),
            (nnx, "eval_shape"),
            (load, "_fill"),
            (Part, "__getitem__"),
            (Part, "forget"),
            (jax, "device_put"),
            (jax, "block_until_ready"),
            (load, "turn_experts"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), name.strip("_")))

    def _timed(self, function, label: str):
        def timed(*args, **keywords):
            start = time.perf_counter()
            try:
                return function(*args, **keywords)
            finally:
                self.seconds[label] += time.perf_counter() - start

        return timed


class Peak:
    """Host memory of this process beyond the page cache, in bytes, while the `with` runs."""

    def __enter__(self) -> "Peak":
        self.before = self.highest = anonymous_bytes()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.done.wait(0.01):
            self.highest = max(self.highest, anonymous_bytes())

    def __exit__(self, *_) -> None:
        self.done.set()
        self.thread.join()
        self.highest = max(self.highest, anonymous_bytes())


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


def measure(folder, stages: Stages, **keywords) -> dict:
    stages.seconds.clear()
    start = time.perf_counter()
    with Peak() as host:
        model = checkpoint.load(folder, **keywords)
    seconds = time.perf_counter() - start
    files = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
    device = jax.local_devices()[0].memory_stats() or {}
    parameters = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    return {
        "seconds": round(seconds, 2),
        "GB_per_s": round(files / seconds / 1e9, 2),
        "stages_s": {label: round(s, 2) for label, s in stages.seconds.items()},
        "files_GiB": round(files / GIB, 3),
        "parameters_GiB": round(parameters / GIB, 3),
        "live_arrays_GiB": round(sum(x.nbytes for x in jax.live_arrays()) / GIB, 3),
        "host_before_GiB": round(host.before / GIB, 3),
        "host_peak_GiB": round(host.highest / GIB, 3),
        "device_GiB": round(device.get("bytes_in_use", 0) / GIB, 3),
        "device_peak_GiB": round(device.get("peak_bytes_in_use", 0) / GIB, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--backend")
    arguments = parser.parse_args()
    jax.device_put(1.0).block_until_ready()  # the device's own start-up is not loading
    stages = Stages()
    for _ in range(arguments.times):
        print(json.dumps(measure(arguments.folder, stages, backend=arguments.backend)), flush=True)


if __name__ == "__main__":
    main()
