"""Our model against transformers and OpenAI's torch model, and all three against the oracle.

300 tokens with a window of 8, in every layout, with sizes that coincide (F = D) and that do not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from checkpoints import TINY, decoded, make_weights, write
from flax import nnx

import gptoss_jax as gj

CASES = [(size, layout) for size in ("tiny", "square") for layout in ("mxfp4", "bf16", "original")]
CASES += [("tiny", "mxfp4-sharded")]
GREEDY = gj.Sampler(temperature=0.0)


@pytest.mark.parametrize("size, layout", CASES)
def test_float32_logits(size, layout, ours, theirs, expected):
    torch, exact = theirs(size, layout)["logits"], expected(size).logits
    tolerances.assert_logits(torch, exact)
    tolerances.assert_logits(ours(size, layout)["logits"], torch)
    tolerances.assert_logits(ours(size, layout)["logits"], exact)


@pytest.mark.parametrize(
    "size, layout", [("tiny", "mxfp4"), ("square", "bf16"), ("tiny", "original")]
)
def test_every_layer(size, layout, ours, theirs, expected):
    ours, theirs, exact = ours(size, layout), theirs(size, layout), expected(size)
    for layer in range(TINY.layers):
        for name, want in (("after_attention", exact.attended), ("after", exact.hidden)):
            where = f"layer {layer}, {name}"
            assert tolerances.logit_error(ours[name][layer], want[layer]) < 1e-4, where
            assert tolerances.logit_error(ours[name][layer], theirs[name][layer]) < 1e-4, where
        np.testing.assert_array_equal(ours["router_ids"][layer], exact.expert_ids[layer])
        np.testing.assert_array_equal(ours["router_ids"][layer], theirs["router_ids"][layer])
        error = np.abs(ours["router_logits"][layer] - theirs["router_logits"][layer]).max()
        assert error < 1e-4, f"layer {layer}: router logits differ by {error}"


def test_layouts_hold_the_same_model(ours):
    """Packed experts are the same bytes in three layouts; dense ones the same numbers."""
    packed = ours("tiny", "mxfp4")["logits"]
    for layout in ("mxfp4-sharded", "original"):
        np.testing.assert_array_equal(ours("tiny", layout)["logits"], packed)
    dense = ours("tiny", "mxfp4", "float32", "dense")["logits"]
    np.testing.assert_array_equal(ours("tiny", "bf16")["logits"], dense)
    tolerances.assert_logits(dense, packed)


@pytest.fixture(scope="session")
def prompts(tokens):
    """One shorter than the window, one longer, one of five windows, in one batch."""
    return [tokens[50:53], tokens[:20], tokens[100:141]]


@pytest.mark.parametrize(
    "size, layout", [("tiny", "mxfp4"), ("square", "bf16"), ("tiny", "original")]
)
def test_48_greedy_tokens(size, layout, load, reference, prompts):
    """The reference chooses each of our tokens when shown all that came before it."""
    model = load(size, layout)
    out = gj.generate(model, prompts, max_new_tokens=48, sampler=GREEDY, stop_tokens=())
    for prompt, chosen in zip(prompts, out.tokens, strict=True):
        assert len(chosen) == 48
        logits = reference(size, layout).logits(prompt + chosen[:-1])[len(prompt) - 1 :]
        assert logits.argmax(axis=-1).tolist() == chosen


def test_48_greedy_tokens_of_transformers_generate(load, reference, prompts):
    """The same through transformers' own loop and cache."""
    model = reference("tiny", "mxfp4").model
    import torch
    import transformers

    greedy = transformers.GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=48)
    model.generation_config = greedy  # without the checkpoint's stops
    out = gj.generate(
        load("tiny", "mxfp4"), prompts, max_new_tokens=48, sampler=GREEDY, stop_tokens=()
    )
    for prompt, ours in zip(prompts, out.tokens, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids))
        assert ours == theirs[0, len(prompt) :].tolist()


def test_router_logits_that_bfloat16_would_tie(tmp_path):
    """A float32 bias of 512, 511, 510, 509 keeps its order and weights in a bfloat16 model."""
    numbers = TINY.replace(layers=1)
    stored = make_weights(numbers)
    name = "model.layers.0.mlp.router."
    stored[name + "weight"] = 0 * stored[name + "weight"]
    bias = np.full(numbers.experts, -64, np.float32)
    bias[[7, 2, 9, 4]] = 512, 511, 510, 509
    stored[name + "bias"] = bias
    folder = write(tmp_path, numbers, stored, router_bias_float32=True)
    model = gj.load(folder, allow_zero=True)
    assert model.dtype == jnp.bfloat16
    block = model.blocks[0]
    *_, ids, weights = block.moe.route(jnp.ones((2, numbers.embed), jnp.bfloat16), block.moe_norm)
    assert ids.tolist() == [[7, 2, 9, 4]] * 2
    np.testing.assert_allclose(weights[0], [0.6439, 0.2369, 0.0871, 0.0321], atol=1e-4)


@pytest.mark.parametrize("layout", ["mxfp4", "original"])
def test_bfloat16_costs_what_it_costs_the_references(layout, ours, theirs, expected):
    """Bounds from the references' own distance to float64 on the same weights and tokens.

    A router in bfloat16 flips near ties, ours is float32 and need not: rows of another expert
    (a difference above a tenth of the spread) are at most as many as theirs, with some room.
    """
    exact = expected("tiny").logits
    mine = np.asarray(ours("tiny", layout, "bfloat16")["logits"], np.float32)
    torch = theirs("tiny", layout, "bfloat16")["logits"]
    rows, reference = (tolerances.row_difference(x, exact) for x in (mine, torch))
    assert np.median(rows) < 1.25 * np.median(reference)
    assert np.median(rows) < tolerances.BFLOAT16_ROW * tolerances.spread(exact)
    assert (rows > 0.1).mean() < 1.5 * (reference > 0.1).mean() + 0.02
    for other in (exact, torch):
        clear = tolerances.clear_choices(mine, other)
        assert clear.mean() > 0.5
        np.testing.assert_array_equal(mine.argmax(-1)[clear], np.asarray(other).argmax(-1)[clear])


def test_published_settings_of_rotary_positions_far_out(tmp_path):
    """Positions past 4096 and past bfloat16's 256, head width 64: frequencies as published.

    One layer that sees everything; the oracle says what logits at positions 0, 1, ... would be,
    since only distances matter.
    """
    numbers = TINY.replace(layers=1, head_width=64, sliding=(False,))
    stored = make_weights(numbers)
    model = gj.load(write(tmp_path, numbers, stored), dtype="float32")
    ids = np.random.default_rng(2).integers(0, numbers.vocab, 12)
    exact = oracle.logits(numbers, decoded(stored), ids)
    graph, state = nnx.split(model)

    @jax.jit
    def logits(state, ids_BT, positions_BT):
        model = nnx.merge(graph, state)
        return model.logits(model.hidden(ids_BT, positions_BT)[0])

    for start, bound in ((0, 1e-4), (4090, 1e-3), (131_060, 3e-2)):
        positions = jnp.asarray(start + np.arange(12), jnp.int32)[None]
        got = logits(state, jnp.asarray(ids, jnp.int32)[None], positions)[0]
        # float32 holds an angle near 131060 to 2**-7 of a radian: 2.5e-3 in cosine, as published.
        assert tolerances.logit_error(got, exact) < bound, start
