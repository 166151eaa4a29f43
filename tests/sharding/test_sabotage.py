"""Tests of the tests: each of the mistakes that others made, put in on purpose, must be noticed.

Every mistake was some project's: the cases behind them gave wrong text or NaN, not an error.
"""

import functools

import jax
import jax.numpy as jnp
import moe_cases as moe
import numpy as np
import pytest
from jax import lax
from tolerances import FLOAT32_OP

from gptoss_jax import sharding
from gptoss_jax.sharding import experts as dispatch


def largest_error(mesh: str, how: str, layout: str, routing: str) -> float:
    """Of the output over its largest value. Compiled anew: what is patched must be traced."""
    made = sharding.make_mesh(**sharding.parse_mesh(mesh))
    run = functools.partial(sharding.dispatch, mesh=made, compute=moe.compute, how=how, slots=2)
    experts, (x_ND, weights_NX) = moe.make(layout), moe.tokens(12)
    ids_NX = moe.routings(12)[routing]
    expected = moe.expected(x_ND, ids_NX, weights_NX, experts)
    actual = np.asarray(jax.jit(run)(x_ND, ids_NX, weights_NX, experts), np.float64)
    return np.abs(actual - expected).max() / np.abs(expected).max()


def masked_to_zero(ids, first, e):
    """What is elsewhere becomes expert 0 (with the weight it had)."""
    return jnp.where((ids >= first) & (ids < first + e), ids - first, 0)


def masked_by_quotient(ids, first, e):
    """-1 / e is 0 where division truncates, so padding belongs to device 0, expert e - 1."""
    here = lax.div(ids, jnp.int32(e)) == lax.div(first, jnp.int32(e))
    return jnp.where(here, ids % e, -1)


def minus_one_kept(ids, first, e):
    """Only the upper bound is compared, and an index is clipped: -1 is expert 0 somewhere."""
    return jnp.where(ids < first + e, jnp.maximum(ids - first, 0), -1)


def scales_cut_otherwise(layout, ffn, mesh):
    """Blocks by expert then tensor, scales by tensor then expert: equal shapes, other rows."""
    specs = sharding.expert_specs(layout, ffn, mesh)
    return specs | {"gate_up_scales": jax.P("tensor", "expert", None)}


def returned_by_choice(back_RCD, rank_nJ, slot_nJ):
    """The j-th device of the axis instead of the j-th that the token went to."""
    by_choice = jnp.broadcast_to(jnp.arange(rank_nJ.shape[1]), rank_nJ.shape)
    return back_RCD[by_choice, jnp.clip(slot_nJ, 0, back_RCD.shape[1] - 1)]


SABOTAGE = {
    "masked to 0": ("_local_ids", masked_to_zero, "expert=2", "all_reduce", "upper half"),
    "shifted": ("_local_ids", masked_by_quotient, "expert=2", "all_reduce", "holes"),
    "-1 kept": ("_local_ids", minus_one_kept, "expert=2", "all_to_all", "holes"),
    "bias per shard": ("_bias_once", lambda e, cut: e, "tensor=2", "all_reduce", "even"),
    "scales": (
        "expert_specs",
        scales_cut_otherwise,
        "expert=2,tensor=2",
        "all_reduce",
        "even",
    ),
    "order": ("_returned", returned_by_choice, "expert=4", "all_to_all", "even"),
    "drops": ("_rounds", lambda fullest, slots: 1, "expert=2", "all_to_all", "one expert"),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_the_mistake_is_noticed(monkeypatch, name):
    function, mistake, mesh, how, routing = SABOTAGE[name]
    layout = "checkpoint" if name == "scales" else "dense"
    monkeypatch.setattr(dispatch, function, mistake)
    wrong = largest_error(mesh, how, layout, routing)
    assert wrong > 1000 * FLOAT32_OP, f"{name} changed the result by {wrong:.2g} only"


def test_without_mistakes_there_is_no_error():
    # The same measure on the mesh and routing that most of the mistakes use.
    assert largest_error("expert=2", "all_to_all", "dense", "holes") < FLOAT32_OP
