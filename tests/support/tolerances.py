"""How far apart two correct computations may be, with the reason for each number.

float32  rounds at 2**-24. A sum of n terms is wrong by about sqrt(n) * 2**-24 of its terms' size,
         so a contraction of a few hundred terms keeps about 1e-6. Four tiny layers with a softmax,
         a router and two norms each amplify that to 2e-5 of the logits' spread (measured against
         float64 on 300 tokens): LOGITS leaves a factor of five, and the smallest fault that logits
         show at all, a YaRN ramp rounded to whole channels, is over a hundred times larger.
bfloat16 rounds at 2**-9. Nothing tighter than a few percent holds after four layers, and a router
         whose fourth and fifth logit nearly tie may choose another expert: so bfloat16 results are
         compared by direction, and token by token only where the choice is clear.
"""

import numpy as np

# Largest |difference| of float32 logits, in units of the expected logits' standard deviation.
LOGITS = 1e-4
# One operation in float32 (a contraction of up to 1024 terms, a softmax), over the largest value.
FLOAT32_OP = 5e-6
# One operation with bfloat16 inputs and outputs and float32 sums: one rounding of the result,
# 2**-9, and one of each intermediate that is stored in bfloat16.
BFLOAT16_OP = 1e-2
# Directions of bfloat16 logits: 1 - cosine.
BFLOAT16_COSINE = 1e-3


def spread(expected) -> float:
    return float(np.std(np.asarray(expected, np.float64)))


def logit_error(actual, expected) -> float:
    """Largest |actual - expected| over the expected logits' spread; NaN if either has one."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"shapes differ: {actual.shape} and {expected.shape}"
    return float(np.max(np.abs(actual - expected)) / spread(expected))


def assert_logits(actual, expected, bound: float = LOGITS) -> float:
    """Every logit within `bound` spreads of the expected one. Returns the error for printing."""
    error = logit_error(actual, expected)
    assert error <= bound, f"logits differ by {error:.3g} of their spread; the bound is {bound:.3g}"
    return error


def clear_choices(actual, expected, factor: float = 4.0) -> np.ndarray:
    """Rows whose top-2 margin exceeds `factor` times that row's largest logit difference.

    Twice the difference is enough to keep the argmax (one logit falls, the other rises); four
    times leaves room for the difference being measured on the same noise.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    top = np.sort(expected, axis=-1)
    margin = top[..., -1] - top[..., -2]
    return margin > factor * np.max(np.abs(actual - expected), axis=-1)


def cosine_loss(actual, expected) -> float:
    """1 - cosine of the two arrays taken as vectors."""
    a = np.asarray(actual, np.float64).ravel()
    b = np.asarray(expected, np.float64).ravel()
    return float(1 - a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
