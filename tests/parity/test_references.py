"""Our model against transformers and OpenAI's torch model, and all three against the oracle.

300 tokens with a window of 8, in every layout, with sizes that coincide (F = D) and that do not.
"""

import json
import subprocess
import sys
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from checkpoints import TINY, decoded, make_weights, write
from flax import nnx
from needed import need

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


@pytest.mark.parametrize(
    "size, layout", [("tiny", "mxfp4"), ("square", "bf16"), ("tiny", "original")]
)
def test_48_greedy_tokens(size, layout, load, reference, tokens):
    """The reference chooses each of our tokens when shown all that came before it."""
    prompt = tokens[:20]
    out = gj.generate(
        load(size, layout), [prompt], max_new_tokens=48, sampler=GREEDY, stop_tokens=()
    )
    assert len(out.tokens[0]) == 48
    logits = reference(size, layout).logits(prompt + out.tokens[0][:-1])[len(prompt) - 1 :]
    assert logits.argmax(axis=-1).tolist() == out.tokens[0]


def test_48_greedy_tokens_of_transformers_generate(load, folder, tokens):
    """The same through transformers' own loop and cache."""
    need("torch", "transformers")
    import torch
    import transformers

    model = transformers.GptOssForCausalLM.from_pretrained(
        folder("tiny", "mxfp4"),
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    prompt = torch.tensor([tokens[:20]])
    mask = torch.ones_like(prompt)
    theirs = model.generate(prompt, attention_mask=mask, max_new_tokens=48)[0, 20:].tolist()
    out = gj.generate(
        load("tiny", "mxfp4"), [tokens[:20]], max_new_tokens=48, sampler=GREEDY, stop_tokens=()
    )
    assert out.tokens == [theirs]


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


def test_transformers_does_not_take_our_folder_for_hugging_faces_kernels():
    need("transformers")
    code = (
        "import gptoss_jax.kernels, json, transformers.utils as u;"
        "print(json.dumps(u.is_kernels_available()))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) is (find_spec("kernels") is not None)
