"""One safetensors file: a strict header, and tensors that are read slice by slice.

    8 bytes: n, little endian | n bytes of JSON | data
    JSON: {"name": {"dtype": "BF16", "shape": [...], "data_offsets": [begin, end]}, ...}

The header is not believed: offsets must tile the data exactly, each as long as its shape and dtype
say. Parsing it here, with views into the mapped file, was measured 3 to 5 times faster than the
safetensors library, which has no bfloat16 for NumPy's plain dtypes and copies whole tensors.
"""

import contextlib
import dataclasses
import json
import math
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from ..errors import CheckpointError

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "U8": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),  # an exponent byte; 255 is NaN
}
# Known elsewhere, used by no layout read here: named in the error instead of "unknown".
_OTHER_DTYPES = "BOOL I8 I16 I32 I64 U16 U32 U64 F64 F8_E4M3 F8_E5M2 F4 C64".split()
MAX_HEADER = 100_000_000  # bytes; the safetensors library's own limit
MAX_NAME = 200  # characters; no published name reaches 60
MAX_RANK = 8  # axes; no tensor of any layout has more than four


class Counter:
    """Bytes of tensor data read from files."""

    bytes_read = 0


_counters: list[Counter] = []


@contextlib.contextmanager
def count_bytes() -> Iterator[Counter]:
    """Counts what is read from tensors of any file inside the `with`."""
    counter = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor in a mapped file. `tensor[index]` reads those elements and nothing else."""

    name: str
    stored: str  # the file's dtype name
    view: np.ndarray = dataclasses.field(repr=False)  # read-only, mapped
    file: "TensorFile" = dataclasses.field(repr=False)
    own: bool = True  # give copies; else views where no copy is needed
    look: Callable | None = dataclasses.field(default=None, repr=False)  # look(name, index, value)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def dtype(self) -> np.dtype:
        return self.view.dtype

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    def reshape(self, *shape: int) -> "LazyTensor":
        return dataclasses.replace(self, view=self.view.reshape(shape))

    def swapaxes(self, a: int, b: int) -> "LazyTensor":
        return dataclasses.replace(self, view=self.view.swapaxes(a, b))

    def rows(self, begin: int, end: int) -> "LazyTensor":
        name = f"{self.name}[{begin}:{end}]"
        return dataclasses.replace(self, name=name, view=self.view[begin:end])

    def __getitem__(self, index) -> np.ndarray:
        """With `own` a copy, so that later changes of the file cannot reach a loaded model."""
        out = np.array(self.view[index], order="C") if self.own else self.view[index]
        for counter in _counters:
            counter.bytes_read += out.nbytes
        if self.look is not None:
            self.look(self.name, index, out)
        return out

    def forget(self) -> None:
        """Gives the pages read so far back: mapped pages count as this process's memory."""
        self.file.forget()


@dataclasses.dataclass
class TensorFile:
    """A file whose header has been checked. tensors: by name, in the order of their data."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, LazyTensor]
    _map: mmap.mmap

    def forget(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def open_file(path: str | Path) -> TensorFile:
    """Maps a file and checks its header.

    Raises CheckpointError with everything in the header that is not true of the file, and OSError
    where it cannot be read.
    """
    path = Path(path)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, a device has no end
        raise CheckpointError(path, ["a folder, pipe or device, not a file."])
    size = status.st_size
    with path.open("rb") as f:
        start = f.read(8)
        if start == b"version ":
            raise CheckpointError(
                path, ["a git-lfs pointer, not the weights themselves; run `git lfs pull`."]
            )
        if len(start) < 8:
            raise CheckpointError(path, [f"truncated: {size} bytes hold no safetensors header."])
        length = int.from_bytes(start, "little")
        if length > MAX_HEADER or length < 2:
            raise CheckpointError(
                path,
                [f"not a safetensors file: its first 8 bytes promise a header of {length} bytes."],
            )
        if 8 + length > size:
            raise CheckpointError(
                path,
                [f"truncated: the header alone is {length} bytes, the file {size}."],
            )
        raw = f.read(length)
        mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)

    parsed = _parse(path, raw)
    metadata = parsed.pop("__metadata__", {})
    problems = []
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        problems.append("__metadata__ must map names to strings.")
    entries = {}
    for name, entry in parsed.items():
        if not name.isprintable() or len(name) > MAX_NAME:  # it would be printed in every report
            problems.append(f"{name[:MAX_NAME]!a} is no name of a tensor.")
        elif complaint := _complaint(entry):
            problems.append(f"{name}: {complaint}")
        else:
            entries[name] = (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
    if not problems:
        problems = list(_gaps(entries, size - 8 - length))
    if problems:
        raise CheckpointError(path, problems)

    file = TensorFile(path, metadata, {}, mapped)
    for name, (stored, shape, begin, _) in sorted(entries.items(), key=lambda e: e[1][2:]):
        flat = np.frombuffer(mapped, DTYPES[stored], math.prod(shape), 8 + length + begin)
        file.tensors[name] = LazyTensor(name, stored, flat.reshape(shape), file)
    return file


def header(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, list[str]]:
    """The first bytes of a file with these tensors {name: (stored dtype, shape)}, and their order.

    As the safetensors library writes: wide dtypes first, which aligns all data, then by name.
    """
    order = sorted(tensors, key=lambda name: (-DTYPES[tensors[name][0]].itemsize, name))
    entries, end = {}, 0
    for name in order:
        stored, shape = tensors[name]
        begin, end = end, end + nbytes(stored, shape)
        entries[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw, order


def write_file(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], data) -> None:
    """Writes a file. data(name) yields arrays that follow one another in C order.

    The file is whole on the disk when this returns. Raises OSError where the disk is full.
    """
    first, order = header(tensors)
    with path.open("wb") as f:
        f.write(first)
        for name in order:
            before = f.tell()
            for piece in data(name):
                # bytes: a memoryview knows no bfloat16
                f.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            assert f.tell() - before == nbytes(*tensors[name]), name
        f.flush()
        os.fsync(f.fileno())


def nbytes(stored: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[stored].itemsize


def _parse(path: Path, raw: bytes) -> dict:
    repeated = []

    def no_repeats(pairs):
        out = {}
        for name, value in pairs:
            if name in out:
                repeated.append(name)
            out[name] = value
        return out

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=no_repeats)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(
            path, [f"not a safetensors file: its header is no JSON ({e})."]
        ) from None
    if not isinstance(header, dict):
        raise CheckpointError(path, ["not a safetensors file: its header is no JSON object."])
    if repeated:
        raise CheckpointError(
            path, [f"the header names {n!r:.200} more than once." for n in repeated]
        )
    return header


def _complaint(entry) -> str | None:
    """What is wrong with one entry of a header, taken alone."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "a header entry holds dtype, shape and data_offsets, nothing else."
    stored, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(stored, str) or stored not in DTYPES:
        known = "no gpt-oss layout holds that" if stored in _OTHER_DTYPES else "no such dtype"
        return f"stored as {stored!r}: {known}."
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_size, shape)):
        return f"shape {shape!r:.200} is no list of sizes."
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        return f"data_offsets {offsets!r:.200} are no two positions."
    promised, given = nbytes(stored, tuple(shape)), offsets[1] - offsets[0]
    if promised != given:
        return f"{stored} {shape} takes {promised} bytes; data_offsets {offsets} give it {given}."
    if math.prod(n or 1 for n in shape) >= 2**63:  # nothing times 2**99: NumPy cannot hold it
        return f"shape {shape} is no list of sizes."
    return None


def _is_size(n) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63


def _gaps(entries: dict, size: int) -> Iterator[str]:
    """Offsets that leave a hole, overlap, or pass the end of `size` bytes of data."""
    end, last = 0, "the header"
    for name, (_, _, begin, stop) in sorted(entries.items(), key=lambda e: e[1][2:]):
        if begin < end:
            yield f"{name}: its data begin at {begin}, inside {last}, which ends at {end}."
        elif begin > end:
            yield f"{name}: its data begin at {begin}, {begin - end} bytes after the end of {last}."
        if stop > size:
            yield f"{name}: truncated: its data end at {stop}; the file has {size} bytes of data."
        end, last = max(end, stop), name
    if end < size:
        yield f"{size - end} bytes follow the last tensor; the header names none there."
