"""Letting the next kernel come up while this one still runs.

Decoding is some hundred launches of 2 to 20 us, each waiting for the last, and 1.3 us went by
between two of them (one H200, 2026-11-30: 2.87 ms for 2.27 ms of 457 kernels).

From compute capability 9 on, XLA launches kernels with programmatic dependent launch and puts
`griddepcontrol.wait` in front of everything a kernel does (seen in the PTX of jax 0.11.2), so that
a kernel may be on its processors before the one that it depends on has ended. It does not say
when: by default at the end of the last program. A kernel that signals at its start lets the next
one's programs take the room that its own leave free, as soon as all of its own have begun. What
that gains has not been measured.

What the next kernel reads is safe: it waits for the end of this whole grid and for its writes.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from . import device

# The signal rides on a move of the index, whose result the addresses need: nothing else would
# keep the compiler from dropping or sinking it.
_SIGNAL = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"


def let_next_start(index: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`index`, an int32 scalar of a Pallas-Triton kernel, as it was; the signal is given with it.

    Does nothing when interpreted and on GPUs before Hopper, whose assembler does not know it.
    """
    if interpret or not device.dependent_launch():
        return index
    (same,) = plt.elementwise_inline_asm(
        _SIGNAL,
        args=[jnp.full((1,), index, jnp.int32)],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)],
    )
    return jnp.max(same)
