"""Expert parallelism: every token meets its experts, wherever on the mesh they live.

Each device of `expert` holds e = E / expert consecutive experts, known inside `shard_map` from
its own place on the axis and the shape of what it holds. Two ways to bring tokens and experts
together:

all_reduce   Tokens are whole on every device of expert; each computes its own experts' share of
             every token, and one psum adds the shares. One collective a layer; differentiable.
             For decoding and training.

all_to_all   Tokens are dealt out over data and expert. A token goes once to each device that
             holds any of its experts, and one row of partial sums comes back. For large prefills.

Why `all_to_all` loses no token. Between two devices there are C slots, whatever the routing:

    tokens here that need device r     t0 t3 t4 t7 t8        count_R[r] = 5
    their slots, in order               0  1  2  3  4
    C = 2: rounds                      [0  1][2  3][4  .]    ceil(5 / 2) = 3, one slot empty

Every round all devices exchange R·C rows, compute, and exchange R·C rows back. The number of rounds
is the most that any pair anywhere needs (a pmax), so all devices leave the loop together, a slot
number below count_R[r] belongs to exactly one token, and every such number comes up in exactly one
round. Memory is that of R·C rows, whatever the skew; a token with no expert anywhere (a padded row,
id -1) takes no slot at all.

What is never done: ids are compared with the bounds of a device's experts, before anything is
computed on them (an id of -1 divided by e is expert -1 or 0 depending on the language, and
indexes the last expert); no process number, rank or environment is read; partial sums are
gathered and added in the order of the devices, never scattered, so a token's bits do not depend
on its neighbours.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from gptoss_jax.kernels.expert_matmul import ExpertWeights
from gptoss_jax.sharding.mesh import AXES, axis_sizes
from gptoss_jax.sharding.rules import expert_specs

Dispatch = Literal["auto", "all_reduce", "all_to_all"]
# (x_ND, ids_NX, weights_NX, experts) -> float32 [N, D] on one device; ids outside [0, e) skipped.
Compute = Callable[..., Array]  # of x, ids, weights, experts; and total=, where rows are few

# Tokens of one row of data from which all_to_all is worth its exchanges; see docs/sharding.md.
TOKENS_WORTH_SENDING = 2048
RANKS_WORTH_SENDING = 4


def dispatch(
    x_ND: Float[Array, "N D"],
    ids_NX: Int[Array, "N X"],
    weights_NX: Float[Array, "N X"],
    experts: ExpertWeights,
    *,
    mesh: Mesh | None,
    compute: Compute,
    how: Dispatch | str = "auto",
    slots: int | None = None,
) -> Float[Array, "N D"]:
    """The mixture of experts of one layer, on a mesh or (mesh=None) on one device.

    compute: what one device does with its own experts, `kernels.expert_matmul` with out_dtype
    float32 bound. how: "auto" is `choose`; where the mesh's expert axis is 1 there is nothing to
    send and every choice is `all_reduce`. slots: C of `all_to_all`. Returns x's dtype.
    Raises ValueError for an unknown `how` and where the mesh does not divide E.
    """
    if how not in ("auto", "all_reduce", "all_to_all"):
        raise ValueError(f"dispatch is 'auto', 'all_reduce' or 'all_to_all'; got {how!r}.")
    if x_ND.shape[0] == 0:
        return x_ND
    if mesh is None or mesh.size == 1:
        return compute(x_ND, ids_NX, weights_NX, experts).astype(x_ND.dtype)
    if axis_sizes(mesh)["expert"] == 1:
        how = "all_reduce"
    if how == "auto":
        how = choose(x_ND.shape[0], mesh)
    if how == "all_reduce":
        return all_reduce(x_ND, ids_NX, weights_NX, experts, mesh=mesh, compute=compute)
    return all_to_all(x_ND, ids_NX, weights_NX, experts, mesh=mesh, compute=compute, slots=slots)


def choose(tokens: int, mesh) -> Dispatch:
    """all_to_all from 2048 tokens a row of data over at least 4 devices of expert, else all_reduce.

    Below that the exchanges' latencies cost more than the bytes they save, over NVLink; over
    InfiniBand 512 would do for 8 devices and more. `sharding/cost.py` has the arithmetic.
    """
    sizes = axis_sizes(mesh)
    enough = tokens >= TOKENS_WORTH_SENDING * sizes["data"]
    return "all_to_all" if enough and sizes["expert"] >= RANKS_WORTH_SENDING else "all_reduce"


def all_reduce(
    x_ND: Float[Array, "N D"],
    ids_NX: Int[Array, "N X"],
    weights_NX: Float[Array, "N X"],
    experts: ExpertWeights,
    *,
    mesh: Mesh,
    compute: Compute,
) -> Float[Array, "N D"]:
    """Local experts of whole tokens, then one psum in float32. Tokens are dealt out over data."""
    sizes, N = axis_sizes(mesh), x_ND.shape[0]
    specs, cut = _specs(experts, mesh)
    summed = tuple(a for a, used in (("expert", True), ("tensor", cut)) if used and sizes[a] > 1)

    def local(x_nD, ids_nX, weights_nX, mine):
        mine, e = _bias_once(mine, cut), mine.count
        first = lax.axis_index("expert") * e
        # All rows come here, but most choices are another's: an expert's rows are not N X / e.
        local_nX = _local_ids(ids_nX, first, e)
        out_nD = compute(x_nD, local_nX, weights_nX, mine, total=e * sizes["expert"])
        out_nD = out_nD.astype(jnp.float32)
        if summed:
            out_nD = lax.psum(out_nD, summed)  # partial sums over experts and hidden rows -> whole
        return out_nD.astype(x_nD.dtype)

    rows = PartitionSpec("data", None)
    padded = _pad_rows(x_ND, ids_NX, weights_NX, sizes["data"])
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(rows, rows, rows, specs), out_specs=rows, check_vma=False
    )
    return run(*padded, experts)[:N]


def all_to_all(
    x_ND: Float[Array, "N D"],
    ids_NX: Int[Array, "N X"],
    weights_NX: Float[Array, "N X"],
    experts: ExpertWeights,
    *,
    mesh: Mesh,
    compute: Compute,
    slots: int | None = None,
) -> Float[Array, "N D"]:
    """Tokens to their experts and back, C slots between each two devices a round.

    slots: C; None takes `default_slots`. Any C >= 1 gives the same result; a small one uses less
    memory and more rounds. Rows travel in x's dtype both ways, and are added in float32.
    Not reverse-differentiable (the number of rounds depends on the routing): train with all_reduce.
    """
    sizes, (N, X), D = axis_sizes(mesh), ids_NX.shape, x_ND.shape[1]
    R = sizes["expert"]
    n = -(-N // (sizes["data"] * R))
    C = default_slots(n, X, R) if slots is None else min(slots, max(n, 1))
    if C < 1:
        raise ValueError(f"slots is the rows of one exchange, at least 1; got {slots}.")
    specs, cut = _specs(experts, mesh)
    exchange = partial(lax.all_to_all, axis_name="expert", split_axis=0, concat_axis=0)

    def local(x_nD, ids_nX, weights_nX, mine):
        mine, e = _bias_once(mine, cut), mine.count
        first = lax.axis_index("expert") * e
        wanted_nR = _wanted(ids_nX, R, e)
        count_R = jnp.sum(wanted_nR, axis=0, dtype=jnp.int32)
        # Token of each slot: those that want device r first, in their own order.
        token_Rn = jnp.argsort(~wanted_nR.T, axis=1, stable=True).astype(jnp.int32)
        token_Rn = jnp.pad(token_Rn, ((0, 0), (0, -n % C)))
        # And back: the devices each token went to, in the order of the axis, and its slot at each.
        J = min(R, X)
        rank_nJ = jnp.argsort(~wanted_nR, axis=1, stable=True).astype(jnp.int32)[:, :J]
        went_nJ = jnp.take_along_axis(wanted_nR, rank_nJ, axis=1)
        slot_nR = jnp.cumsum(wanted_nR, axis=0, dtype=jnp.int32) - 1
        slot_nJ = jnp.take_along_axis(slot_nR, rank_nJ, axis=1)

        def one_round(state):
            done, parts_nJD = state
            start = done * C
            token_RC = lax.dynamic_slice(token_Rn, (0, start), (R, C))
            full_RC = start + jnp.arange(C, dtype=jnp.int32) < count_R[:, None]
            x_RCD = jnp.where(full_RC[..., None], x_nD[token_RC], 0)
            ids_RCX = jnp.where(full_RC[..., None], ids_nX[token_RC], -1)
            bits_RCX = lax.bitcast_convert_type(weights_nX, jnp.int32)[token_RC]
            x_RCD = exchange(x_RCD)  # by destination -> by source
            routes = exchange(jnp.concatenate([ids_RCX, bits_RCX], axis=-1))  # likewise
            ids_mX, bits_mX = jnp.split(routes.reshape(R * C, 2 * X), 2, axis=-1)
            out_mD = compute(
                x_RCD.reshape(R * C, D),
                _local_ids(ids_mX, first, e),
                lax.bitcast_convert_type(bits_mX, jnp.float32),
                mine,
            )
            back_RCD = exchange(out_mD.astype(x_nD.dtype).reshape(R, C, D))  # by source -> by dest.
            now_nJ = went_nJ & (slot_nJ >= start) & (slot_nJ < start + C)
            rows_nJD = _returned(back_RCD, rank_nJ, slot_nJ - start)
            return done + 1, jnp.where(now_nJ[..., None], rows_nJD, parts_nJD)

        rounds = _rounds(lax.pmax(jnp.max(count_R, initial=0), AXES), C)
        empty = (jnp.int32(0), jnp.zeros((n, J, D), x_nD.dtype))
        _, parts_nJD = lax.while_loop(lambda state: state[0] < rounds, one_round, empty)
        out_nD = sum(parts_nJD[:, j].astype(jnp.float32) for j in range(J))
        if cut:
            out_nD = lax.psum(out_nD, "tensor")  # partial sums over hidden rows -> whole
        return out_nD.astype(x_nD.dtype)

    rows = PartitionSpec(("data", "expert"), None)
    padded = _pad_rows(x_ND, ids_NX, weights_NX, sizes["data"] * R)
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(rows, rows, rows, specs), out_specs=rows, check_vma=False
    )
    return run(*padded, experts)[:N]


def default_slots(tokens: int, chosen: int, ranks: int) -> int:
    """A quarter above what even routing sends to one device: one round unless it is skewed.

    tokens: n on each device; a token wants one given device of `ranks` with probability at most
    chosen / ranks.
    """
    return max(1, min(tokens, -(-5 * tokens * min(chosen, ranks) // (4 * ranks))))


def _wanted(ids_nX: Int[Array, "n X"], ranks: int, e: int) -> Bool[Array, "n R"]:
    """Which devices hold any of a token's experts. Ids outside [0, E) are on none."""
    first_R = jnp.arange(ranks, dtype=ids_nX.dtype) * e
    ids_nX1 = ids_nX[:, :, None]
    return jnp.any((ids_nX1 >= first_R) & (ids_nX1 < first_R + e), axis=1)


def _local_ids(ids_NX: Int[Array, "N X"], first: Array, e: int) -> Int[Array, "N X"]:
    """Ids among this device's e experts; -1 where the expert lives elsewhere or nowhere."""
    return jnp.where((ids_NX >= first) & (ids_NX < first + e), ids_NX - first, -1)


def _returned(back_RCD: Array, rank_nJ: Array, slot_nJ: Array) -> Float[Array, "n J D"]:
    """For each token, the rows that came back from the devices it went to: where it put them."""
    return back_RCD[rank_nJ, jnp.clip(slot_nJ, 0, back_RCD.shape[1] - 1)]


def _rounds(fullest: Array, slots: int) -> Array:
    return -(-fullest // slots)


def _bias_once(experts: ExpertWeights, cut: bool) -> ExpertWeights:
    """Where the hidden rows are cut over tensor, each device adds a part of one sum: one bias."""
    if not cut:
        return experts
    bias = experts.down_bias
    here = lax.axis_index("tensor") == 0
    return dataclasses.replace(experts, down_bias=jnp.where(here, bias, jnp.zeros_like(bias)))


def _specs(experts: ExpertWeights, mesh: Mesh) -> tuple[ExpertWeights, bool]:
    """Experts with PartitionSpecs for arrays, and whether their hidden rows are cut over tensor.

    Raises ValueError where the mesh's expert axis does not divide E.
    """
    sizes = axis_sizes(mesh)
    if experts.count % sizes["expert"]:
        raise ValueError(
            f"mesh axis expert={sizes['expert']} does not divide the {experts.count} experts."
        )
    specs = expert_specs(experts.layout, experts.ffn, mesh)
    # Read from the specs themselves: a layout that cannot be cut is whole on every device.
    named = {axis for spec in specs.values() for axis in jax.tree.leaves(tuple(spec))}
    cut = sizes["tensor"] > 1 and "tensor" in named
    return ExpertWeights(layout=experts.layout, **specs), cut


def _pad_rows(x_ND: Array, ids_NX: Array, weights_NX: Array, multiple: int):
    """Rows up to a multiple: no expert (-1), weight 0, zeros. Removed again by the caller."""
    extra = ((0, -x_ND.shape[0] % multiple), (0, 0))
    return (
        jnp.pad(x_ND, extra),
        jnp.pad(ids_NX, extra, constant_values=-1),
        jnp.pad(weights_NX.astype(jnp.float32), extra),
    )
