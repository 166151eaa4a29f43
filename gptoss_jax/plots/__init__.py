"""Pictures of a model at work. Each function returns a matplotlib Figure; none opens a window.

expert_load       tokens of each expert, coloured by device
routing           which experts each token of a text chose, and how much it trusts them
exchange          rows that travel between devices in one all_to_all
attention_map     how much each token looks at each other one, and at nothing
frequencies       how many positions each rotary channel takes for one turn
code_book         the 16 values of MXFP4 and how often real weights use them
rounding_stairs   what MXFP4 makes of each number
memory            bytes of a model's parameters, packed and not
parity_by_layer   how far PyTorch's activations are from ours
speed             measured times beside the least that is possible
loss_curve        of a training run

Colours are Okabe and Ito's, which people with any colour vision can tell apart.
"""

from .attention import attention_map, attention_weights, frequencies
from .experts import exchange, exchanged, expert_load, routing
from .measures import Timing, loss_curve, parity_by_layer, recorded, speed
from .mxfp4 import code_book, memory, parameter_bytes, rounding_stairs

__all__ = [
    "Timing",
    "attention_map",
    "attention_weights",
    "code_book",
    "exchange",
    "exchanged",
    "expert_load",
    "frequencies",
    "loss_curve",
    "memory",
    "parameter_bytes",
    "parity_by_layer",
    "recorded",
    "rounding_stairs",
    "routing",
    "speed",
]
