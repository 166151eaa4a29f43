"""The Pallas-Triton kernels for a token or a few: every (token, choice) is a tile of one row.

There is no schedule, and two launches are all: gate_up, which may choose the expert itself, and
down, which holds all X chosen experts of a token and adds their outputs to the residual.

A tensor core multiplies weight rows by at least 8 columns of activations. With one row they would
hold it and seven zeros; here they hold `parts` pieces of K, and the tile's weight rows are `cols`
rows at each piece:

    gate_up, parts 4, cols 16               down, X 4, parts 2, cols 16

            x at K/4 *: 0 1 2 3                     (choice, K/2 *): 00 01 10 11 20 21 30 31
    rows of part 0:     #                   rows of choice 0, part 0: #
            part 1:       #                         choice 0, part 1:    #
            part 2:         #                       choice 1, part 0:       #
            part 3:           #                     ...                        ...

Only the # are wanted. They are picked and added, in a fixed order, once at the end. So K is read in
`parts` places at once: four times as many programs, with as many bytes under way each, and no
partial sums in memory.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..routing.in_kernel import pick
from .grouped import How, accumulate, bias_at, call, packed_of, part_groups
from .packed import place_of, split
from .swiglu import swiglu


def gate_up(
    x_ND: Array,
    choice: tuple[Array, ...],
    lanes: Array,
    scales: Array,
    bias_EP: Array,
    *,
    chosen: int,
    how: How,
    h_order: str,
    limit: float | None,
    alpha: float,
) -> tuple[Array, ...]:
    """Hidden values [N * X, F], in h_order; the rows of experts that are not here are not written.

    choice: (ids_M,), or (logits_NE, live_N), of which the expert is chosen here. Then the result is
    (h, ids_M, logit_M): who was chosen, -1 where live is 0, and their logits.
    """
    packed, shape = packed_of(lanes.shape, how), how.shape
    rows, ffn = x_ND.shape[0] * chosen, packed.half
    routed = len(choice) == 2
    share = part_groups(packed.total, shape)

    def body(*refs):
        choice_refs, refs = refs[: len(choice)], refs[len(choice) :]
        x_ref, lanes_ref, scales_ref, bias_ref, out_ref, *said_refs = refs
        col = pl.program_id(0)
        row = pl.program_id(1)
        if routed:
            logits_ref, live_ref = choice_refs
            token = row // chosen
            expert, logit = pick(logits_ref, token, row % chosen, chosen)
            expert = jnp.where(live_ref[token] != 0, expert, -1)

            @pl.when(col == 0)
            def _():
                said_refs[0][row] = expert
                said_refs[1][row] = logit

        else:
            expert = choice_refs[0][row]

        # The id itself is compared, before any arithmetic on it.
        @pl.when((expert >= 0) & (expert < lanes_ref.shape[0]))
        def _():
            col_C = col * shape.cols + jnp.arange(shape.cols)
            part_C, inner_C = split(jnp.arange(shape.parts * shape.cols), shape.cols)
            part_R = jnp.arange(ROWS)
            acc = accumulate(
                x_ref,
                (lanes_ref, scales_ref),
                expert,
                col * shape.cols + inner_C,
                jnp.full((ROWS,), row // chosen, jnp.int32),
                part_R < shape.parts,
                how,
                (part_C * share, part_R * share),
            )
            inside_C = col_C < ffn
            wanted = part_C[:, None] == part_R[None, :]
            gate, up = (
                _picked(acc[plane], wanted, (shape.parts, shape.cols))
                + bias_at(bias_ref, expert, 2 * col_C + plane, inside_C)
                for plane in (0, 1)
            )
            h = swiglu(gate, up, limit=limit, alpha=alpha).astype(out_ref.dtype)
            plt.store(out_ref.at[row, place_of(col_C, h_order)], h, mask=inside_C)

    struct = jax.ShapeDtypeStruct
    said = (struct((rows,), jnp.int32), struct((rows,), jnp.float32)) if routed else ()
    return call(
        body,
        name="experts_gate_up_row",
        grid=(pl.cdiv(ffn, shape.cols), rows),
        out_shape=(struct((rows, ffn), x_ND.dtype), *said),
        warps=shape.warps,
        stages=shape.stages,
        interpret=how.interpret,
    )(*choice, x_ND, lanes, scales, bias_EP)


ROWS = 8  # the fewest columns that a tensor core takes


def _picked(acc_CR, wanted_CR, shape):
    """The wanted entry of each weight row, added over the parts of K."""
    sums_C = jnp.sum(jnp.where(wanted_CR, acc_CR, 0.0), axis=1)
    return jnp.sum(sums_C.reshape(shape), axis=len(shape) - 2)


def down(
    h_MF: Array,
    ids_M: Array,
    weight_M: Array,
    lanes: Array,
    scales: Array,
    bias_ED: Array,
    residual_ND: Array | None,
    *,
    chosen: int,
    how: How,
    softmax: bool,
    out_dtype: jnp.dtype,
) -> Array:
    """[N, D]: residual + the sum over x, in order, of weight * (expert's sums + bias).

    weight_M: the weights, or with `softmax` the logits that they come from. An id outside [0, E)
    adds nothing, whatever its weight.
    """
    packed, shape = packed_of(lanes.shape, how), how.shape
    count, half = lanes.shape[0], packed.half
    share = part_groups(packed.total, shape)
    choices = pl.next_power_of_2(chosen)
    columns = max(ROWS, choices * shape.parts)

    def body(ids_ref, weight_ref, h_ref, lanes_ref, scales_ref, bias_ref, *refs):
        *residual_ref, out_ref = refs
        token = pl.program_id(1)
        first_col = pl.program_id(0) * shape.cols

        ids = [ids_ref[token * chosen + x] for x in range(chosen)]

        def id_of(choice):
            """Chosen from scalars: of a loaded array Triton does not know that it comes in runs,
            and then reads the weights two bytes at a time."""
            found = jnp.full_like(choice, -1)
            for x, id_ in enumerate(ids):
                found = jnp.where(choice == x, id_, found)
            return found

        piece_C, inner_C = split(jnp.arange(choices * shape.parts * shape.cols), shape.cols)
        piece_R = jnp.arange(columns)
        x_C, part_C = split(piece_C, shape.parts)
        x_R, part_R = split(piece_R, shape.parts)
        id_R = id_of(x_R)
        acc = accumulate(
            h_ref,
            (lanes_ref, scales_ref),
            id_of(x_C)[:, None],
            first_col + inner_C,
            token * chosen + x_R,
            (id_R >= 0) & (id_R < count),
            how,
            (part_C * share, part_R * share),
        )
        wanted = piece_C[:, None] == piece_R[None, :]
        weights = [weight_ref[token * chosen + x] for x in range(chosen)]
        if softmax:  # as routing.top_k
            terms = [jnp.exp(logit - weights[0]) for logit in weights]
            weights = [term / sum(terms[1:], terms[0]) for term in terms]
        col_C = first_col + jnp.arange(shape.cols)
        choice_X = jnp.arange(choices)
        for plane in (0, 1):
            sums_XC = _picked(acc[plane], wanted, (choices, shape.parts, shape.cols))
            to_C, inside_C = packed.row_of(col_C, plane, half), col_C < half
            total_C = jnp.zeros((shape.cols,), jnp.float32)
            for x in range(chosen):
                here_C = inside_C & (ids[x] >= 0) & (ids[x] < count)
                y_C = jnp.sum(jnp.where(choice_X[:, None] == x, sums_XC, 0.0), axis=0)
                y_C = (y_C + bias_at(bias_ref, ids[x], to_C, here_C)) * weights[x]
                total_C += jnp.where(here_C, y_C, 0.0)
            for ref in residual_ref:
                zero = jnp.zeros((), ref.dtype)
                own_C = plt.load(ref.at[token, to_C], mask=inside_C, other=zero)
                total_C += own_C.astype(jnp.float32)
            plt.store(out_ref.at[token, to_C], total_C.astype(out_dtype), mask=inside_C)

    tokens = ids_M.shape[0] // chosen
    return call(
        body,
        name="experts_down_row",
        grid=(pl.cdiv(half, shape.cols), tokens),
        out_shape=jax.ShapeDtypeStruct((tokens, 2 * half), out_dtype),
        warps=shape.warps,
        stages=shape.stages,
        interpret=how.interpret,
    )(
        ids_M,
        weight_M,
        h_MF,
        lanes,
        scales,
        bias_ED,
        *(() if residual_ND is None else (residual_ND,)),
    )
