"""One or a few rows times a matrix, bound by reading the matrix once: a Pallas-Triton kernel.

    program: `rows` rows of the weight, whole, `together` at a time. A warp's lanes hold 8 bfloat16:

        weight [together, 256] at a time   |lane 0: 8|lane 1: 8| ... |lane 31: 8|   <- 512 bytes
        x      the same lanes, the same columns, held in registers for all the rows

All loads of those rows are independent, so that a warp has them in flight at once, and no sum
crosses a warp. RMSNorm is folded in: its sum of squares rides along with the product, and its
factor is applied to the sum,

    sum_i w_i (x_i r s_i) = r sum_i w_i x_i s_i,    r = 1 / sqrt(mean(x^2) + eps)

which saves a launch and the rounding of the normed x to bfloat16.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def linear(
    x_NI: Float[Array, "N I"],
    weight_OI: Float[Array, "O I"],
    bias_O: Float[Array, " O"] | None = None,
    *,
    norm_I: Float[Array, " I"] | None = None,
    eps: float = 1e-5,
    residual_NO: Float[Array, "N O"] | None = None,
    out_dtype: DTypeLike | None = None,
    rows: int = 2,
    together: int = 2,
    columns: int = 256,
    warps: int = 1,
    interpret: bool = False,
) -> Float[Array, "N O"]:
    """`rows` of the weight a program, `together` of them at a time, `columns` a load (powers of
    two, `together` at most `rows`)."""
    N = x_NI.shape[0]
    n_out = weight_OI.shape[0]
    optional = {"bias": bias_O, "norm": norm_I, "residual": residual_NO}
    given = {name: array for name, array in optional.items() if array is not None}
    return pl.pallas_call(
        functools.partial(
            _kernel,
            names=tuple(given),
            rows=rows,
            together=together,
            columns=columns,
            eps=eps,
        ),
        grid=(pl.cdiv(n_out, rows),),
        out_shape=jax.ShapeDtypeStruct((N, n_out), out_dtype or x_NI.dtype),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=f"linear_vector_{N}",
    )(x_NI, weight_OI, *given.values())


def _kernel(x_ref, w_ref, *refs, names, rows, together, columns, eps):
    *optional, out_ref = refs
    optional = dict(zip(names, optional, strict=True))
    N, n_in = x_ref.shape
    n_out = w_ref.shape[0]
    first = pl.program_id(0) * rows

    def load(ref, row, start):
        """Columns from `start`, of one row or of each of some, as float32 [rows or 1, columns]."""
        i = start + jnp.arange(columns)[None, :]
        shape = (jnp.shape(row)[0] if jnp.ndim(row) else 1, columns)
        how = {}
        if start + columns > n_in:
            how = {"mask": jnp.broadcast_to(i < n_in, shape), "other": 0}
        i = jnp.broadcast_to(i, shape)
        row = jnp.broadcast_to(row, (shape[0], 1)) if jnp.ndim(row) else row
        return plt.load(ref.at[(row, i) if len(ref.shape) == 2 else (i,)], **how).astype(
            jnp.float32
        )

    starts = range(0, n_in, columns)

    def scaled(n, start):
        x = load(x_ref, n, start)
        return x, (x * load(optional["norm"], None, start) if "norm" in optional else x)

    def factor(squares):
        return jax.lax.rsqrt(jnp.sum(squares, axis=1) / n_in + eps)

    # With several turns x is held in registers; with one the compiler may load it where it is used,
    # which leaves room for twice as many programs (68 registers in place of 168 for 2880 columns).
    held = rows > together and [[scaled(n, start) for start in starts] for n in range(N)]

    def some(i, carry):
        o = first + i * together + jnp.arange(together)
        o_near = jnp.minimum(o, n_out - 1)
        weights = [load(w_ref, o_near[:, None], start) for start in starts]
        for n in range(N):
            products = jnp.zeros((together, columns), jnp.float32)
            squares = jnp.zeros((1, columns), jnp.float32)
            for j, (start, w) in enumerate(zip(starts, weights, strict=True)):
                x, x_scaled = held[n][j] if held else scaled(n, start)
                squares += x * x
                products += w * x_scaled
            out = jnp.sum(products, axis=1)
            if "norm" in optional:
                out *= factor(squares)
            if "bias" in optional:
                out += plt.load(optional["bias"].at[o_near]).astype(jnp.float32)
            if "residual" in optional:
                out += plt.load(optional["residual"].at[n, o_near]).astype(jnp.float32)
            plt.store(out_ref.at[n, o], out.astype(out_ref.dtype), mask=o < n_out)
        return carry

    if held:
        jax.lax.fori_loop(0, rows // together, some, 0)
    else:
        some(0, 0)
