"""A few to some dozens of rows times a matrix: tensor cores, the weight as the left operand.

    program: out^T [rows, N]  =  sum over steps of  weight [rows, columns] . x^T [columns, N]

N is padded to 16, 32 or 64, the weight streams through shared memory a few steps ahead, and x,
which every program reads whole, comes from L2.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..overlap import let_next_start


def linear(
    x_NI: Float[Array, "N I"],
    weight_OI: Float[Array, "O I"],
    bias_O: Float[Array, " O"] | None = None,
    *,
    residual_NO: Float[Array, "N O"] | None = None,
    out_dtype: DTypeLike | None = None,
    rows: int = 32,
    columns: int = 128,
    warps: int = 2,
    stages: int = 4,
    interpret: bool = False,
) -> Float[Array, "N O"]:
    """`rows` of the weight a program (at least 16), `columns` a step (powers of two)."""
    N = x_NI.shape[0]
    n_out = weight_OI.shape[0]
    optional = {"bias": bias_O, "residual": residual_NO}
    given = {name: array for name, array in optional.items() if array is not None}
    return pl.pallas_call(
        functools.partial(
            _kernel, names=tuple(given), rows=rows, columns=columns, interpret=interpret
        ),
        grid=(pl.cdiv(n_out, rows),),
        out_shape=jax.ShapeDtypeStruct((N, n_out), out_dtype or x_NI.dtype),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=f"linear_tile_{N}",
    )(x_NI, weight_OI, *given.values())


def _kernel(x_ref, w_ref, *refs, names, rows, columns, interpret):
    *optional, out_ref = refs
    optional = dict(zip(names, optional, strict=True))
    N, n_in = x_ref.shape
    n_out = w_ref.shape[0]
    o = let_next_start(pl.program_id(0), interpret=interpret) * rows + jnp.arange(rows)
    o_near = jnp.minimum(o, n_out - 1)
    n = jnp.arange(max(16, pl.next_power_of_2(N)))
    n_near = jnp.minimum(n, N - 1)

    def step(start, acc, tail):
        i = start + jnp.arange(columns)
        w = plt.load(
            w_ref.at[o_near[:, None], i[None, :]],
            mask=jnp.broadcast_to((i < n_in)[None, :], (rows, columns)) if tail else None,
            other=0 if tail else None,
        )
        x = plt.load(
            x_ref.at[n_near[:, None], i[None, :]],
            mask=jnp.broadcast_to((i < n_in)[None, :], (n.size, columns)) if tail else None,
            other=0 if tail else None,
        )
        return acc + jax.lax.dot_general(
            w,
            x,
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision="highest" if x.dtype == jnp.float32 else None,
        )

    steps = n_in // columns
    acc = jnp.zeros((rows, n.size), jnp.float32)
    acc = jax.lax.fori_loop(0, steps, lambda j, acc: step(j * columns, acc, False), acc)
    if n_in % columns:
        acc = step(steps * columns, acc, True)
    if "bias" in optional:
        acc += plt.load(optional["bias"].at[o_near]).astype(jnp.float32)[:, None]
    at = (n_near[None, :], o_near[:, None])
    if "residual" in optional:
        acc += plt.load(optional["residual"].at[at]).astype(jnp.float32)
    mask = (n < N)[None, :] & (o < n_out)[:, None]
    plt.store(out_ref.at[n[None, :], o[:, None]], acc.astype(out_ref.dtype), mask=mask)
