"""The loss of a batch against the model run on each document alone, and remat and bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from train_cases import SMALL, network, parameters

from gptoss_jax.train import Batches, Documents
from gptoss_jax.train.step import Network, named

ROW = 16
# One layer that sees everything compiles in half the time.
ONE = dataclasses.replace(SMALL, layers=1, sliding=(False,))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    docs = Documents.of(
        (rng.integers(0, ONE.vocab, n), rng.random(n) < 0.6) for n in (9, 5, 12, 7, 3)
    )
    return docs, Batches(docs, row=ROW, rows=3, seed=0).at(0)


def gradients(net, batch, aux=0.0):
    run = jax.jit(jax.value_and_grad(lambda p, b: net.loss(p, b, aux=aux), has_aux=True))
    return run(parameters(ONE), batch)


@pytest.fixture(scope="module")
def plain(batch):
    return gradients(network(ONE, ROW), batch[1], aux=0.5)


def test_loss_is_the_mean_over_documents_run_alone(batch, plain):
    docs, _ = batch
    model = network(ONE, ROW).model(parameters(ONE))
    total = 0.0
    for a, b in zip(docs.starts, docs.starts[1:], strict=False):
        ids, counts = docs.tokens[a:b], docs.counts[a:b]
        padded = np.zeros(ROW, np.int32)
        padded[: len(ids)] = ids
        logits = np.asarray(model(padded[None]))[0].astype(float)
        for t in range(1, len(ids)):
            row = logits[t - 1]
            total += counts[t] * (np.log(np.exp(row - row.max()).sum()) + row.max() - row[ids[t]])
    counted = sum(docs.counts[a + 1 : b].sum() for a, b in zip(docs.starts, docs.starts[1:]))  # noqa: B905
    (loss, parts), _ = plain
    # Packed: larger angles. float32.
    assert float(parts["loss"]) == pytest.approx(total / counted, rel=1e-5)
    assert float(loss) == pytest.approx(float(parts["loss"] + 0.5 * parts["aux"]), rel=1e-6)
    assert 1.0 <= float(parts["aux"]) < ONE.experts


def test_padding_changes_nothing(batch, plain):
    padded = {  # a row of no documents, as the last batch of a small file has
        name: np.concatenate([x, np.full((1, ROW), -1 if name == "positions" else 0, x.dtype)])
        for name, x in batch[1].items()
    }
    loss = jax.jit(lambda params, batch: network(ONE, ROW).loss(params, batch, aux=0.5)[1])
    for name, value in loss(parameters(ONE), padded).items():
        assert float(value) == pytest.approx(float(plain[0][1][name]), rel=1e-6), name


def test_remat_changes_memory_and_not_gradients(batch, plain):
    net = Network.of(ONE, compute=jnp.float32, row=ROW, remat=True)
    for which, has in ((net, True), (network(ONE, ROW), False)):
        traced = jax.make_jaxpr(which.loss)(parameters(ONE), batch[1])
        assert has == any(str(e.primitive) in ("remat2", "checkpoint") for e in traced.eqns)
    (loss, _), grads = gradients(net, batch[1], aux=0.5)
    (expected, _), expected_grads = plain
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for name, gradient in expected_grads.items():
        scale = float(jnp.abs(gradient).max()) + 1e-6
        np.testing.assert_allclose(grads[name], gradient, atol=1e-5 * scale, err_msg=name)


def test_every_parameter_is_trained(plain):
    _, grads = plain
    for name, gradient in grads.items():
        assert gradient.dtype == jnp.float32
        assert float(jnp.abs(gradient).max()) > 0, name


def test_bfloat16_computes_with_float32_masters(batch, plain):
    net = Network.of(ONE, compute=jnp.bfloat16, row=ROW, remat=False)
    kept = {name for name, dtype in net.dtypes.items() if dtype == jnp.float32}
    assert {name.rsplit(".", 1)[-1] for name in kept} == {"scale_D", "sinks_KG", "router_bias_E"}
    made = jax.eval_shape(lambda params: nnx.state(net.model(params, True)), parameters(ONE))
    assert [leaf.dtype for leaf in jax.tree.leaves(made)] == list(net.dtypes.values())
    (loss, _), grads = gradients(net, batch[1])
    expected = float(plain[0][1]["loss"])
    # bfloat16 keeps 8 bits; losses near 5 differ in the third digit.
    assert float(loss) == pytest.approx(expected, rel=0.02)
    assert all(g.dtype == jnp.float32 and jnp.isfinite(g).all() for g in grads.values())


def test_names_are_the_model_s():
    names = list(parameters(ONE))
    assert "blocks.0.moe.experts.gate_up" in names and "embed.weight_VD" in names
    assert named((jax.tree_util.DictKey("a"), jax.tree_util.SequenceKey(3))) == "a.3"
