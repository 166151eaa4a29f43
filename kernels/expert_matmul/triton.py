"""The Triton form: which plan, and the launches of each.

Of a token or a few, two: gate_up, which ranks the logits itself, and down, which sums. Up to 128
tokens four: route, gate_up, down, combine. Of more six: top_k, count, place, and those three.
"""

import dataclasses
import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
from jax import Array

from ..routing import bound, in_kernel
from . import grouped, row
from .grouped import How, Shape, Tiles
from .packed import to_order
from .weights import ExpertWeights

TUNED = pathlib.Path(__file__).parent.parent / "tuned"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How one layer is computed at one number of tokens.

    direct: every (token, choice) is a tile of its own, no schedule: for a token or a few, where an
    expert is hardly ever read twice. partial: dtype of the rows that combine reads.
    """

    rows: int  # of a tile: 8 or more; a power of two; without meaning where direct
    direct: bool
    gate_up: Shape
    down: Shape
    partial: str = "float32"
    order: str = "natural"  # of activations, see `packed`


# Data-centre GPUs give a program 160 KB of shared memory or more; others 99 KB.
ROOMY = ("A100", "H100", "H200", "H800", "H20", "B200")


def heuristic(
    tokens: int, chosen: int, experts: int, device_kind: str = "", layout: str = "triton"
) -> Plan:
    """For devices and shapes that nobody has measured: what an H200 showed, by rows an expert.

    8 rows a tile beat 16 at 1 and at 32 tokens (a tensor core pays for rows that are not there),
    32 beat 16 and 64 at 128 tokens: about twice the mean number of rows of an expert.
    """
    if layout == "mosaic":
        return _of_fragments(tokens, chosen, experts)
    roomy = any(name in device_kind for name in ROOMY)
    decode = Shape(groups=8, lanes=4, stages=3)
    if tokens <= 2:
        gate_up = dataclasses.replace(decode, cols=16, parts=4)
        down = summing(chosen, stages=3 if roomy else 2)
        return Plan(rows=8, direct=True, gate_up=gate_up, down=down)
    mean = tokens * chosen / experts
    rows = min(128, max(8, 1 << math.ceil(math.log2(max(2 * mean, 1)))))
    if rows == 8:
        return Plan(rows=8, direct=False, gate_up=decode, down=decode)
    if rows <= 32:
        few = Shape(groups=4, lanes=8, stages=3)
        return Plan(rows=rows, direct=False, gate_up=few, down=few)
    many = Shape(groups=4, lanes=8, stages=2)
    if roomy:
        many = Shape(groups=4, lanes=8, stages=3, cols=128, warps=8)
    return Plan(rows=rows, direct=False, gate_up=many, down=many, order="chunked")


def _of_fragments(tokens: int, chosen: int, experts: int) -> Plan:
    """On a Hopper: 8 blocks a step cost 3.2 instructions a weight, 4 cost 3.3 and 2 3.5.

    Programs of 2 warps won from 4 to 64 tokens, by 1 to 7 % over 4 warps.
    """
    if tokens <= 2:
        gate_up = Shape(cols=32, parts=4, groups=4, warps=8)
        down = summing(chosen, cols=8)
        return Plan(rows=8, direct=True, gate_up=gate_up, down=down, order="fragment")
    mean = tokens * chosen / experts
    rows = min(64, max(8, 1 << math.ceil(math.log2(max(2 * mean, 1)))))
    few = Shape(groups=8, cols=32, warps=2) if rows <= 16 else Shape(groups=4, stages=4)
    return Plan(rows=rows, direct=False, gate_up=few, down=few, order="fragment")


def summing(chosen: int, cols: int = 16, stages: int = 3) -> Shape:
    """For row.down: 16 weight rows a warp, and K in two where 8 columns hold all choices twice."""
    choices = 1 << (chosen - 1).bit_length()
    parts = max(1, row.ROWS // choices)
    warps = max(1, choices * parts * cols // 16)
    return Shape(cols=cols, parts=parts, groups=8, lanes=4, warps=warps, stages=stages)


@functools.cache
def tuned(device_kind: str) -> dict:
    """{layout: {"D,F,E,X": {tokens: Plan}}} of kernels/tuned; empty for a device not measured."""
    file = TUNED / (device_kind.lower().replace(" ", "_") + ".json")
    if not file.exists():
        return {}
    table = json.loads(file.read_text())
    return {
        layout: {
            key: {int(tokens): plan_from(entry) for tokens, entry in plans.items()}
            for key, plans in by_shape.items()
        }
        for layout, by_shape in table["plans"].items()
    }


def plan_from(entry: dict) -> Plan:
    """A Plan from its JSON form: `dataclasses.asdict` of one, and the figures beside it."""
    shapes = {name: Shape(**entry[name]) for name in ("gate_up", "down")}
    names = {field.name for field in dataclasses.fields(Plan)}
    return Plan(**{k: v for k, v in entry.items() if k in names} | shapes)


def choose_plan(
    tokens: int,
    chosen: int,
    experts: int,
    embed: int,
    ffn: int,
    device_kind: str,
    layout: str = "triton",
) -> Plan:
    """The measured plan of the nearest number of tokens within a factor of 2, else a heuristic."""
    by_shape = tuned(device_kind).get(layout, {})
    plans = by_shape.get(f"{embed},{ffn},{experts},{chosen}", {})
    near = [n for n in plans if n <= 2 * tokens and tokens < 2 * n]
    if not near:
        return heuristic(tokens, chosen, experts, device_kind, layout)
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
    total: int | None = None,
    plan: Plan | None = None,
    interpret: bool = False,
) -> Array:
    """As the reference, from lanes or fragments; x in bfloat16.

    plan None: the tuned one, or a heuristic, for `total` experts (None: those at hand).

    Raises:
        NotImplementedError: for activations that are not bfloat16.
    """
    tokens, chosen = ids_NX.shape
    plan = _planned(plan, x_ND, chosen, experts, total or experts.count, interpret)
    given = dict(ids_NX=ids_NX, weights_NX=weights_NX)
    how = dict(limit=limit, alpha=alpha, out_dtype=out_dtype, plan=plan, interpret=interpret)
    return _layer(x_ND, given, experts, None, chosen=chosen, **how)


def mixture(
    x_ND: Array,
    logits_NE: Array,
    live_N: Array,
    experts: ExpertWeights,
    residual_ND: Array,
    *,
    chosen: int,
    limit: float | None,
    alpha: float,
    plan: Plan | None = None,
    interpret: bool = False,
) -> Array:
    """As the package's `mixture`, with the choice of experts and both ends in the kernels."""
    plan = _planned(plan, x_ND, chosen, experts, experts.count, interpret)
    given = dict(logits_NE=logits_NE, live_N=live_N.astype(jnp.int32))
    how = dict(limit=limit, alpha=alpha, plan=plan, interpret=interpret)
    out_dtype = residual_ND.dtype
    return _layer(x_ND, given, experts, residual_ND, chosen=chosen, out_dtype=out_dtype, **how)


def _planned(plan, x_ND, chosen, experts, total, interpret) -> Plan:
    if x_ND.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"triton experts multiply bfloat16 activations; got {x_ND.dtype}. Use backend='xla'."
        )
    if plan is not None:
        return plan
    kind = "interpreted" if interpret else _device_kind()
    sizes = (x_ND.shape[0], chosen, total, experts.embed, experts.ffn)
    return choose_plan(*sizes, kind, experts.layout.removesuffix("_wide"))


# A jit of its own: a model of 24 layers then traces the kernels once, not 24 times 0.3 s.
@functools.partial(
    jax.jit, static_argnames=("chosen", "limit", "alpha", "out_dtype", "plan", "interpret")
)
def _layer(x_ND, given, experts, residual_ND, *, chosen, limit, alpha, out_dtype, plan, interpret):
    """given: logits_NE and live_N, or ids_NX and weights_NX."""
    wide = experts.layout.endswith("_wide")
    # Of a token or a few x stays as it is: gathered in a kernel it costs less than a launch.
    x_order = "natural" if plan.direct else plan.order
    gate_up_how = How(plan.gate_up, wide, x_order, interpret)
    down_how = How(plan.down, wide, plan.order, interpret)
    gate_up = _blocks(experts, "gate_up"), experts.gate_up_scales, experts.gate_up_bias
    down = _blocks(experts, "down"), experts.down_scales, experts.down_bias
    gated = dict(chosen=chosen, how=gate_up_how, limit=limit, alpha=alpha)
    if plan.direct:
        gated["h_order"] = plan.order
        summed = dict(chosen=chosen, how=down_how, out_dtype=out_dtype)
        if "ids_NX" in given:
            ids_M, weight_M = given["ids_NX"].reshape(-1), given["weights_NX"].reshape(-1)
            (h_MF,) = row.gate_up(x_ND, (ids_M,), *gate_up, **gated)
            return row.down(h_MF, ids_M, weight_M, *down, residual_ND, softmax=False, **summed)
        choice = given["logits_NE"], given["live_N"]
        h_MF, ids_M, logit_M = row.gate_up(x_ND, choice, *gate_up, **gated)
        return row.down(h_MF, ids_M, logit_M, *down, residual_ND, softmax=True, **summed)

    weights_NX, tiles, slot_M = _schedule(given, chosen, experts.count, plan.rows, interpret)
    x_ND = to_order(x_ND, plan.order)
    h_SF = grouped.gate_up(x_ND, tiles, *gate_up, rows=plan.rows, **gated)
    partial = jnp.dtype(plan.partial)
    y_SD = grouped.down(h_SF, tiles, *down, rows=plan.rows, how=down_how, out_dtype=partial)
    last = dict(out_dtype=out_dtype, interpret=interpret)
    return grouped.combine(y_SD, slot_M, weights_NX, residual_ND, **last)


def _blocks(experts: ExpertWeights, name: str) -> Array:
    """Fragments with the 1024 lanes of a tile in one axis; lanes as they are. Moves nothing."""
    blocks = getattr(experts, f"{name}_blocks")
    fragments = experts.layout.startswith("mosaic")
    return blocks.reshape(*blocks.shape[:3], -1) if fragments else blocks


def _schedule(given, chosen, experts, rows, interpret) -> tuple[Array, Tiles, Array]:
    """The weights, the tiles, and the slot of every (token, choice)."""
    if "logits_NE" in given:
        logits_NE, live_N = given["logits_NE"], given["live_N"]
        tokens = logits_NE.shape[0]
        count = bound(tokens * chosen, experts, rows)
        if tokens <= 128 and logits_NE.size <= in_kernel.MOST_ROUTED:
            weights_NX, *tiles, slot_M = in_kernel.route(
                logits_NE, chosen, live_N, rows, count, interpret=interpret
            )
            return weights_NX, Tiles(*tiles), slot_M
        ids_NX, weights_NX = in_kernel.top_k(logits_NE, chosen, live_N, interpret=interpret)
    else:
        ids_NX, weights_NX = given["ids_NX"], given["weights_NX"]
        count = bound(ids_NX.size, experts, rows)
    ids_M = ids_NX.reshape(-1)
    *tiles, slot_M = in_kernel.make_tiles(ids_M, experts, rows, count, interpret=interpret)
    return weights_NX, Tiles(*tiles), slot_M


def _device_kind() -> str:
    """The GPU that runs here, or the one that a host without one compiles for."""
    kinds = {d.device_kind for d in jax.devices() if d.platform == "gpu"}
    return kinds.pop() if len(kinds) == 1 else "NVIDIA H200"
