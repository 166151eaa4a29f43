"""The definition: one expert after another, every token through each, slow and obvious."""

import jax
import jax.numpy as jnp
from jax import Array

from .swiglu import swiglu_of_rows
from .weights import ExpertWeights

HIGHEST = jax.lax.Precision.HIGHEST


def one_expert(
    x_ND: Array, gate_up_PD: Array, bias_P: Array, down_DF: Array, bias_D: Array, *, limit, alpha
) -> Array:
    """float32 [N, D]: down(swiglu(gate_up(x) + bias)) + bias, hidden values in x's dtype."""
    h_NP = jnp.einsum(
        "ND,PD->NP",
        x_ND,
        gate_up_PD.astype(x_ND.dtype),
        precision=HIGHEST,
        preferred_element_type=jnp.float32,
    ) + bias_P.astype(jnp.float32)
    h_NF = swiglu_of_rows(h_NP, limit=limit, alpha=alpha).astype(x_ND.dtype)
    return jnp.einsum(
        "NF,DF->ND",
        h_NF,
        down_DF.astype(x_ND.dtype),
        precision=HIGHEST,
        preferred_element_type=jnp.float32,
    ) + bias_D.astype(jnp.float32)


def expert_matmul(
    x_ND: Array,
    ids_NX: Array,
    weights_NX: Array,
    experts: ExpertWeights,
    *,
    limit: float | None,
    alpha: float,
    out_dtype: jnp.dtype,
) -> Array:
    """sum over x of weights[n, x] * expert(ids[n, x])(row n), in float32 and in the order of x."""
    dense = experts.dense(x_ND.dtype)
    every_NED = jnp.stack(
        [
            one_expert(
                x_ND,
                dense.gate_up[e],
                dense.gate_up_bias[e],
                dense.down[e],
                dense.down_bias[e],
                limit=limit,
                alpha=alpha,
            )
            for e in range(dense.count)
        ],
        axis=1,
    )
    out_ND = jnp.zeros(x_ND.shape, jnp.float32)
    for x in range(ids_NX.shape[1]):
        ids_N = ids_NX[:, x]
        here_N = (ids_N >= 0) & (ids_N < dense.count)
        row_N = jnp.where(here_N, ids_N, 0)
        chosen_ND = jnp.take_along_axis(every_NED, row_N[:, None, None], axis=1)[:, 0]
        # Selected, not multiplied by zero: an expert that nobody chose may hold NaN.
        term_ND = weights_NX[:, x, None].astype(jnp.float32) * chosen_ND
        out_ND = out_ND + jnp.where(here_N[:, None], term_ND, 0.0)
    return out_ND.astype(out_dtype)
