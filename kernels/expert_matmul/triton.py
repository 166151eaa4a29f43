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
    order: str = "natural"  # of activations, see grouped.to_order


# Data-centre GPUs give a program 160 KB of shared memory or more; others 99 KB.
ROOMY = ("A100", "H100", "H200", "H800", "H20", "B200")


def heuristic(tokens: int, chosen: int, experts: int, device_kind: str = "") -> Plan:
    """For devices and shapes that nobody has measured: what an H200 showed, by rows an expert.

    8 rows a tile beat 16 at 1 and at 32 tokens (a tensor core pays for rows that are not there),
    32 beat 16 and 64 at 128 tokens: about twice the mean number of rows of an expert.
    """
    decode = Shape(groups=8, lanes=4, stages=3)
    if tokens <= 2:
        down = dataclasses.replace(decode, split=4)  # else 92 programs for 132 processors
        return Plan(rows=8, direct=True, gate_up=decode, down=down)
    mean = tokens * chosen / experts
    rows = min(128, max(8, 1 << math.ceil(math.log2(max(2 * mean, 1)))))
    if rows == 8:
        return Plan(rows=8, direct=False, gate_up=decode, down=decode)
    if rows <= 32:
        few = Shape(groups=4, lanes=8, stages=3)
        return Plan(rows=rows, direct=False, gate_up=few, down=few)
    many = Shape(groups=4, lanes=8, stages=2)
    if any(name in device_kind for name in ROOMY):
        many = Shape(groups=4, lanes=8, stages=3, cols=128, warps=8)
    return Plan(rows=rows, direct=False, gate_up=many, down=many, order="chunked")


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
    """A Plan from its JSON form: `dataclasses.asdict` of one, and the figures beside it."""
    shapes = {name: Shape(**entry[name]) for name in ("gate_up", "down")}
    names = {field.name for field in dataclasses.fields(Plan)}
    return Plan(**{k: v for k, v in entry.items() if k in names} | shapes)


def choose_plan(
    tokens: int, chosen: int, experts: int, embed: int, ffn: int, device_kind: str
) -> Plan:
    """The measured plan of the nearest number of tokens within a factor of 2, else a heuristic."""
    plans = tuned(device_kind).get(f"{embed},{ffn},{experts},{chosen}", {})
    near = [n for n in plans if n <= 2 * tokens and tokens < 2 * n]
    if not near:
        return heuristic(tokens, chosen, experts, device_kind)
    return plans[min(near, key=lambda n: abs(math.log2(n / tokens)))]


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


# A jit of its own: a model of 24 layers then traces the kernels once, not 24 times 0.3 s.
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
    common = dict(rows=plan.rows, wide=wide, order=plan.order, interpret=interpret)
    x_ND = grouped.to_order(x_ND, plan.order)
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
