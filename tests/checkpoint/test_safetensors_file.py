"""Headers that lie, files cut short, and bits that must not change."""

import os

import checkpoints
import edited
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from gptoss_jax.checkpoint import CheckpointError, count_bytes
from gptoss_jax.checkpoint.safetensors_file import header, open_file, write_file


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "overlap": ({"a": entry(), "b": entry(offsets=(2, 6))}, 6, "b: its data begin at 2, inside a"),
    "overlap of one byte": ({"a": entry(), "b": entry(offsets=(3, 7))}, 7, "b: .* 3, inside a"),
    "hole": ({"a": entry(), "b": entry(offsets=(6, 10))}, 10, "b: .* 2 bytes after the end of a"),
    "past the end": ({"a": entry(offsets=(0, 4))}, 3, "a: truncated"),
    "far past the end": ({"a": entry(shape=(2**62,), offsets=(0, 2**62))}, 4, "a: truncated"),
    "more than named": ({"a": entry()}, 9, "5 bytes follow the last tensor"),
    "one byte more": ({"a": entry()}, 5, "1 bytes follow the last tensor"),
    "room for more": ({"a": entry(shape=(3,))}, 4, r"U8 \[3\] takes 3 bytes; .* give it 4"),
    "wrong size": ({"a": entry("F32")}, 4, r"F32 \[4\] takes 16 bytes; data_offsets .* give it 4"),
    "backwards": ({"a": entry(offsets=(4, 0))}, 4, "give it -4"),
    "negative": ({"a": entry(shape=(-4,))}, 4, "no list of sizes"),
    "overflowing product": ({"a": entry(shape=(2**32, 2**32), offsets=(0, 0))}, 0, "takes 1844674"),
    "minus one": ({"a": entry(shape=(-1,), offsets=(0, -1))}, 0, "no list of sizes"),
    "from minus one": ({"a": entry(offsets=(-1, 3))}, 3, "no two positions"),
    "nothing times everything": ({"a": entry(shape=(0, 2**62, 2**62), offsets=(0, 0))}, 0,
                                 "no list of sizes"),
    "70 axes": ({"a": entry(shape=(1,) * 70, offsets=(0, 1))}, 1, "no list of sizes"),
    "name of two lines": ({"a\nb\x1b[31m": entry()}, 4, r"'a\\nb\\x1b\[31m' is no name"),
    "name that is no text": ({"\ud800": entry()}, 4, r"'\\ud800' is no name"),
    "name without end": ({"a" * 100_000: entry()}, 4, "is no name"),
    "true as a size": ({"a": entry(shape=(True,), offsets=(0, 1))}, 1, "no list of sizes"),
    "fraction": ({"a": entry(shape=(4.0,))}, 4, "no list of sizes"),
    "three offsets": ({"a": entry(offsets=(0, 4, 8))}, 4, "no two positions"),
    "no offsets": ({"a": {"dtype": "U8", "shape": [4]}}, 4, "dtype, shape and data_offsets"),
    "extra key": ({"a": entry() | {"stride": 1}}, 4, "nothing else"),
    "entry is a list": ({"a": [1, 2]}, 4, "dtype, shape and data_offsets"),
    "unknown dtype": ({"a": entry("Q4")}, 4, "'Q4': no such dtype"),
    "unused dtype": ({"a": entry("F64", (1,), (0, 8))}, 8, "no gpt-oss layout holds that"),
    "dtype is a list": ({"a": entry(["U8"])}, 4, "no such dtype"),
    "twice": (b'{"a":%s,"a":%s}' % ((b'{"dtype":"U8","shape":[4],"data_offsets":[0,4]}',) * 2), 4,
              "names 'a' more than once"),
    "a list": ([1, 2], 0, "no JSON object"),
    "no JSON": (b"{oh no", 0, "no JSON"),
    "no UTF-8": (b'{"\xff":1}', 0, "no JSON"),
    "nested too deep": (b"[" * 200_000, 0, "no JSON"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": entry()}, 4, "__metadata__"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_header_that_lies(tmp_path, name):
    header, size, message = HOSTILE[name]
    path = edited.raw(tmp_path / "x.safetensors", header, bytes(size))
    with pytest.raises(CheckpointError, match=message):
        open_file(path)


@pytest.mark.parametrize("length", [0, 1, 2**40, 2**64 - 1, 100_000_001])
def test_header_length_that_lies(tmp_path, length):
    path = edited.raw(tmp_path / "x.safetensors", {"a": entry()}, bytes(4), length=length)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        open_file(path)


@pytest.mark.parametrize("size", [0, 3, 8, 20])
def test_file_cut_inside_its_header(tmp_path, size):
    path = edited.raw(tmp_path / "x.safetensors", {"a": entry()}, bytes(4))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="truncated"):
        open_file(path)


def test_what_is_no_file(tmp_path):
    """A pipe would be waited for, and what a link leads to may be anything."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link", "."):
        with pytest.raises(CheckpointError, match="not a file"):
            open_file(tmp_path / name)


def test_all_faults_of_a_header_are_named(tmp_path):
    header = {"a": entry("F32"), "b": entry("Q4"), "c": entry(shape=(-1,))}
    with pytest.raises(CheckpointError) as caught:
        open_file(edited.raw(tmp_path / "x.safetensors", header, bytes(4)))
    assert [p[:2] for p in caught.value.problems] == ["a:", "b:", "c:"]


def test_git_lfs_pointer(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        open_file(path)


def test_bfloat16_bits_survive(tmp_path):
    """1, -0, 3e38 and a subnormal, whole and in slices."""
    bits = np.array([0x3F80, 0x8000, 0x7F62, 0x0001, 0x7F80, 0x7FC1], np.uint16)
    checkpoints.save(tmp_path / "x.safetensors", {"pad": ("U8", bits[:3].view(np.uint8)[:3]),
                                                  "a": ("BF16", bits)})  # fmt: skip
    tensor = open_file(tmp_path / "x.safetensors").tensors["a"]
    assert tensor.dtype == ml_dtypes.bfloat16
    for part, expected in ((tensor[...], bits), (tensor[1:4], bits[1:4])):
        assert part.view(np.uint16).tolist() == expected.tolist()


def test_only_slices_are_read(tmp_path):
    value = np.arange(6 * 10, dtype=np.uint8).reshape(6, 10)
    checkpoints.save(tmp_path / "x.safetensors", {"a": ("U8", value)})
    tensor = open_file(tmp_path / "x.safetensors").tensors["a"]
    with count_bytes() as counter:
        np.testing.assert_array_equal(tensor[2:4, 3:8], value[2:4, 3:8])
        np.testing.assert_array_equal(tensor.rows(1, 3)[:, :2], value[1:3, :2])
    assert counter.bytes_read == 2 * 5 + 2 * 2


def test_a_copy_does_not_follow_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    checkpoints.save(path, {"a": ("U8", np.zeros(4096, np.uint8))})
    before = open_file(path).tensors["a"][...]
    with path.open("r+b") as f:
        f.seek(-10, 2)
        f.write(b"\1" * 10)
    assert not before.any()


def test_data_begin_at_a_multiple_of_eight():
    assert {len(header({"n" * n: ("U8", (1,))})[0]) % 8 for n in range(1, 9)} == {0}


def test_a_written_file_is_on_the_disk(tmp_path, monkeypatch):
    """Not in the system's memory alone: an export takes its target's name right afterwards."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    write_file(tmp_path / "x", {"a": ("U8", (5,))}, lambda name: [np.ones(5, np.uint8)])
    assert synced == [(tmp_path / "x").stat().st_size]


def test_written_files_are_read_by_the_safetensors_library(tmp_path):
    draw = np.random.default_rng(0)
    arrays = {
        "b": draw.standard_normal((3, 5)).astype(np.float32),
        "a": draw.standard_normal((2, 3, 2)).astype(ml_dtypes.bfloat16),
        "c": draw.integers(0, 256, 7).astype(np.uint8),
        "empty": np.zeros((0, 3), np.float32),
    }
    kinds = {"float32": "F32", "bfloat16": "BF16", "uint8": "U8"}
    header = {n: (kinds[a.dtype.name], a.shape) for n, a in arrays.items()}
    write_file(
        tmp_path / "x.safetensors", header, lambda n: iter(np.split(arrays[n], len(arrays[n]) or 1))
    )
    theirs = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    ours = open_file(tmp_path / "x.safetensors").tensors
    for name, array in arrays.items():
        assert theirs[name].tobytes() == array.tobytes() == ours[name][...].tobytes()
        assert ours[name].shape == array.shape
    # The library's own bytes for the same tensors: order, alignment and padding alike.
    safetensors.numpy.save_file(arrays, tmp_path / "y.safetensors")
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()
