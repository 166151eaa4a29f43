"""An H200 that is not there: a topology that jax's CUDA plugin compiles for on any host."""

import importlib.util
import os

import pytest

# jaxlib's GpuTargetConfigProto as text: what XLA would have asked the driver.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
  name: "NVIDIA H200"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def sharding():
    """Where one absent H200 keeps an array. Skips the test where the plugin is not installed."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("needs jax-cuda13-pjrt and jax-cuda13-plugin")
    from jax.experimental import topologies

    # Else the plugin asks for the CUDA libraries that running would need.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1")
    return jax_sharding(topologies.make_mesh(topology, (1,), ("x",)))


def jax_sharding(mesh):
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(mesh, PartitionSpec())
