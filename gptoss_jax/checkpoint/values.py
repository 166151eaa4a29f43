"""What a tensor's values must not be: not finite, a scale byte that means NaN, all zero."""

import collections

import numpy as np

from .names import Fill

NAN_SCALE = 255
# Biases may be zero, and a norm that is zero is as dead as a weight.
_MAY_BE_ZERO = ("bias_KMH", "bias_D", "bias_E", "gate_up_bias", "down_bias", "sinks_KG", "_scales")
_TELL = "this is how a tensor looks that was never written; --allow-zero (allow_zero=True) loads it"
_CHUNK = 1 << 22  # elements looked at together: temporaries of a few MB whatever the tensor


def bad_values(param: str, value: np.ndarray) -> str | None:
    """Says what is wrong with a part of a parameter, in the dtype in which it is stored."""
    if param.endswith("_blocks"):
        return None
    if param.endswith("_scales"):
        count = _count(value, lambda part: part == NAN_SCALE)
        return f"{count} scale bytes are 255, which means NaN" if count else None
    count = _count(value, _not_finite)
    return f"{count} of {value.size} values are not finite" if count else None


def infinite_blocks(blocks: np.ndarray, scales: np.ndarray) -> str | None:
    """Codes whose value passes the largest float: 2^127 times 2 or more, 2^126 times 4 or more."""
    if not (scales >= 253).any():  # the common case: one pass over a seventeenth of the bytes
        return None
    wide = scales >= 253
    nibbles = np.concatenate([blocks[wide] & 7, (blocks[wide] >> 4) & 7], axis=-1)
    least = np.where(scales[wide] == 253, 6, 4)[:, None]
    count = int((nibbles >= least).sum())
    return (
        f"{count} values are infinite: scale bytes of 253 or 254 with large codes"
        if count
        else None
    )


def _any_nonzero(param: str, value: np.ndarray) -> bool:
    flat = value.reshape(-1)
    if param.endswith("_blocks"):
        flat = flat.view(np.uint8)
        mask = 0x77  # codes 0 and 8 are 0 and -0
    else:
        flat, mask = _bits(flat)
    return any(bool((flat[i : i + _CHUNK] & mask).any()) for i in range(0, flat.size, _CHUNK))


def _bits(value: np.ndarray) -> tuple[np.ndarray, int]:
    """The same memory as whole numbers, and the mask of all but the sign."""
    width = value.dtype.itemsize
    return value.view(f"u{width}"), (1 << (8 * width - 1)) - 1


def _count(value: np.ndarray, wrong) -> int:
    flat = value.reshape(-1)
    return sum(int(wrong(flat[i : i + _CHUNK]).sum()) for i in range(0, flat.size, _CHUNK))


def _not_finite(part: np.ndarray) -> np.ndarray:
    """On the bits: ml_dtypes' isfinite converts to float32 first, six times slower."""
    exponent = {2: 0x7F80, 4: 0x7F800000}[part.dtype.itemsize]
    bits, _ = _bits(part)
    return (bits & exponent) == exponent


class Watch:
    """Looks at every part that is read, and says at the end what was wrong.

    A mesh has parameters read in slices; a weight is zero where all slices seen here are. Of a
    stack each expert is watched for itself: a mean over the stack hides one that is missing.
    """

    def __init__(self, *, allow_zero: bool = False):
        self.allow_zero = allow_zero
        self.found: dict[str, str] = {}
        self.seen: dict[str, set[int]] = collections.defaultdict(set)
        self.alive: dict[str, set[int]] = collections.defaultdict(set)
        self.names: dict[str, str] = {}

    def look(self, fill: Fill, index: tuple[slice, ...], value: np.ndarray, blocks=None) -> None:
        """value: what was read of `fill` at `index`, as stored. blocks: of scales, their blocks."""
        self.names[fill.param] = " + ".join(dict.fromkeys(n for n, _ in fill.tensors))
        problem = bad_values(fill.param, value)
        if blocks is not None and problem is None and (value >= 253).any():
            problem = infinite_blocks(blocks[index], value)
        if problem:
            self.found.setdefault(fill.param, problem)
        if fill.param.endswith(_MAY_BE_ZERO):
            return
        experts = ".experts." in fill.param
        rows = range(fill.shape[0])[index[0]] if experts else (0,)
        for row, part in zip(rows, value if experts else (value,), strict=True):
            self.seen[fill.param].add(row)
            if row not in self.alive[fill.param] and _any_nonzero(fill.param, part):
                self.alive[fill.param].add(row)

    def dead(self) -> dict[str, str]:
        """{parameter: what of it is zero throughout}."""
        out = {}
        for param, seen in self.seen.items():
            if dead := sorted(seen - self.alive[param]):
                whole = len(dead) == len(seen)
                out[param] = "all zero" if whole else f"all zero in expert {_listed(dead)}"
        return out

    def problems(self) -> list[str]:
        lines = [f"{self.names[param]}: {problem}." for param, problem in self.found.items()]
        if not self.allow_zero:
            lines += [f"{self.names[p]}: {zero}; {_TELL}." for p, zero in self.dead().items()]
        return lines


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
