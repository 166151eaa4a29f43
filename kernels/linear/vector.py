"""One or a few rows times a matrix, bound by reading the matrix once: a Pallas-Triton kernel.

    program: `rows` rows of the weight, whole. A warp holds rows/warps of them, 8 bfloat16 a lane:

        weight [rows, 256] at a time   |lane 0: 8|lane 1: 8| ... |lane 31: 8|   <- 512 bytes a row
        x      [rows, 256]             the same lanes, the same columns (from L1)

All loads of the weight are independent, so that a program has its bytes in flight at once, and no
sum crosses a warp. RMSNorm is folded in: its sum of squares rides along with the product, and its
factor is applied to the sum,

    sum_i w_i (x_i r s_i) = r sum_i w_i x_i s_i,    r = 1 / sqrt(mean(x^2) + eps)

which saves a launch and the rounding of the normed x to bfloat16.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float


def linear(
    x_NI: Float[Array, "N I"],
    weight_OI: Float[Array, "O I"],
    bias_O: Float[Array, " O"] | None = None,
    *,
    norm_I: Float[Array, " I"] | None = None,
    eps: float = 1e-5,
    residual_NO: Float[Array, "N O"] | None = None,
    rows: int = 2,
    columns: int = 256,
    warps: int = 1,
    interpret: bool = False,
) -> Float[Array, "N O"]:
    """`rows` of the weight a program, `columns` a load (powers of two)."""
    N = x_NI.shape[0]
    n_out = weight_OI.shape[0]
    optional = {"bias": bias_O, "norm": norm_I, "residual": residual_NO}
    given = {name: array for name, array in optional.items() if array is not None}
    return pl.pallas_call(
        functools.partial(_kernel, names=tuple(given), rows=rows, columns=columns, eps=eps),
        grid=(pl.cdiv(n_out, rows),),
        out_shape=jax.ShapeDtypeStruct((N, n_out), x_NI.dtype),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=f"linear_vector_{N}",
    )(x_NI, weight_OI, *given.values())


def _kernel(x_ref, w_ref, *refs, names, rows, columns, eps):
    *optional, out_ref = refs
    optional = dict(zip(names, optional, strict=True))
    N, n_in = x_ref.shape
    n_out = w_ref.shape[0]
    o = pl.program_id(0) * rows + jnp.arange(rows)
    o_near = jnp.minimum(o, n_out - 1)[:, None]

    def load(ref, row, start, **how):
        """Columns from `start`, of one row or of each of `rows`, as [rows, columns]."""
        i = start + jnp.arange(columns)[None, :]
        if start + columns > n_in:
            how |= {"mask": jnp.broadcast_to(i < n_in, (rows, columns)), "other": 0}
        i = jnp.broadcast_to(i, (rows, columns))
        index = (jnp.broadcast_to(row, (rows, 1)), i) if len(ref.shape) == 2 else (i,)
        return plt.load(ref.at[index], **how)

    starts = range(0, n_in, columns)
    weights = [load(w_ref, o_near, start).astype(jnp.float32) for start in starts]
    for n in range(N):
        products = squares = jnp.zeros((rows, columns), jnp.float32)
        for start, w in zip(starts, weights, strict=True):
            x = load(x_ref, n, start).astype(jnp.float32)
            squares += x * x
            if "norm" in optional:
                x *= load(optional["norm"], None, start).astype(jnp.float32)
            products += w * x
        out = jnp.sum(products, axis=1)
        if "norm" in optional:
            out *= jax.lax.rsqrt(jnp.sum(squares, axis=1) / n_in + eps)
        if "bias" in optional:
            out += plt.load(optional["bias"].at[o_near[:, 0]]).astype(jnp.float32)
        if "residual" in optional:
            out += plt.load(optional["residual"].at[n, o_near[:, 0]]).astype(jnp.float32)
        plt.store(out_ref.at[n, o], out.astype(out_ref.dtype), mask=o < n_out)
