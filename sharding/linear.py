"""The dense layers beside the experts on a mesh: a kernel is one opaque call to XLA, which would
gather its operands whole; inside `shard_map` it sees its device's rows and heads only.

    shard_qkv    columns of heads: x whole on the devices of heads, each computes its own heads
    shard_out    rows of heads: each adds up its own heads' share, one psum makes the sum whole
    shard_rows   rows of a batch: the router, whose weights are whole everywhere
    shard_lookup rows of the embedding: each device gives those it has, one psum
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from gptoss_jax.sharding.rules import batch_axis, heads_axes, vocab_axes


def shard_qkv(
    linear: Callable[..., Array],
    x_BTD: Float[Array, "B T D"],
    weight_KMHD: Float[Array, "K M H D"],
    bias_KMH: Float[Array, "K M H"],
    norm_D: Float[Array, " D"],
    *,
    mesh: Mesh | None,
) -> Float[Array, "B T K M H"]:
    """Queries, keys and values of norm(x), over batch (data) and heads (`rules.heads_axes`).

    linear: `kernels.linear.linear` with eps and backend bound. No collective: a device of heads
    has all of its rows' x, and needs all of D for each of its outputs.
    """

    def local(x_btD, weight_kMHD, bias_kMH, norm_D):
        D = x_btD.shape[-1]
        out = linear(x_btD, weight_kMHD.reshape(-1, D), bias_kMH.reshape(-1), norm_I=norm_D)
        return out.reshape(*x_btD.shape[:-1], *bias_kMH.shape)

    args = (x_BTD, weight_KMHD, bias_KMH, norm_D)
    if mesh is None or mesh.size == 1:
        return local(*args)
    rows, heads = batch_axis(x_BTD.shape[0], mesh), heads_axes(weight_KMHD.shape[0], mesh)
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
            PartitionSpec(rows, None, None),
            PartitionSpec(heads, None, None, None),
            PartitionSpec(heads, None, None),
            PartitionSpec(None),
        ),
        out_specs=PartitionSpec(rows, None, heads, None, None),
        check_vma=False,
    )
    return run(*args)


def shard_out(
    linear: Callable[..., Array],
    x_BTKGH: Float[Array, "B T K G H"],
    weight_DKGH: Float[Array, "D K G H"],
    bias_D: Float[Array, " D"],
    residual_BTD: Float[Array, "B T D"],
    *,
    mesh: Mesh | None,
) -> Float[Array, "B T D"]:
    """weight . x + bias + residual, rounded once; bias and residual are added once, after the sum
    over the devices of heads."""

    def local(x_btkGH, weight_DkGH, bias_D, residual_btD, summed=()):
        D = weight_DkGH.shape[0]
        x, weight = x_btkGH.reshape(*x_btkGH.shape[:2], -1), weight_DkGH.reshape(D, -1)
        if not summed:
            return linear(x, weight, bias_D, residual_O=residual_btD)
        part_btD = linear(x, weight, out_dtype=jnp.float32)
        out_btD = lax.psum(part_btD, summed)  # partial sums over heads -> whole
        out_btD += bias_D.astype(jnp.float32) + residual_btD.astype(jnp.float32)
        return out_btD.astype(x.dtype)

    args = (x_BTKGH, weight_DKGH, bias_D, residual_BTD)
    if mesh is None or mesh.size == 1:
        return local(*args)
    rows, heads = batch_axis(x_BTKGH.shape[0], mesh), heads_axes(weight_DKGH.shape[1], mesh)
    run = jax.shard_map(
        lambda *args: local(*args, summed=heads or ()),
        mesh=mesh,
        in_specs=(
            PartitionSpec(rows, None, heads, None, None),
            PartitionSpec(None, heads, None, None),
            PartitionSpec(None),
            PartitionSpec(rows, None, None),
        ),
        out_specs=PartitionSpec(rows, None, None),
        check_vma=False,
    )
    return run(*args)


def shard_rows(
    compute: Callable[..., tuple[Array, ...]],
    x_ND: Float[Array, "N D"],
    *weights: Array,
    mesh: Mesh | None,
) -> tuple[Array, ...]:
    """`compute(x, *weights)`, a tuple of arrays with a row for each of x, over N (data).

    N that data does not divide is computed whole on each device of data. No collective.
    """
    if mesh is None or mesh.size == 1:
        return compute(x_ND, *weights)
    by_row = PartitionSpec(batch_axis(x_ND.shape[0], mesh))
    run = jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=(by_row, *(PartitionSpec() for _ in weights)),
        out_specs=by_row,
        check_vma=False,
    )
    return run(x_ND, *weights)


def shard_lookup(
    table_VD: Float[Array, "V D"], ids_BT: Int[Array, "B T"], *, mesh: Mesh | None
) -> Float[Array, "B T D"]:
    """table[ids], over batch (data) and vocabulary (`rules.vocab_axes`). Exact: one device has the
    row, the others add zeros.

    XLA, left alone, gathers the whole table for one token: 1.2 GB a step in the published models.
    """
    rows = None if mesh is None else batch_axis(ids_BT.shape[0], mesh)
    cut = None if mesh is None else vocab_axes(table_VD.shape[0], mesh)
    if cut is None:
        return table_VD[ids_BT]

    def local(table_vD, ids_bT):
        first = lax.axis_index(cut) * table_vD.shape[0]
        here_bT = (ids_bT >= first) & (ids_bT < first + table_vD.shape[0])
        found_bTD = table_vD[jnp.where(here_bT, ids_bT - first, 0)]
        found_bTD = jnp.where(here_bT[..., None], found_bTD, jnp.zeros((), table_vD.dtype))
        return lax.psum(found_bTD, cut)  # each row on one device -> on all

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(cut, None), PartitionSpec(rows, None)),
        out_specs=PartitionSpec(rows, None, None),
        check_vma=False,
    )
    return run(table_VD, ids_BT)
