"""A dense form for training large expert counts: rows sorted by expert, XLA's ragged matmul."""

import jax
import jax.numpy as jnp
from jax import Array

from .swiglu import swiglu_of_rows
from .weights import ExpertWeights


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
    """As the reference; differentiable in x, the routing weights and the experts.

    On a GPU `ragged_dot` expands densely (24 TFLOP/s measured on an H200 where a matmul makes 750).
    Rows beyond the groups are zero on a CPU and unspecified elsewhere, so they are selected away.
    """
    rows, chosen = ids_NX.size, ids_NX.shape[1]
    ids_M = ids_NX.reshape(-1)
    here_M = (ids_M >= 0) & (ids_M < experts.count)
    id_M = jnp.where(here_M, ids_M, experts.count)
    order_M = jnp.argsort(id_M, stable=True)
    sorted_M = id_M[order_M]
    size_E = jnp.sum(id_M[:, None] == jnp.arange(experts.count), axis=0, dtype=jnp.int32)
    live_M1 = (sorted_M < experts.count)[:, None]
    expert_M = jnp.where(live_M1[:, 0], sorted_M, 0)

    def grouped(x, w_EOI, bias_EO):
        w_EIO = jnp.swapaxes(w_EOI, 1, 2).astype(x.dtype)
        highest = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        y = jax.lax.ragged_dot(
            x, w_EIO, size_E, precision=highest, preferred_element_type=jnp.float32
        )
        return jnp.where(live_M1, y + bias_EO.astype(jnp.float32)[expert_M], 0.0)

    h_MP = grouped(x_ND[order_M // chosen], experts.gate_up, experts.gate_up_bias)
    h_MF = swiglu_of_rows(h_MP, limit=limit, alpha=alpha).astype(x_ND.dtype)
    y_MD = grouped(h_MF, experts.down, experts.down_bias)
    inverse_M = jnp.zeros(rows, jnp.int32).at[order_M].set(jnp.arange(rows, dtype=jnp.int32))
    y_NXD = y_MD[inverse_M].reshape(*ids_NX.shape, -1)
    weights_NX = jnp.where(here_M.reshape(ids_NX.shape), weights_NX.astype(jnp.float32), 0.0)
    out_ND = jnp.zeros(x_ND.shape, jnp.float32)
    for x in range(chosen):
        out_ND = out_ND + weights_NX[:, x, None] * y_NXD[:, x]
    return out_ND.astype(out_dtype)
