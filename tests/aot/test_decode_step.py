"""The decoding loop and a prefill chunk at the published sizes, for an H200 that is not there."""

import collections
import dataclasses
import re
from math import prod

import h200
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

from gptoss_jax import buckets, cache
from gptoss_jax.config import Config
from gptoss_jax.decode import Request, Rows, programs
from gptoss_jax.kernels import device
from gptoss_jax.kernels.expert_matmul import layout_for
from gptoss_jax.model import GptOss
from gptoss_jax.sampling import Sampler

pytestmark = pytest.mark.aot
new_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="needs jax 0.11's Mosaic GPU, and its dumps"
)

CONFIGS = {"20b": Config.gpt_oss_20b(), "120b": Config.gpt_oss_120b()}


@pytest.fixture(autouse=True)
def shapes_in_place_of_arrays():
    """A Cache of shapes is no Cache of arrays, which the checked annotations ask for."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def abstract_model(config, layout):
    """Shapes of a bfloat16 model with packed experts."""

    def make():
        model = GptOss(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, experts="packed")
        for block in model.blocks:
            experts = block.moe.experts
            experts.replace(experts.weights().to_layout(layout))
        return model

    return nnx.eval_shape(make)


def compiled(config, batch, context, *, tokens=1, layout=None, dump=None):
    """The compiled loop, or the prefill of a chunk; bytes of parameters; bytes of cache.

    layout None: the one that a model has there. dump: a folder for what XLA says of its work.
    """
    one = h200.sharding()

    def put(x):
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=one)

    with device.ahead_of_time():
        graph, state = nnx.split(abstract_model(config, layout or layout_for()))
        leaves, tree = jax.tree.flatten(state)
        capacity = buckets.capacity(context, config.max_context)
        past = jax.eval_shape(lambda: cache.make(config, batch, capacity))
        zeros = np.zeros(batch, np.int32)
        made = programs(graph, tree, config, None, gpu=True)
        if tokens == 1:
            rows = Rows(token_B=zeros, status_B=zeros, step=np.int32(0), seen_BV=None)
            sampler = Sampler(temperature=0.0)
            request = Request(
                seeds_B2=np.zeros((batch, 2), np.uint32),
                stops=np.zeros(buckets.stops(1), np.int32),
                knobs=sampler.knobs(),
            )
            args = jax.tree.map(put, (leaves, past, rows, request, np.int32(0)))
            lowered = made.decode.lower(*args, sampler.plan(), buckets.room(1))
        else:
            chunk = np.zeros((batch, tokens), np.int32)
            args = jax.tree.map(put, (leaves, past, chunk, np.int32(0), zeros))
            lowered = made.prefill.lower(*args)
        program = lowered.compile(dump and {"xla_dump_to": str(dump)})

    def size(arrays):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))

    return program, size(leaves), size(past)


# A layer at one row: qkv; attention, and the sum of its parts in every other; out; norm and router;
# gate_up, which chooses the experts; down, which sums them and adds the residual. From 8 rows on
# the experts are route, gate_up, down and combine; at 32 rows attention has no parts.
A_LAYER = {1: 6.5, 8: 8.5, 32: 8}
# Of XLA's: qkv's norm, and the order that the experts read activations in.
BESIDE = {1: 0, 8: 2, 32: 2}


@pytest.mark.parametrize(
    "name, batch, layout",
    [
        ("20b", 1, None),
        ("20b", 8, None),
        ("20b", 32, None),
        ("120b", 1, None),
        ("20b", 1, "triton"),
    ],
)
def test_a_decoding_step_is_few_launches_and_copies_nothing_large(name, batch, layout):
    config = CONFIGS[name]
    program, parameters, past = compiled(config, batch, 1024, layout=layout)
    memory, text = program.memory_analysis(), program.as_text()
    # Logits of a row are 0.8 MB; the smallest weight that could be copied by mistake is 15 MB.
    assert memory.temp_size_in_bytes < batch * config.vocab * 4 + 1e6
    _keeps_its_arguments(memory, text, parameters, past)
    found = _launches(text)
    ours = [name for kind, name in found if kind == "custom-call"]
    assert len(ours) == A_LAYER[batch] * config.layers, collections.Counter(ours)
    assert len(found) - len(ours) <= BESIDE[batch] * config.layers + 21, collections.Counter(found)


@new_jax
@pytest.mark.parametrize("batch, by_mosaic", [(1, 0), (128, 2)])
def test_the_whole_loop_is_one_cuda_graph(batch, by_mosaic, tmp_path):
    config = dataclasses.replace(CONFIGS["20b"], layers=2, sliding=None)
    compiled(config, batch, 1024, dump=tmp_path)
    (file,) = tmp_path.glob("*run_decode*thunk_sequence_after_thunk_passes.txt")
    # A line for everything that is launched, what is inside of another indented under it.
    lines = [line for line in file.read_text().splitlines() if re.match(r"\s*\d+: k\w+", line)]
    assert [line.split()[1] for line in lines if line[0] != " "] == ["kCommandBuffer"]
    kinds = collections.Counter(line.split()[1] for line in lines)
    assert kinds["kWhile"] == 1
    # Mosaic's come as custom calls, of gate_up and of down: 128 rows are 16 an expert.
    assert kinds["kCustomCall"] == by_mosaic * config.layers


@new_jax
@pytest.mark.parametrize("name, tokens, most_bytes", [("20b", 2048, 160e6), ("120b", 8192, 600e6)])
def test_a_prefill_chunk_reads_experts_where_they_lie(name, tokens, most_bytes):
    # Layers reuse the memory of those before. Of the last only keys and values are computed.
    config = dataclasses.replace(CONFIGS[name], layers=3, sliding=None)
    program, parameters, past = compiled(config, 1, tokens, tokens=tokens)
    memory, text = program.memory_analysis(), program.as_text()
    assert memory.temp_size_in_bytes < most_bytes
    _keeps_its_arguments(memory, text, parameters, past)
    mosaic = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu_v2"' in line]
    assert len(mosaic) == 2 * 2
    for matrix, rows, inner in (
        ("gate_up", 2 * config.ffn, config.embed),
        ("down", config.embed, config.ffn),
    ):
        fragments = f"u16[{config.experts},{rows // 64},{inner // 64},4,256]"
        assert sum(f"experts_{matrix}" in line and fragments in line for line in mosaic) == 2


def _keeps_its_arguments(memory, text, parameters, past):
    """The cache is written in place and no weight is copied or turned."""
    assert memory.argument_size_in_bytes < parameters + past + 1e6
    assert memory.alias_size_in_bytes >= past
    copies = re.findall(r"= \w+\[([\d,]+)\]\S* copy(?:-start)?\(", text)
    assert max(map(_size, copies), default=0) < 1e6, "an array of so many elements is copied"
    # The packed experts are the only large integers. A view of them moves nothing.
    results = re.findall(r"= u(?:8|16|32)\[([\d,]+)\]\S* ([\w-]+)\(", text)
    kinds = {kind for dims, kind in results if _size(dims) > 1e6}
    assert "parameter" in kinds
    assert kinds <= {"parameter", "get-tuple-element", "bitcast"}


def _size(dims):
    return prod(map(int, dims.split(",")))


def _launches(text):
    """(kind, name) of everything that the loop's body launches."""
    bodies = re.split(r"\n(?=%|ENTRY)", text)
    body = max(
        (b for b in bodies if not b.startswith("ENTRY")), key=lambda b: b.count("custom-call(")
    )
    kinds = r"= .*? (fusion|custom-call|copy)\("
    lines = [line for line in body.split("\n") if re.search(kinds, line)]
    names = [re.search(r"/(\w+)/pallas_call", line) for line in lines]
    return [
        (re.search(kinds, line)[1], name and name[1])
        for line, name in zip(lines, names, strict=True)
    ]
