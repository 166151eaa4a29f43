"""One of several processes that run the same jobs; prints one line of JSON.

python process_worker.py '{"job": "generate", "folder": ..., "coordinator": ..., ...}'
"""

import json
import os
import sys


def generate(task):
    """Greedy tokens on each mesh asked for, then of a model of this process's own."""
    import jax
    import jax.numpy as jnp

    import gptoss_jax as gj
    from gptoss_jax.checkpoint import count_bytes

    def tokens(mesh, dispatch="auto"):
        with count_bytes() as counter:
            model = gj.load(task["folder"], mesh=mesh, dtype=jnp.float32, dispatch=dispatch)
        sampler = gj.Sampler(temperature=0.0)
        keywords = {"max_new_tokens": task["new"], "sampler": sampler, "stop_tokens": ()}
        out = gj.generate(model, task["prompts"], **keywords)
        return {"tokens": out.tokens, "read": counter.bytes_read}

    out = {name: tokens(gj.make_mesh(**axes), how) for name, axes, how in task["meshes"]}
    out["own"] = tokens(gj.make_mesh(devices=jax.local_devices()))
    return out


def cells(task):
    """Every mesh of all processes' devices, then a mesh of this process's own: tokens, logits.

    Logits go to files of this process, FOLDER/NAME.PROCESS.npy.
    """
    import cells as matrix
    import jax
    import numpy as np

    said = {}

    def note(name, mesh, how="auto"):
        tokens, logits = matrix.said(task["folder"], task["dtype"], task["new"], mesh, how)
        np.save(f"{task['out']}/{name}.{task['process_id']}.npy", logits)
        said[name] = tokens

    for axes, how in matrix.cells(len(jax.devices())):
        note(matrix.named(axes, how), matrix.mesh_of(axes), how)
    note("own", matrix.mesh_of({}, jax.local_devices()))
    return {"tokens": said, "devices": len(jax.devices()), "here": len(jax.local_devices())}


def missing(task):
    """Loads a folder of which this process has its own copy, whole or not."""
    import gptoss_jax as gj

    try:
        gj.load(task["folders"][task["process_id"]], mesh=gj.make_mesh(expert=task["processes"]))
    except ValueError as error:
        return {"kind": type(error).__name__, "message": str(error)}
    return {}


def lost(task):
    """The last process is killed, or fails by itself, while the others wait for it."""
    import jax
    import numpy as np

    import gptoss_jax as gj
    from gptoss_jax.sharding import constrain

    mesh = gj.make_mesh(data=task["processes"])
    ones = jax.make_array_from_callback(
        (task["processes"], 8),
        jax.NamedSharding(mesh, jax.P("data")),
        lambda index: np.ones((1, 8), np.float32),
    )
    total = jax.jit(lambda x: constrain(x.sum(0), mesh, None))
    print("ready", float(total(ones)[0]), flush=True)
    if task["process_id"] == task["processes"] - 1:
        if task["killed"]:
            os.kill(os.getpid(), 9)
        raise ValueError("this one fails")
    while True:
        total(ones).block_until_ready()


def main():
    task = json.loads(sys.argv[1])
    from gptoss_jax.sharding import distributed

    distributed.start(
        coordinator=task["coordinator"],
        processes=task["processes"],
        process_id=task["process_id"],
        heartbeat_s=task.get("heartbeat_s", 10),
        connect_s=120,
    )
    jobs = {"generate": generate, "cells": cells, "missing": missing, "lost": lost}
    print(json.dumps(jobs[task["job"]](task)))
    distributed.stop()


if __name__ == "__main__":
    main()
