"""The Triton form: plan, schedule, two grouped matmuls and a combine; four or five launches."""

import dataclasses
import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
from jax import Array

from ..routing import bound
from ..routing.in_kernel import make_tiles
from . import grouped
from .grouped import Shape
from .weights import ExpertWeights

TUNED = pathlib.Path(__file__).parent.parent / "tuned"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How one layer is computed at one number of tokens.

    direct: every (token, choice) is a tile of its own, no schedule: for a token or two, where an
    expert is hardly ever read twice. partial: dtype of the rows that combine reads.
    """

    rows: int  # of a tile: 8 or more; a power of two
    direct: bool
    gate_up: Shape
    down: Shape
    partial: str = "float32"
    chunked: bool = False  # activations in chunked order, see grouped.to_chunked


def heuristic(tokens: int, chosen: int, experts: int) -> Plan:
    """For devices and shapes that nobody has measured: what won on an H200, by rows an expert."""
    if tokens * chosen <= 2 * chosen:
        decode = Shape(groups=8, lanes=4, stages=3)
        return Plan(rows=16, direct=True, gate_up=decode, down=dataclasses.replace(decode, split=2))
    mean = tokens * chosen / experts
    rows = min(128, max(16, 1 << math.ceil(math.log2(max(mean, 1)))))
    if rows <= 32:
        shape = Shape(groups=8, lanes=4, stages=3)
    else:
        shape = Shape(groups=4, lanes=8, stages=3, cols=128, warps=8)
    return Plan(rows=rows, direct=False, gate_up=shape, down=shape, chunked=rows > 32)


@functools.cache
def tuned(device_kind: str) -> dict:
    """{"D,F,E,X": {tokens: Plan}} of kernels/tuned, empty for a device that is not there."""
    file = TUNED / (device_kind.lower().replace(" ", "_") + ".json")
    if not file.exists():
        return {}
    table = json.loads(file.read_text())
    return {
        key: {int(tokens): plan_from(entry) for tokens, entry in plans.items()}
        for key, plans in table["plans"].items()
    }


def plan_from(entry: dict) -> Plan:
    """A Plan from its JSON form."""
    return Plan(
        rows=entry["rows"],
        direct=entry["direct"],
        gate_up=Shape(**entry["gate_up"]),
        down=Shape(**entry["down"]),
        partial=entry["partial"],
        chunked=entry["chunked"],
    )


def choose_plan(
    tokens: int, chosen: int, experts: int, embed: int, ffn: int, device_kind: str
) -> Plan:
    """The measured plan of the next larger number of tokens at these widths, else a heuristic."""
    plans = tuned(device_kind).get(f"{embed},{ffn},{experts},{chosen}")
    if not plans:
        return heuristic(tokens, chosen, experts)
    larger = [n for n in plans if n >= tokens]
    return plans[min(larger) if larger else max(plans)]


def expert_matmul(
    x_ND: Array,
    ids_NX: Array,
    weights_NX: Array,
    experts: ExpertWeights,
    *,
    limit: float | None,
    alpha: float,
    out_dtype: jnp.dtype,
    plan: Plan | None = None,
    interpret: bool = False,
) -> Array:
    """As the reference, from lanes; x in bfloat16. plan None: the tuned one, or a heuristic.

    Raises:
        NotImplementedError: for activations that are not bfloat16.
    """
    if x_ND.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"triton experts multiply bfloat16 activations; got {x_ND.dtype}. Use backend='xla'."
        )
    tokens, chosen = ids_NX.shape
    if plan is None:
        kind = "interpreted" if interpret else _device_kind()
        plan = choose_plan(tokens, chosen, experts.count, experts.embed, experts.ffn, kind)
    return _layer(
        x_ND,
        ids_NX,
        weights_NX,
        experts,
        limit=limit,
        alpha=alpha,
        out_dtype=out_dtype,
        plan=plan,
        interpret=interpret,
    )


# A jit of its own: a model of 24 layers then traces and lowers the kernels once, not 24 times 0.3 s.
@functools.partial(jax.jit, static_argnames=("limit", "alpha", "out_dtype", "plan", "interpret"))
def _layer(x_ND, ids_NX, weights_NX, experts, *, limit, alpha, out_dtype, plan, interpret):
    chosen = ids_NX.shape[1]
    wide = experts.layout == "triton_wide"
    ids_M = ids_NX.reshape(-1)
    if plan.direct:
        stride = 1
        expert_T, size_T, row_S, slot_M = ids_M, None, None, ids_M
    else:
        stride = plan.rows
        count = bound(ids_M.size, experts.count, plan.rows)
        expert_T, size_T, row_S, slot_M = make_tiles(
            ids_M, experts.count, plan.rows, count, interpret=interpret
        )
    common = dict(rows=plan.rows, wide=wide, chunked=plan.chunked, interpret=interpret)
    if plan.chunked:
        x_ND = grouped.to_chunked(x_ND)
    h_SF = grouped.gate_up(
        x_ND,
        expert_T,
        size_T,
        row_S,
        experts.gate_up_blocks,
        experts.gate_up_scales,
        experts.gate_up_bias,
        chosen=chosen,
        shape=plan.gate_up,
        limit=limit,
        alpha=alpha,
        **common,
    )
    y_KSD = grouped.down(
        h_SF,
        expert_T,
        size_T,
        experts.down_blocks,
        experts.down_scales,
        experts.down_bias,
        stride=stride,
        shape=plan.down,
        out_dtype=jnp.dtype(plan.partial),
        **common,
    )
    return grouped.combine(
        y_KSD,
        slot_M.reshape(ids_NX.shape),
        weights_NX,
        direct=experts.count if plan.direct else None,
        out_dtype=out_dtype,
        interpret=interpret,
    )


def _device_kind() -> str:
    """The GPU that runs here, or the one that a host without one compiles for."""
    kinds = {d.device_kind for d in jax.devices() if d.platform == "gpu"}
    return kinds.pop() if len(kinds) == 1 else "NVIDIA H200"
