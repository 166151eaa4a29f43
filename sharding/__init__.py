"""Meshes, what lies where on them, and the collectives of the model.

make_mesh, parse_mesh, check_mesh    axes data, expert, tensor
Rules, parameter_sharding, constrain logical axes -> mesh axes
dispatch                             tokens to their experts: all_reduce or all_to_all
shard_attention                      attention over rows and heads
"""

from gptoss_jax.sharding.attention import shard_attention
from gptoss_jax.sharding.experts import Dispatch, all_reduce, all_to_all, choose, dispatch
from gptoss_jax.sharding.mesh import (
    AXES,
    axis_sizes,
    check_mesh,
    is_shared,
    make_mesh,
    parse_mesh,
)
from gptoss_jax.sharding.rules import Rules, constrain, parameter_sharding, parameter_spec

__all__ = [
    "AXES",
    "Dispatch",
    "Rules",
    "all_reduce",
    "all_to_all",
    "axis_sizes",
    "check_mesh",
    "choose",
    "constrain",
    "dispatch",
    "is_shared",
    "make_mesh",
    "parameter_sharding",
    "parameter_spec",
    "parse_mesh",
    "shard_attention",
]
