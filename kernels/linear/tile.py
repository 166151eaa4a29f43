"""A few to some dozens of rows times a matrix: tensor cores, the weight as the left operand.

    program: out^T [rows, N]  =  sum over steps of  weight [rows, columns] . x^T [columns, N]

N is padded to 8, 16, 32 or 64, the weight streams through shared memory a few steps ahead, and x,
which every program reads whole, comes from L2.

For few rows that leaves too few programs: 45 of 64 weight rows for 132 processors. With `parts` a
tile holds fewer weight rows at several places of the inner width, side by side, and x at as many,

    [parts * rows, columns] . [columns, parts * N]

of which the blocks where both are at the same place are wanted; they are added once, at the end.
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
    residual_NO: Float[Array, "N O"] | None = None,
    out_dtype: DTypeLike | None = None,
    rows: int = 32,
    parts: int = 1,
    columns: int = 128,
    warps: int = 2,
    stages: int = 4,
    interpret: bool = False,
) -> Float[Array, "N O"]:
    """`rows` of the weight a program, in `parts` at once (at least 16 together), `columns` a step
    (powers of two)."""
    N = x_NI.shape[0]
    n_out = weight_OI.shape[0]
    optional = {"bias": bias_O, "residual": residual_NO}
    given = {name: array for name, array in optional.items() if array is not None}
    return pl.pallas_call(
        functools.partial(
            _kernel,
            names=tuple(given),
            rows=rows,
            parts=parts,
            columns=columns,
        ),
        grid=(pl.cdiv(n_out, rows),),
        out_shape=jax.ShapeDtypeStruct((N, n_out), out_dtype or x_NI.dtype),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=f"linear_tile_{N}",
    )(x_NI, weight_OI, *given.values())


def _kernel(x_ref, w_ref, *refs, names, rows, parts, columns):
    *optional, out_ref = refs
    optional = dict(zip(names, optional, strict=True))
    N, n_in = x_ref.shape
    n_out = w_ref.shape[0]
    width = max(8, pl.next_power_of_2(N))
    share = pl.cdiv(pl.cdiv(n_in, parts), columns) * columns if parts > 1 else n_in
    first = pl.program_id(0) * rows
    # Of each line of the tile of weights and of x: its part of the inner width, its place there.
    part_o, o = _divided(jnp.arange(parts * rows), rows)
    part_n, n = _divided(jnp.arange(parts * width), width)
    o_near = jnp.minimum(first + o, n_out - 1)
    n_near = jnp.minimum(n, N - 1)

    def load(ref, line, part, start, tail):
        i = start + jnp.arange(columns)[None, :]
        if parts > 1:
            i += part[:, None] * share
        shape = (line.size, columns)
        mask = jnp.broadcast_to(i < n_in, shape) if tail else None
        return plt.load(ref.at[line[:, None], i], mask=mask, other=0 if tail else None)

    def step(start, acc, tail):
        w = load(w_ref, o_near, part_o, start, tail)
        x = load(x_ref, n_near, part_n, start, tail)
        return acc + jax.lax.dot_general(
            w,
            x,
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision="highest" if x.dtype == jnp.float32 else None,
        )

    # The last part may end before the others do, at any step; alone, only the last step is short.
    steps, tail = share // columns, parts * share > n_in
    acc = jnp.zeros((o.size, n.size), jnp.float32)
    acc = jax.lax.fori_loop(0, steps, lambda j, acc: step(j * columns, acc, tail), acc)
    if share % columns:
        acc = step(steps * columns, acc, True)
    if parts > 1:
        acc = jnp.where(part_o[:, None] == part_n[None, :], acc, 0.0)
        acc = jnp.sum(acc.reshape(parts, rows, parts, width), axis=2)
        acc = jnp.sum(acc, axis=0)
    o, n = first + jnp.arange(rows), jnp.arange(width)
    o_near, n_near = jnp.minimum(o, n_out - 1), jnp.minimum(n, N - 1)
    if "bias" in optional:
        acc += plt.load(optional["bias"].at[o_near]).astype(jnp.float32)[:, None]
    at = (n_near[None, :], o_near[:, None])
    if "residual" in optional:
        acc += plt.load(optional["residual"].at[at]).astype(jnp.float32)
    mask = (n < N)[None, :] & (o < n_out)[:, None]
    plt.store(out_ref.at[n[None, :], o[:, None]], acc.astype(out_ref.dtype), mask=mask)


def _divided(i, by):
    """Quotient and remainder by lax: the floor fix-up of // and % hides runs from Triton."""
    by = jnp.full_like(i, by)
    return jax.lax.div(i, by), jax.lax.rem(i, by)
