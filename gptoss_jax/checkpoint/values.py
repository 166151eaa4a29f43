"""What a tensor's values must not be: not finite, a scale byte that means NaN, all zero."""

import collections

import numpy as np

NAN_SCALE = 255
# Biases may be zero, and a norm that is zero is as dead as a weight.
_MAY_BE_ZERO = ("bias_KMH", "bias_D", "bias_E", "gate_up_bias", "down_bias", "sinks_KG", "_scales")
_TELL = "this is how a tensor looks that was never written; --allow-zero (allow_zero=True) loads it"
_CHUNK = 1 << 18  # elements looked at together


def bad_values(param: str, value: np.ndarray) -> str | None:
    """Says what is wrong with a part of a parameter, in the dtype in which it is stored."""
    if param.endswith("_blocks"):
        return None
    if param.endswith("_scales"):
        count = _count_from(value, NAN_SCALE, 0xFF)
        return f"{count} scale bytes are 255, which means NaN" if count else None
    bits, magnitude = _bits(value)
    infinity = {2: 0x7F80, 4: 0x7F800000}[value.dtype.itemsize]
    count = _count_from(bits, infinity, magnitude)
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
    flat = value.ravel(order="K")  # a view, where a transposed stack's reshape would copy it
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


def _count_from(bits: np.ndarray, least: int, mask: int) -> int:
    """How many of `bits & mask` reach `least`. Whole numbers in chunks that stay in cache:
    ml_dtypes' isfinite goes through float32 and takes six times as long.
    """
    flat, count = bits.ravel(order="K"), 0
    for i in range(0, flat.size, _CHUNK):
        part = flat[i : i + _CHUNK] & bits.dtype.type(mask)
        if part.max() >= least:
            count += int((part >= least).sum())
    return count


class Watch:
    """Looks at everything that is read, and says at the end what was wrong.

    A mesh has tensors read in slices; a weight is zero where all slices seen here are. Of a stack
    each expert is watched for itself (a mean over the stack hides one that is missing), of fused
    rows the queries, the keys and the values.
    """

    def __init__(self, *, allow_zero: bool = False):
        self.allow_zero = allow_zero
        self.found: dict[str, str] = {}
        self.seen: dict[str, set[int]] = collections.defaultdict(set)
        self.alive: dict[str, set[int]] = collections.defaultdict(set)

    def look(self, param: str, stacked: bool, name: str, index, value: np.ndarray) -> None:
        """param: what the tensor `name` belongs to. stacked: its first axis is the experts.
        index, value: which part was read, and what it holds, as stored."""
        if problem := bad_values(param, value):
            self.found.setdefault(name, problem)
        if param.endswith(_MAY_BE_ZERO):
            return
        rows = _rows(index, value) if stacked else (0,)
        for row, part in zip(rows, value if stacked else (value,), strict=True):
            self.seen[name].add(row)
            if row not in self.alive[name] and _any_nonzero(param, part):
                self.alive[name].add(row)

    def look_at_blocks(self, name: str, blocks: np.ndarray, scales: np.ndarray) -> None:
        """What only blocks and scales together can show."""
        if problem := infinite_blocks(blocks, scales):
            self.found.setdefault(name, problem)

    def dead(self) -> list[str]:
        """Which tensors, or which experts of them, are zero throughout."""
        out = []
        for name, seen in self.seen.items():
            if dead := sorted(seen - self.alive[name]):
                whole = len(dead) == len(seen)
                out.append(f"{name}: all zero" + ("" if whole else f" in expert {_listed(dead)}"))
        return out

    def problems(self) -> list[str]:
        lines = [f"{name}: {problem}." for name, problem in self.found.items()]
        return lines if self.allow_zero else lines + [f"{line}; {_TELL}." for line in self.dead()]


def _rows(index, value: np.ndarray) -> range:
    """The experts that `index` picks: the loader asks with a slice of the first axis."""
    first = index[0] if isinstance(index, tuple) else index
    start = first.start or 0
    return range(start, start + len(value))


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
