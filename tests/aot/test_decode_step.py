"""The whole decoding loop at the published sizes, compiled for an H200 that is not there."""

import collections
import re

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
from gptoss_jax.model import GptOss
from gptoss_jax.sampling import Sampler

pytestmark = pytest.mark.aot


@pytest.fixture(autouse=True)
def shapes_in_place_of_arrays():
    """A Cache of shapes is no Cache of arrays, which the checked annotations ask for."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def abstract_model(config):
    """Shapes of a bfloat16 model whose experts lie as the Triton kernels read them."""

    def make():
        model = GptOss(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, experts="packed")
        model.backend = "triton"
        for block in model.blocks:
            experts = block.moe.experts
            experts.replace(experts.weights().to_layout("triton"))
        return model

    return nnx.eval_shape(make)


def compiled_decode(config, batch, context):
    """The compiled loop, bytes of parameters, bytes of cache."""
    one = h200.sharding()

    def put(x):
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=one)

    with device.ahead_of_time():
        graph, state = nnx.split(abstract_model(config))
        leaves, tree = jax.tree.flatten(state)
        capacity = buckets.capacity(context, config.max_context)
        past = jax.eval_shape(lambda: cache.make(config, batch, capacity))
        zeros = np.zeros(batch, np.int32)
        rows = Rows(token_B=zeros, status_B=zeros, step=np.int32(0), seen_BV=None)
        sampler = Sampler(temperature=0.0)
        request = Request(
            seeds_B2=np.zeros((batch, 2), np.uint32),
            stops=np.zeros(buckets.stops(1), np.int32),
            knobs=sampler.knobs(),
        )
        args = jax.tree.map(put, (leaves, past, rows, request, np.int32(0)))
        decode = programs(graph, tree, config, None, gpu=True).decode
        compiled = decode.lower(*args, sampler.plan(), buckets.room(1)).compile()

    def size(arrays):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))

    return compiled, size(leaves), size(past)


@pytest.mark.parametrize("name, batch, context", [("20b", 1, 1024), ("120b", 1, 1024)])
def test_nothing_large_is_copied(name, batch, context):
    config = {"20b": Config.gpt_oss_20b, "120b": Config.gpt_oss_120b}[name]()
    compiled, parameters, past = compiled_decode(config, batch, context)
    memory = compiled.memory_analysis()
    # Logits of a row are 0.8 MB; the smallest weight that could be copied by mistake is 15 MB.
    assert memory.temp_size_in_bytes < 8e6
    assert memory.argument_size_in_bytes < parameters + past + 1e6
    assert memory.alias_size_in_bytes >= past  # the cache is written in place
    text = compiled.as_text()
    copies = [int(np.prod([int(n) for n in dims.split(",")])) for dims in _copied(text)]
    assert max(copies, default=0) < 1e6, "an array of so many elements is copied"
    # A layer: qkv; attention, and the sum of its parts in every other; out; norm and router;
    # gate_up, which chooses the experts; down, which sums them and adds the residual.
    found = _launches(text)
    ours = [name for kind, name in found if kind == "custom-call"]
    assert len(ours) == 6 * config.layers + config.layers // 2, collections.Counter(ours)
    assert len(found) - len(ours) < 30, "kernels of XLA's, which may be one more in every layer"


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


def _copied(text):
    """Dimensions of every result of a copy in the compiled program."""
    return re.findall(r"= \w+\[([\d,]+)\]\S* copy(?:-start)?\(", text)
