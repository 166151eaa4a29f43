"""The compiled parts of generation: the prefill of one chunk, and the whole decoding loop.

Between calls a row is: what its cache holds, and one token that is drawn (or the prompt's last)
but not yet run through the model. So a prompt of L tokens prefills L - 1, prefill needs no logits,
and n decode steps run the model n times:

    prompt  a b c          cache: a b        token: c
    step 0  c -> d         cache: a b c      token: d       written out: d
    step 1  d -> stop      cache: a b c d    finished, not written out
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from . import cache as caches
from .cache import Cache
from .config import Config
from .sampling import Plan, sample
from .sharding import Rules

RUNNING, STOPPED, BAD = 0, 1, 2


class Rows(NamedTuple):
    """Where every row stands. The position of `token` is the cache's length."""

    token_B: Int[Array, " B"]  # int32, not yet in the cache
    status_B: Int[Array, " B"]  # int32: RUNNING, STOPPED (on a stop token), BAD (logits)
    step: Int[Array, ""]  # int32: tokens drawn before
    seen_BV: Bool[Array, "B V"] | None  # with a repetition penalty: tokens in prompt and output


class Drawn(NamedTuple):
    """What one decode call wrote. Row b holds count[b] tokens; behind them are zeros."""

    token_BR: Int[Array, "B R"]  # int32
    logprob_BR: Float[Array, "B R"] | None
    top_ids_BRL: Int[Array, "B R L"] | None
    top_logprobs_BRL: Float[Array, "B R L"] | None
    count_B: Int[Array, " B"]  # int32; the stop token is not counted
    status_B: Int[Array, " B"]  # int32
    step: Int[Array, ""]  # int32: tokens drawn so far, by rows still running


class Request(NamedTuple):
    """What stays the same through a generation."""

    seeds_B2: Array  # uint32, of sampling.seed_words
    stops: Array  # int32, padded with -1, which is no token
    knobs: tuple  # sampling.Knobs


def prefill(model, cache: Cache, tokens_BT, start, length_B) -> Cache:
    """The cache after tokens start .. start + T of each row, of which only those before length[b]
    are real. Nothing of the last layer behind its keys and values is computed (XLA drops it)."""
    place_T = start + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    positions_BT = jnp.where(place_T < length_B[:, None], place_T, -1)
    return model.hidden(tokens_BT, positions_BT, cache)[1]


def decode(
    model, cache: Cache, rows: Rows, request: Request, n, *, plan: Plan, room: int
) -> tuple[Cache, Rows, Drawn]:
    """Up to n <= room tokens for every row that runs, in one loop that ends when none does.

    What can be one kernel is: a step of 20b at one row takes 1.79 ms on an H200, 180 launches that
    run for 1.74 ms. In a CUDA graph some 0.3 us go by between two of them.
    """
    B, first = rows.token_B.shape[0], rows.step
    drawn = Drawn(
        token_BR=jnp.zeros((B, room), jnp.int32),
        logprob_BR=jnp.zeros((B, room), jnp.float32) if plan.logprobs else None,
        top_ids_BRL=jnp.zeros((B, room, plan.top), jnp.int32) if plan.top else None,
        top_logprobs_BRL=jnp.zeros((B, room, plan.top), jnp.float32) if plan.top else None,
        count_B=jnp.zeros(B, jnp.int32),
        status_B=rows.status_B,
        step=rows.step,
    )

    def goes_on(carry):
        i, _, rows, _ = carry
        return (i < n) & jnp.any(rows.status_B == RUNNING)

    def advance(carry):
        i, cache, rows, drawn = carry
        running_B = rows.status_B == RUNNING
        positions_BT = jnp.where(running_B, cache.length_B, -1)[:, None]
        x_BTD, cache = model.hidden(rows.token_B[:, None], positions_BT, cache)
        logits_BV = _whole(model.logits(x_BTD[:, 0]), model.mesh)
        step = first + i
        draw = sample(logits_BV, request.seeds_B2, step, request.knobs, plan, rows.seen_BV)

        stop_B = functools.reduce(jnp.logical_or, [draw.token_B == s for s in request.stops])
        status_B = jnp.where(draw.bad_B, BAD, jnp.where(stop_B, STOPPED, RUNNING))
        status_B = jnp.where(running_B, status_B, rows.status_B).astype(jnp.int32)
        kept_B = status_B == RUNNING
        token_B = jnp.where(kept_B, draw.token_B, rows.token_B)
        seen_BV = rows.seen_BV
        if seen_BV is not None:
            seen_BV = seen_BV.at[jnp.arange(B), token_B].set(True)
        rows = Rows(token_B, status_B, rows.step, seen_BV)

        def write(buffer, value):
            """Column i, zeros for rows that wrote nothing. i < room, so nothing need check it."""
            if buffer is None:
                return None
            kept = kept_B.reshape(-1, *[1] * (value.ndim - 1))
            column = jnp.where(kept, value, 0)[:, None]
            return jax.lax.dynamic_update_slice_in_dim(buffer, column, i, axis=1)

        drawn = Drawn(
            token_BR=write(drawn.token_BR, draw.token_B),
            logprob_BR=write(drawn.logprob_BR, draw.logprob_B),
            top_ids_BRL=write(drawn.top_ids_BRL, draw.top_ids_BL),
            top_logprobs_BRL=write(drawn.top_logprobs_BRL, draw.top_logprobs_BL),
            count_B=drawn.count_B + kept_B.astype(jnp.int32),
            status_B=status_B,
            step=drawn.step,
        )
        return i + 1, cache, rows, drawn

    carry = (jnp.int32(0), cache, rows, drawn)
    i, cache, rows, drawn = jax.lax.while_loop(goes_on, advance, carry)
    step = first + i
    return cache, rows._replace(step=step), drawn._replace(step=step)


class Programs:
    """The compiled functions for one model structure; parameters come as a list of arrays.

    The cache is donated: the one passed in is gone, and its memory is the new one's.
    """

    def __init__(self, graph, tree, config: Config, mesh: Mesh | None, *, gpu: bool):
        def model(leaves):
            return nnx.merge(graph, jax.tree.unflatten(tree, leaves))

        def run_empty(batch, capacity, dtype):
            return _placed(caches.make(config, batch, capacity, dtype), config, mesh)

        def run_prefill(leaves, cache, tokens_BT, start, length_B):
            cache = prefill(model(leaves), cache, tokens_BT, start, length_B)
            return _placed(cache, config, mesh)

        def run_decode(leaves, cache, rows, request, n, plan, room):
            cache, *rest = decode(model(leaves), cache, rows, request, n, plan=plan, room=room)
            return _placed(cache, config, mesh), *jax.tree.map(lambda x: _whole(x, mesh), rest)

        self.empty = jax.jit(run_empty, static_argnums=(0, 1, 2))
        self.prefill = jax.jit(run_prefill, donate_argnums=1)
        self.decode = jax.jit(
            run_decode,
            static_argnums=(5, 6),
            donate_argnums=1,
            compiler_options=_ONE_GRAPH if gpu else None,
        )


# Puts the whole while loop into one CUDA graph. Without WHILE each step's launches are captured
# anew between two reads of the condition by the host; with a minimum size of 5 the loop, one node,
# is not captured at all.
_ONE_GRAPH = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
    "xla_gpu_graph_min_graph_size": "1",
}

# Keyed by structure alone, so it holds no arrays. Eight: a notebook that compares backends.
programs = functools.lru_cache(maxsize=8)(Programs)


def _placed(cache: Cache, config: Config, mesh: Mesh | None) -> Cache:
    """The same cache: keys and values by rows and heads as the rules say, positions whole.

    JAX pairs donated arguments with results by shape and dtype alone, so a [B] that is cut and a
    [B] that is whole must not meet in one program.
    """
    if mesh is None:
        return cache
    cut = NamedSharding(mesh, Rules.fit(config, mesh).spec("batch", "kv_heads", "slots", "head"))

    def place(x):
        return jax.lax.with_sharding_constraint(x, cut) if x.ndim == 4 else _whole(x, mesh)

    return jax.tree.map(place, cache)


def _whole(x, mesh: Mesh | None):
    """The same array, on every device of the mesh."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))
