"""Compiles decoding, or the prefill of a chunk, for H200s on a host that has none; says JSON.

    python aot_worker.py '{"expert": 8, "model": "20b", "layers": 2, "tokens": 1, ...}'

Needs jax's CUDA plugin wheels (jax-cuda13-plugin, jax-cuda13-pjrt) and no GPU.
"""

import json
import os
import re
import sys

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["JAX_PLATFORMS"] = ""  # both the CPU, for small arrays, and CUDA, to compile for

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import gptoss_jax.decode as decoding
from gptoss_jax import sharding
from gptoss_jax.config import Config
from gptoss_jax.kernels import device
from gptoss_jax.kernels.expert_matmul import layout_for
from gptoss_jax.model import GptOss
from gptoss_jax.sampling import Sampler

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0" name: "NVIDIA H200"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def mesh_of(axes: dict[str, int]):
    count = int(np.prod(list(axes.values())))
    made = topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology=f"1x1x{count}"
    )
    return sharding.make_mesh(**axes, devices=made.devices)


def abstract(config, mesh, dispatch, layout):
    """A packed bfloat16 model in a layout, of shapes that know where they lie."""

    def made():
        model = GptOss(
            config,
            rngs=nnx.Rngs(0),
            dtype=jnp.bfloat16,
            experts="packed",
            mesh=mesh,
            dispatch=dispatch,
        )
        for block in model.blocks:
            block.moe.experts.replace(block.moe.experts.weights().to_layout(layout))
        return model

    model = nnx.eval_shape(made)
    graph, state = nnx.split(model)
    flat, tree = jax.tree_util.tree_flatten_with_path(state)
    leaves = []
    for path, leaf in flat:
        dotted = ".".join(re.findall(r"\w+", jax.tree_util.keystr(path))).removesuffix(".value")
        lies = sharding.parameter_sharding(dotted, config, mesh, layout)
        leaves.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies))
    return graph, tree, leaves


def size_of(shape: str) -> int:
    """Elements of a shape as XLA writes it."""
    return int(np.prod([int(n) for n in re.search(r"\[(.*)\]", shape)[1].split(",")]))


def lanes_of(calls: list[str]) -> list[str]:
    """Shapes of the packed weights among the operands of these calls: scales have fewer axes."""
    operands = [re.search("operand_layout_constraints=(.*?) metadata=", call)[1] for call in calls]
    return [shape for one in operands for shape in re.findall(r"u16\[\d+(?:,\d+){3,}\]", one)]


def main(task: dict):
    axes = {axis: task.get(axis, 1) for axis in sharding.AXES}
    mesh = mesh_of(axes)
    published = Config.gpt_oss_120b() if task["model"] == "120b" else Config.gpt_oss_20b()
    shown = {name: getattr(published, name) for name in published.__dataclass_fields__}
    config = Config(**shown | {"layers": task["layers"], "sliding": None})
    with device.ahead_of_time():
        layout = layout_for(cut=axes["tensor"] > 1)
        graph, tree, leaves = abstract(config, mesh, task["dispatch"], layout)
        programs = decoding.Programs(graph, tree, config, mesh, gpu=True)
        whole = NamedSharding(mesh, PartitionSpec())
        B = task["batch"]

        def shaped(x):
            return jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype, sharding=whole)

        cache = jax.eval_shape(lambda: programs.empty(B, task["slots"], jnp.bfloat16))
        heads = sharding.Rules.fit(config, mesh, batch=B)
        kv = NamedSharding(mesh, heads.spec("batch", "kv_heads", "slots", "head"))
        rows_lie = NamedSharding(mesh, PartitionSpec(heads.batch))
        cache = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=kv if x.ndim == 4 else rows_lie
            ),
            cache,
        )
        sampler = Sampler(temperature=0.0)
        plan = sampler.plan(text_vocab=None, logprobs=False, top=0)
        rows = decoding.Rows(
            shaped(np.zeros(B, np.int32)), shaped(np.zeros(B, np.int32)), shaped(np.int32(0)), None
        )
        request = jax.tree.map(
            shaped,
            decoding.Request(np.zeros((B, 2), np.uint32), np.zeros(4, np.int32), sampler.knobs()),
        )
        if task["tokens"] == 1:
            n = shaped(np.int32(0))
            lowered = programs.decode.lower(leaves, cache, rows, request, n, plan, 64)
        else:
            tokens_BT = shaped(np.zeros((B, task["tokens"]), np.int32))
            start, length_B = shaped(np.int32(0)), shaped(np.zeros(B, np.int32))
            lowered = programs.prefill.lower(leaves, cache, tokens_BT, start, length_B)
        stable = lowered.as_text()
        compiled = lowered.compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    collectives = {name: re.findall(rf"= (.*?) {name}(?:-start)?\(", text) for name in names}
    calls = [line for line in text.splitlines() if "custom-call(" in line]
    targets = {"triton": "__gpu$xla.gpu.triton", "mosaic": "mosaic_gpu_v2"}
    kernels = {
        name: [line for line in calls if f'custom_call_target="{target}"' in line]
        for name, target in targets.items()
    }
    large = re.findall(r"= (u(?:8|16|32)\[[\d,]+\])\S* ([\w-]+)\(", text)
    print(
        json.dumps(
            {
                "layout": layout,
                "collectives": {name: shapes for name, shapes in collectives.items() if shapes},
                "kernels": {name: len(lines) for name, lines in kernels.items()},
                # The packed weights that each of them is given: nothing else has such lanes.
                "experts": {name: lanes_of(lines) for name, lines in kernels.items()},
                # What any other instruction makes of integers as large as weights: nothing.
                "moved": sorted(
                    f"{kind} {shape}"
                    for shape, kind in large
                    if size_of(shape) > 1e6
                    and kind not in ("parameter", "get-tuple-element", "bitcast")
                ),
                "shard_maps": stable.count("sdy.manual_computation"),
                "arguments": memory.argument_size_in_bytes,
                "temporary": memory.temp_size_in_bytes,
            }
        )
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
