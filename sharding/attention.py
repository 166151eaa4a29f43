"""Attention on a mesh: each device attends with its own rows and its own key/value heads.

A Pallas kernel is one opaque call to XLA, which would gather its operands whole; inside
`shard_map` it sees only what lies on its device. No collective is needed: heads do not mix before
the output projection, whose contraction over heads is the one sum of the layer's attention.
"""

from collections.abc import Callable

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from gptoss_jax.sharding.rules import batch_axis, heads_axes


def shard_attention(
    attend: Callable[..., Array],
    q_BTKGH: Float[Array, "B T K G H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    sinks_KG: Float[Array, "K G"],
    q_pos_BT: Int[Array, "B T"],
    k_pos_BS: Int[Array, "B S"],
    *,
    mesh: Mesh | None,
) -> Float[Array, "B T K G H"]:
    """`attend(q, k, v, sinks, q_pos, k_pos)` over batch (data) and heads (`rules.heads_axes`).

    attend: `kernels.attention` with window and backend bound. B that data does not divide is
    attended whole on each device of data. With mesh=None or of one device calls attend itself.
    """
    args = (q_BTKGH, k_BKSH, v_BKSH, sinks_KG, q_pos_BT, k_pos_BS)
    if mesh is None or mesh.size == 1:
        return attend(*args)
    rows, heads = batch_axis(q_BTKGH.shape[0], mesh), heads_axes(q_BTKGH.shape[2], mesh)
    cached = PartitionSpec(rows, heads, None, None)
    run = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(
            PartitionSpec(rows, None, heads, None, None),
            cached,
            cached,
            PartitionSpec(heads, None),
            PartitionSpec(rows, None),
            PartitionSpec(rows, None),
        ),
        out_specs=PartitionSpec(rows, None, heads, None, None),
        check_vma=False,
    )
    return run(*args)


def shard_step(
    attend: Callable[..., tuple[Array, Array, Array]],
    qkv_BKMH: Float[Array, "B K M H"],
    cos_BC: Float[Array, "B C"],
    sin_BC: Float[Array, "B C"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    sinks_KG: Float[Array, "K G"],
    q_pos_B: Int[Array, " B"],
    k_pos_BS: Int[Array, "B S"],
    slot_B: Int[Array, " B"],
    *,
    mesh: Mesh | None,
) -> tuple[Float[Array, "B K G H"], Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """As `shard_attention`, for `kernels.attention.append_and_attend`: one new token a row."""
    args = (
        qkv_BKMH, cos_BC, sin_BC, k_BKSH, v_BKSH, sinks_KG, q_pos_B, k_pos_BS, slot_B,
    )  # fmt: skip
    if mesh is None or mesh.size == 1:
        return attend(*args)
    rows, heads = batch_axis(qkv_BKMH.shape[0], mesh), heads_axes(qkv_BKMH.shape[1], mesh)
    by_head = PartitionSpec(rows, heads, None, None)
    by_row, row = PartitionSpec(rows, None), PartitionSpec(rows)
    run = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(
            by_head,
            by_row,
            by_row,
            by_head,
            by_head,
            PartitionSpec(heads, None),
            row,
            by_row,
            row,
        ),  # fmt: skip
        out_specs=(by_head, by_head, by_head),
        check_vma=False,
    )
    return run(*args)
