"""The oracle against published golden numbers; the tiny checkpoints against other readers."""

import math

import numpy as np
import oracle
import pytest
from checkpoints import (
    LAYOUTS,
    SQUARE,
    TINY,
    decoded,
    make_weights,
    mxfp4_decode,
    mxfp4_encode,
    on_bfloat16,
    tokenizer_json,
    write,
)

REAL = TINY.replace(head_width=64)  # the rotary settings of the published models


def test_yarn_table_of_the_published_models():
    low, high = oracle.rope_range(REAL)
    assert low == pytest.approx(8.092779115512402, rel=1e-12)
    assert high == pytest.approx(17.39802450158856, rel=1e-12)
    frequencies, concentration = oracle.rope_frequencies(REAL)
    assert concentration == pytest.approx(1.3465735902799727, rel=1e-15)
    golden = {
        0: 1, 1: 0.6890443059, 8: 5.081327482e-2, 9: 3.170569618e-2, 10: 1.933500113e-2,
        12: 6.794959490e-3, 13: 3.860359317e-3, 16: 4.564839192e-4, 17: 1.293187012e-4,
        18: 3.830881237e-5, 24: 4.099978482e-6, 31: 3.023511428e-7,
    }  # fmt: skip
    for channel, expected in golden.items():
        assert frequencies[channel] == pytest.approx(expected, rel=2e-9), channel


def test_rotation_pairs_the_halves_once():
    unit = np.zeros((1, 64))
    unit[0, 0] = 1
    turned = oracle.rotate(unit, np.array([1]), REAL)[0]
    assert turned[0] == pytest.approx(math.cos(1) * 1.3465735902799727)
    assert turned[32] == pytest.approx(math.sin(1) * 1.3465735902799727)
    assert np.count_nonzero(turned) == 2
    x = np.random.default_rng(0).standard_normal((3, 64))
    far = oracle.rotate(x, np.array([0, 4096, 131071]), REAL)
    ratio = np.linalg.norm(far, axis=-1) / np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(ratio, 1.3465735902799727)


def test_swiglu():
    golden = {
        (0, 0): 0, (1, 0): 0.845795766, (1, -1): 0, (1, 1): 1.69159153, (-1, 1): -0.308408468,
        (8, 0): 6.99995313, (7, 0): 6.99995313, (100, 100): 55.999625, (2, 8): 15.485269,
        (2, -8): -11.6139517, (-8, 1): -1.95328577e-5, (-7, 1): -9.37433934e-5,
        (0.5, -9): -2.10233062,
    }  # fmt: skip
    for (gate, up), expected in golden.items():
        assert oracle.swiglu(gate, up) == pytest.approx(expected, rel=1e-8), (gate, up)
    assert oracle.swiglu(100.0, 100.0, limit=None) == pytest.approx(10100)


def test_router():
    ids, shares = oracle.route(np.array([2, 1, 0.5, 0, -1, -3.0]), 4)
    assert ids.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(shares, [0.57925853, 0.2130973, 0.12925005, 0.07839412], rtol=1e-7)
    ids, shares = oracle.route(np.array([1, 3, 3, 1.0]) - 50, 3)
    assert ids.tolist() == [1, 2, 0], "ties go to the lower id"


def test_sinks():
    shares = oracle.sink_softmax(np.array([1.0, 2.0]), 3.0)
    np.testing.assert_allclose(shares, [0.09003057, 0.24472847], rtol=1e-7)
    assert shares.sum() == pytest.approx(1 / (1 + math.exp(3 - math.log(math.e + math.e**2))))
    assert oracle.sink_softmax(np.array([]), 3.0).shape == (0,)
    assert oracle.sink_softmax(np.array([1.0, 2.0]), 1e4).tolist() == [0, 0]
    plain = np.exp([1.0, 2.0]) / np.exp([1.0, 2.0]).sum()
    np.testing.assert_allclose(oracle.sink_softmax(np.array([1.0, 2.0]), -1e9), plain)


def test_mxfp4_bytes():
    block = np.zeros(16, np.uint8)
    block[:8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    values = mxfp4_decode(block[None], np.array([127], np.uint8))
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert values[:16].tolist() == expected
    assert np.signbit(values[8]) and not values[16:].any()
    half = {0: 2.938736e-39, 126: 0.25, 128: 1.0, 134: 64.0}
    for scale, expected in half.items():
        value = mxfp4_decode(block[None], np.array([scale], np.uint8))[1]
        assert value == pytest.approx(expected, rel=1e-6), scale


def test_mxfp4_encode_finds_values_that_are_on_the_grid():
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (5, 3, 16), dtype=np.uint8)
    blocks[..., 0] = 0x17  # an element of 6: the block's scale is then the only one possible
    scales = rng.integers(100, 150, (5, 3), dtype=np.uint8)
    again = mxfp4_encode(mxfp4_decode(blocks, scales))
    assert np.array_equal(again[0], blocks) and np.array_equal(again[1], scales)


def test_bfloat16_rounds_to_even():
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, -0.0, 3.0e38], np.float32)
    assert on_bfloat16(values)[:2].tolist() == [1.0, 1 + 2**-6]
    assert np.signbit(on_bfloat16(values)[2])
    assert np.array_equal(on_bfloat16(on_bfloat16(values)), on_bfloat16(values))


@pytest.mark.parametrize("numbers", [TINY, SQUARE], ids=["tiny", "square"])
def test_random_weights_make_faults_visible(numbers):
    weights = make_weights(numbers)
    tokens = np.random.default_rng(0).integers(0, numbers.vocab, 64)
    trace = oracle.trace(numbers, decoded(weights), tokens)
    for name, value in weights.items():
        if name.endswith("bias") or name.endswith("sinks"):
            assert np.abs(value).max() > 0.2 and len(np.unique(value)) > value.size / 4, name
    for layer, share in enumerate(trace.clamped):
        assert share > 0.01, f"layer {layer}: hardly anything passes the clamp"
        assert len(np.unique(trace.expert_ids[layer])) == numbers.experts, f"layer {layer}"
    assert 0.7 < trace.logits.std() < 1.4


def test_sliding_layers_see_exactly_the_window():
    numbers = TINY.replace(layers=1)
    weights = decoded(make_weights(numbers))
    tokens = np.random.default_rng(0).integers(0, numbers.vocab, 20)
    changed = tokens.copy()
    changed[3] = (changed[3] + 1) % numbers.vocab
    before, after = (oracle.logits(numbers, weights, t) for t in (tokens, changed))
    differs = np.abs(before - after).max(axis=-1) > 0
    assert np.flatnonzero(differs).tolist() == list(range(3, 11))
    full = numbers.replace(sliding=(False,))
    before, after = (oracle.logits(full, weights, t) for t in (tokens, changed))
    assert np.abs(before - after).max(axis=-1)[3:].all()


def test_only_relative_positions_matter():
    weights = decoded(make_weights(TINY))
    tokens = np.random.default_rng(0).integers(0, TINY.vocab, 12)
    at_0 = oracle.logits(TINY, weights, tokens)
    for start in (1, 4090, 131_000):
        moved = oracle.logits(TINY, weights, tokens, start + np.arange(12))
        np.testing.assert_allclose(moved, at_0, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_read_back_with_the_safetensors_library(tmp_path, layout):
    from safetensors.numpy import load_file

    numbers = TINY.replace(layers=2)
    weights = make_weights(numbers)
    write(tmp_path, numbers, weights, layout)
    read = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        read |= load_file(path)
    parameters = sum(value.size for value in read.values())
    if layout.startswith("mxfp4"):
        assert set(read) == set(weights)
        for name, value in weights.items():
            assert np.array_equal(read[name].astype(value.dtype), value), name
        assert parameters == sum(value.size for value in weights.values())
    elif layout == "bf16":
        name = "model.layers.1.mlp.experts.down_proj"
        assert read[name].shape == (12, 160, 96)
        rows = decoded(weights)[name.replace("_proj", "_rows")]
        assert np.array_equal(read[name].astype(np.float64), rows.swapaxes(1, 2))
    else:
        assert read["block.1.attn.qkv.weight"].shape == (200, 96)
        k = weights["model.layers.1.self_attn.k_proj.weight"]
        assert np.array_equal(read["block.1.attn.qkv.weight"][120:160].astype(np.float32), k)


def test_shards_cut_an_expert_stack(tmp_path):
    write(tmp_path, TINY, make_weights(TINY), "mxfp4-sharded")
    import json

    placed = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    parts = [placed[f"model.layers.2.mlp.experts.gate_up_proj_{p}"] for p in ("blocks", "scales")]
    assert parts[0] != parts[1]


def test_tokenizer_is_bytes_and_specials():
    import json

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json()))
    text = "Grüße, 東京\n\x00"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.token_to_id("<|return|>") == TINY.eos[0]
    assert tokenizer.get_vocab_size() == 265 < TINY.vocab
