"""Meshes, what lies where on them, and the collectives of the model.

make_mesh, parse_mesh, check_mesh      axes data, expert, tensor
Rules, parameter_sharding, constrain   logical axes -> mesh axes
dispatch                               tokens to their experts: all_reduce or all_to_all
shard_attention, shard_step            attention over rows and heads
shard_qkv, shard_out, shard_rows       its projections, and the router over rows
shard_lookup                           rows of the embedding
place                                  slices of files to the devices that hold them
start, stop, together, say             several processes that run one program
describe, draw, draw_load              what lives where
"""

from gptoss_jax.sharding.attention import shard_attention, shard_step
from gptoss_jax.sharding.describe import (
    describe,
    draw,
    draw_load,
    expert_load,
    layout_table,
    parameter_shapes,
)
from gptoss_jax.sharding.distributed import PeerError, is_first, say, start, stop, together
from gptoss_jax.sharding.experts import Dispatch, all_reduce, all_to_all, choose, dispatch
from gptoss_jax.sharding.linear import shard_lookup, shard_out, shard_qkv, shard_rows
from gptoss_jax.sharding.mesh import (
    AXES,
    axis_sizes,
    check_mesh,
    is_shared,
    make_mesh,
    parse_mesh,
)
from gptoss_jax.sharding.place import bytes_to_read, place, relayout, slices_here
from gptoss_jax.sharding.rules import (
    Rules,
    constrain,
    expert_specs,
    parameter_sharding,
    parameter_spec,
)

__all__ = [
    "AXES",
    "Dispatch",
    "PeerError",
    "Rules",
    "all_reduce",
    "all_to_all",
    "axis_sizes",
    "bytes_to_read",
    "check_mesh",
    "choose",
    "constrain",
    "describe",
    "dispatch",
    "draw",
    "draw_load",
    "expert_load",
    "expert_specs",
    "is_first",
    "is_shared",
    "layout_table",
    "make_mesh",
    "parameter_shapes",
    "parameter_sharding",
    "parameter_spec",
    "parse_mesh",
    "place",
    "relayout",
    "say",
    "shard_attention",
    "shard_lookup",
    "shard_out",
    "shard_qkv",
    "shard_rows",
    "shard_step",
    "slices_here",
    "start",
    "stop",
    "together",
]
