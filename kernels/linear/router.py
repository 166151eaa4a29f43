"""RMSNorm and the router's small matrix behind it in one launch: a Pallas-Triton kernel.

    program (tile, n):  `rows` experts' logits of row n, and its share of the normed row

Apart they are four launches of 1 to 2 us. Every program takes the norm of its row anew: 2880
values, from L2, are nothing beside a launch.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float


def norm_router(
    x_ND: Float[Array, "N D"],
    norm_D: Float[Array, " D"],
    router_ED: Float[Array, "E D"],
    bias_E: Float[Array, " E"],
    *,
    eps: float = 1e-5,
    rows: int | None = None,
    columns: int | None = None,
    warps: int = 4,
    interpret: bool = False,
) -> tuple[Float[Array, "N D"], Float[Array, "N E"]]:
    """`rows` experts a program, `columns` a load (powers of two).

    None: for few logits an expert a program and a row over 4 warps, 496 instructions a warp one
    after another where 4 experts and 256 columns are 1,272; for more the latter, which takes the
    norm of a row a quarter as often.
    """
    N, D = x_ND.shape
    E = router_ED.shape[0]
    few = N * E <= 256  # two programs a processor
    rows, columns = rows or (1 if few else 4), columns or (1024 if few else 256)
    return pl.pallas_call(
        functools.partial(_kernel, rows=rows, columns=columns, eps=eps),
        grid=(pl.cdiv(E, rows), N),
        out_shape=(
            jax.ShapeDtypeStruct((N, D), x_ND.dtype),
            jax.ShapeDtypeStruct((N, E), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="norm_router",
    )(x_ND, norm_D, router_ED, bias_E)


def _kernel(x_ref, norm_ref, w_ref, bias_ref, normed_ref, logits_ref, *, rows, columns, eps):
    tile, n = pl.program_id(0), pl.program_id(1)
    D, E = x_ref.shape[1], w_ref.shape[0]
    e = tile * rows + jnp.arange(rows)
    e_near = jnp.minimum(e, E - 1)[:, None]

    def at(start):
        """Columns of the matrix's tile, and whether they exist: every row has the same."""
        d = jnp.broadcast_to(start + jnp.arange(columns)[None, :], (rows, columns))
        return d, (None if start + columns <= D else d < D)

    def load(ref, index, inside):
        other = None if inside is None else 0
        return plt.load(ref.at[index], mask=inside, other=other).astype(jnp.float32)

    starts = range(0, D, columns)
    xs, squares = [], jnp.zeros((rows, columns), jnp.float32)
    for start in starts:
        d, inside = at(start)
        xs.append(load(x_ref, (n, d), inside))
        squares += xs[-1] * xs[-1]
    inverse = jax.lax.rsqrt(jnp.sum(squares, axis=1, keepdims=True) / D + eps)
    products = jnp.zeros((rows, columns), jnp.float32)
    for start, x in zip(starts, xs, strict=True):
        d, inside = at(start)
        normed = (x * inverse * load(norm_ref, (d,), inside)).astype(normed_ref.dtype)
        products += normed.astype(jnp.float32) * load(w_ref, (e_near, d), inside)
    logits = jnp.sum(products, axis=1) + plt.load(bias_ref.at[e_near[:, 0]]).astype(jnp.float32)
    plt.store(logits_ref.at[n, e], logits, mask=e < E)

    factor = jnp.max(inverse)  # all are the same
    for i, start in enumerate(starts):

        @pl.when(tile == i % pl.num_programs(0))
        def _(start=start):
            d = start + jnp.arange(columns)
            x, norm = load(x_ref, (n, d), d < D), load(norm_ref, (d,), d < D)
            normed = (x * factor * norm).astype(normed_ref.dtype)
            plt.store(normed_ref.at[n, d], normed, mask=d < D)
