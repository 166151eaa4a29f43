"""How far apart two correct computations may be, with the reason for each number.

float32  rounds at 2**-24. A sum of n terms is wrong by about sqrt(n) * 2**-24 of its terms' size,
         so a contraction of a few hundred terms keeps about 1e-6. Four tiny layers with a softmax,
         a router and two norms each amplify that to 2e-5 of the logits' spread (measured against
         float64 on 300 tokens): LOGITS leaves a factor of five, and the smallest fault that logits
         show at all, a YaRN ramp rounded to whole channels, is over a hundred times larger.
bfloat16 rounds at 2**-9. Nothing tighter than a few percent holds after four layers, and a router
         whose fourth and fifth logit nearly tie may choose another expert, after which a row
         differs by half its spread (transformers' own bfloat16 against float64: median row 0.018
         of the spread, worst row 0.9, cosine 0.995). So bfloat16 is compared with what the
         references' bfloat16 costs them, and token by token only where the choice is clear.
"""

import numpy as np

# Largest |difference| of float32 logits, in units of the expected logits' standard deviation.
LOGITS = 1e-4
# One operation in float32 (a contraction of up to 1024 terms, a softmax), over the largest value.
FLOAT32_OP = 5e-6
# One operation with bfloat16 inputs and outputs and float32 sums: one rounding of the result,
# 2**-9, and one of each intermediate that is stored in bfloat16.
BFLOAT16_OP = 1e-2
# Median over rows of the root mean square bfloat16 logit difference, in spreads: one model's four
# layers cost 0.018 to 0.025, two models differ by sqrt(2) times that.
BFLOAT16_ROW = 0.04


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


def row_difference(actual, expected) -> np.ndarray:
    """Root mean square difference of each row of logits: [..., V] -> [...]."""
    difference = np.asarray(actual, np.float64) - np.asarray(expected, np.float64)
    return np.sqrt(np.mean(difference**2, axis=-1))


def clear_choices(actual, expected, factor: float = 4.0) -> np.ndarray:
    """Rows whose top-2 margin exceeds `factor` times the row's logit difference: [..., V] -> [...].

    There the argmax must be equal. The difference is the root mean square over the row: two logits
    with independent errors of that size differ by sqrt(2) of it, so that four times is 2.8 standard
    deviations. (With the row's largest difference the argmax could not change, whatever was wrong.)
    """
    top = np.sort(np.asarray(expected, np.float64), axis=-1)
    return top[..., -1] - top[..., -2] > factor * row_difference(actual, expected)


def cosine_loss(actual, expected) -> float:
    """1 - cosine of the two arrays taken as vectors."""
    a = np.asarray(actual, np.float64).ravel()
    b = np.asarray(expected, np.float64).ravel()
    return float(1 - a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
