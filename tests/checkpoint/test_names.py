"""The tables: complete in both directions, and the published files' own numbers."""

import collections
import hashlib
import math

import numpy as np
import pytest
from flax import nnx
from tiny import TINY

from gptoss_jax.checkpoint.export import index_json, plan, shards
from gptoss_jax.checkpoint.inspect import parameter_counts
from gptoss_jax.checkpoint.names import (
    FUSED_ROWS,
    LAYOUTS,
    ONE_PER_EXPERT,
    PACKED,
    SAME,
    TRANSPOSED,
    fills,
)
from gptoss_jax.checkpoint.safetensors_file import LazyTensor, header, nbytes
from gptoss_jax.config import Config
from gptoss_jax.model import GptOss

BIG = {"20b": Config.gpt_oss_20b(), "120b": Config.gpt_oss_120b()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_parameter_once(layout):
    """The table and the model name the same parameters, with the same shapes."""
    experts = "packed" if layout in PACKED else "dense"
    model = nnx.eval_shape(lambda: GptOss(TINY, rngs=nnx.Rngs(0), experts=experts))
    expected = {
        ".".join(map(str, path)): variable.shape
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    found = collections.Counter(f.param for f in fills(layout, TINY))
    assert set(found.values()) == {1}
    assert {f.param: f.shape for f in fills(layout, TINY)} == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_once_and_no_value_lost(layout):
    names = [name for f in fills(layout, TINY) for name, _ in f.tensors]
    assert len(names) == len(set(names))
    for f in fills(layout, TINY):
        assert math.prod(f.shape) == sum(math.prod(shape) for _, shape in f.tensors), f.param


@pytest.mark.parametrize(
    "how, shape, tensors",
    [
        (SAME, (2, 3, 5), [(6, 5)]),
        (TRANSPOSED, (4, 3, 5), [(4, 5, 3)]),
        (FUSED_ROWS, (2, 5, 4, 3), [(24, 3), (8, 3), (8, 3)]),
        (FUSED_ROWS, (2, 5, 4, 3), [(40, 3)]),
        (FUSED_ROWS, (2, 5, 4), [(24,), (8,), (8,)]),
        (ONE_PER_EXPERT, (4, 3, 5), [(3, 5)] * 4),
    ],
)
def test_any_part_that_is_read_is_that_part_of_the_whole(how, shape, tensors):
    """A mesh asks for slices of any axis; and what is written is what was read."""
    draw = np.random.default_rng(0)
    values = [draw.standard_normal(s).astype(np.float32) for s in tensors]
    lazy = [LazyTensor(str(i), "F32", v, None) for i, v in enumerate(values)]
    whole = how.read(lazy, shape, (slice(None),) * len(shape))
    assert whole.shape == shape and len(np.unique(whole)) == whole.size
    for _ in range(60):
        ends = [sorted(draw.choice(n + 1, 2, replace=False)) for n in shape]
        index = tuple(slice(int(a), int(b)) for a, b in ends)
        np.testing.assert_array_equal(how.read(lazy, shape, index), whole[index])
    for written, value in zip(how.write(whole, len(values)), values, strict=True):
        np.testing.assert_array_equal(written.reshape(value.shape), value)


@pytest.mark.parametrize(
    "size, layout, count",
    [
        ("20b", "hf-mxfp4", 459),
        ("20b", "hf-bf16", 411),
        ("20b", "original", 363),
        ("120b", "hf-mxfp4", 687),
        ("120b", "hf-bf16", 615),
        ("120b", "original", 543),
    ],
)
def test_number_of_tensors(size, layout, count):
    assert len(plan(layout, BIG[size])) == count


@pytest.mark.parametrize(
    "size, layout, total",
    [
        ("20b", "hf-mxfp4", 13_761_264_768),
        ("120b", "hf-mxfp4", 65_248_815_744),
        ("20b", "hf-bf16", 41_829_514_368),
        ("120b", "hf-bf16", 233_658_313_344),
    ],
)
def test_total_bytes(size, layout, total):
    tensors = plan(layout, BIG[size]).values()
    assert sum(nbytes(t.stored, t.shape) for t in tensors) == total


def file_sizes(config: Config) -> list[int]:
    tensors = plan("hf-mxfp4", config)
    out = []
    for names in shards(tensors, "hf-mxfp4", 4_800_000_000).values():
        listed = {n: (tensors[n].stored, tensors[n].shape) for n in names}
        out.append(len(header(listed)[0]) + sum(nbytes(*t) for t in listed.values()))
    return out


def test_index_of_20b_is_the_published_one():
    """Names, shapes, order and cuts reproduce the hub's index byte for byte, and its file sizes."""
    tensors = plan("hf-mxfp4", BIG["20b"])
    index = index_json(tensors, shards(tensors, "hf-mxfp4", 4_800_000_000))
    assert len(index) == 36_355
    assert (
        hashlib.sha256(index.encode()).hexdigest()
        == "0e085b977c4c9942f85938828e8c989ed7d5cdabf852e4da6a67c116cd502cd1"
    )
    assert file_sizes(BIG["20b"]) == [4_792_272_488, 4_798_702_184, 4_170_342_232]


def test_index_of_120b_has_the_published_length():
    tensors = plan("hf-mxfp4", BIG["120b"])
    files = shards(tensors, "hf-mxfp4", 4_800_000_000)
    assert len(files) == 15 and "model-00000-of-00014.safetensors" in files
    assert len(index_json(tensors, files)) == 54_511


def test_a_layer_of_20b_lies_in_two_shards():
    tensors = plan("hf-mxfp4", BIG["20b"])
    files = shards(tensors, "hf-mxfp4", 4_800_000_000)
    file_of = {name: file for file, names in files.items() for name in names}
    stem = "model.layers.6.mlp.experts.gate_up_proj_"
    assert file_of[stem + "bias"] == "model-00001-of-00002.safetensors"
    assert file_of[stem + "blocks"] == "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    "size, total, active", [("20b", 20_914_757_184, 3.61e9), ("120b", 116_829_156_672, 5.13e9)]
)
def test_parameter_counts(size, total, active):
    """Totals as published; active within 0.3 % of the model card's 3.61 and 5.13 billion."""
    counts = parameter_counts(BIG[size])
    assert counts["total"] == total
    assert abs(counts["active"] / active - 1) < 3e-3
    dense = plan("hf-bf16", BIG[size]).values()
    assert counts["total"] == sum(math.prod(t.shape) for t in dense)
    experts = [t for t in dense if ".experts." in t.fill.param]
    assert counts["experts"] == sum(math.prod(t.shape) for t in experts)


def test_layers_go_in_the_order_of_their_names():
    order = [f.param.split(".")[1] for f in fills("hf-mxfp4", BIG["20b"]) if "blocks." in f.param]
    assert list(dict.fromkeys(order))[:4] == ["0", "1", "10", "11"]
