"""`gptoss_jax.parity`: what the report says of models that agree and of one that does not."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from checkpoints import TINY, make
from needed import need

from gptoss_jax import checkpoint, references
from gptoss_jax.parity import Difference, difference, divergence, parity, same_sets
from gptoss_jax.sharding import make_mesh

NUMBERS = TINY.replace(layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    need("torch", "transformers")
    path = tmp_path_factory.mktemp("report")
    make(path, NUMBERS, tokenizer=True)
    return path


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def report(folder, told):
    return parity(folder, lengths=(24,), new_tokens=6, progress=told.append)


def test_progress_is_told_as_it_is_made(report, told, folder):
    assert told[:2] == [f"{folder} is loaded here", "24 tokens are computed here"]
    assert told[2] == f"{folder} is loaded in {report.reference}"
    assert told[3:] == [
        f"24 tokens: the logits' median difference is {report.lengths[0].median:.2g}"
    ]


def test_models_that_agree(report):
    assert report.problems == []
    assert report.reference.startswith("transformers ")
    assert [one.length for one in report.lengths] == [24]
    for one in report.lengths:
        assert one.greedy_equal == len(one.greedy) == 6
        assert one.argmax == 1 and one.clear == one.length and one.clear_wrong == 0
        assert 0 < one.logits.max < 1e-4 * one.logits.spread
        assert 0 <= one.kl_mean <= one.kl_max < 1e-8
        assert [row.layer for row in one.layers] == [0, 1]
        for row in one.layers:
            assert row.router == 1
            for d in (row.attention, row.experts):
                assert 0 < d.mean < d.max < 1e-4 * d.spread and d.cosine > 0.999999


def test_ids_without_text_are_masked_on_both_sides(report):
    assert report.text_vocab == 265 < NUMBERS.vocab
    assert all(token < 265 for one in report.lengths for token in one.greedy)


def test_table_and_json(report):
    table = report.table()
    assert table.count("100.0%") == 1 + 2  # argmax of the one length, experts of two layers
    assert "6/6" in table and table.endswith("The two agree.")
    assert json.loads(json.dumps(report.to_json()))["lengths"][0]["layers"][0]["router"] == 1


def test_nan_is_a_problem_and_no_json(report):
    one = report.lengths[0]
    bad = dataclasses.replace(one.logits, max=float("nan"))
    broken = dataclasses.replace(one, logits=bad, median=float("nan"))
    spoilt = dataclasses.replace(report, lengths=[broken])
    assert len(spoilt.problems) == 1 and "nan" in spoilt.problems[0]
    text = json.dumps(spoilt.to_json(), allow_nan=False)
    assert json.loads(text)["lengths"][0]["median"] is None


@pytest.fixture(scope="module")
def wrong(folder):
    """The report on a model whose attention in layer 1 has the wrong sign."""
    sound = checkpoint.load

    def load(*args, **how):
        model = sound(*args, **how)
        model.blocks[1].attn.out_DKGH[...] = -model.blocks[1].attn.out_DKGH[...]
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "load", load)
        return parity(folder, lengths=(24,), new_tokens=6)


def test_a_fault_is_reported_at_the_layer_where_it_is(wrong):
    first, second = wrong.lengths[0].layers
    assert first.attention.max < 1e-4 and first.experts.max < 1e-4
    assert second.attention.max > 0.1
    assert wrong.lengths[0].kl_mean > 1e-3
    assert len(wrong.problems) >= 2
    assert any("median difference" in problem for problem in wrong.problems)
    assert "differs: 24 tokens" in wrong.table()


def test_greedy_ids_count_up_to_the_first_that_differs(wrong, folder):
    """Checked against the reference's own greedy loop."""
    reference = references.open_reference(folder)
    start = np.random.default_rng(0).integers(0, 265, 24).tolist()
    (one,) = wrong.lengths
    ids, equal = start, 0
    for token in one.greedy:
        if reference.logits(ids)[-1, :265].argmax() != token:
            break
        ids, equal = [*ids, token], equal + 1
    assert one.greedy_equal == equal < 6


def test_over_a_mesh(folder):
    mesh = make_mesh(expert=4, data=2, devices=jax.devices("cpu"))
    report = parity(folder, lengths=(24,), new_tokens=0, mesh=mesh)
    assert report.problems == []
    assert report.lengths[0].layers[1].router == 1


def test_original_layout_goes_to_openais_model(tmp_path):
    need("torch", "gpt_oss.torch.model")
    make(tmp_path, NUMBERS, "original")
    report = parity(tmp_path, lengths=(1, 24), tokens=range(30), new_tokens=0, dtype="bfloat16")
    assert report.reference == "openai 0.0.9"
    assert report.problems == []
    assert [one.length for one in report.lengths] == [1, 24]
    for one in report.lengths:
        assert one.greedy == [] and one.greedy_equal == 0
        assert 1e-4 < one.median < 0.05, "bfloat16 is neither exact nor far away"
    assert "\n    24 " in report.table() and "at 24 tokens" in report.table()


def test_openais_experts_in_parts_are_the_whole(tmp_path, monkeypatch):
    need("torch", "gpt_oss.torch.model")
    make(tmp_path, NUMBERS, "original")
    whole = references.open_reference(tmp_path).trace(range(10))
    monkeypatch.setattr(references, "_CHUNK_BYTES", 1)  # a token at a time
    parts = references.open_reference(tmp_path).trace(range(10))
    np.testing.assert_allclose(parts["logits"], whole["logits"], atol=1e-5)
    np.testing.assert_array_equal(parts["router_ids"], whole["router_ids"])


@pytest.mark.parametrize(
    "how, message",
    [
        (dict(lengths=(5, 0)), "lengths must be at least 1"),
        (dict(lengths=(5,), tokens=[1, 2]), "only 2 are given"),
        (dict(dtype="float16"), "float16"),
    ],
)
def test_bad_arguments(folder, how, message):
    with pytest.raises(ValueError, match=message):
        parity(folder, **how)


@pytest.mark.parametrize(
    "layout, package",
    [("mxfp4", "torch"), ("bf16", "transformers"), ("original", "gpt_oss.torch.model")],
)
def test_a_missing_package_is_named_with_the_way_to_get_it(tmp_path, monkeypatch, layout, package):
    make(tmp_path, NUMBERS.replace(layers=1), layout)
    if package != "torch":
        monkeypatch.setitem(sys.modules, "torch", sys)
    monkeypatch.setitem(sys.modules, package, None)
    name = package.split(".")[0]
    with pytest.raises(references.ReferenceMissing, match=rf"needs {name} .*pip install") as e:
        parity(tmp_path)
    assert "\n" not in str(e.value)


def test_importing_parity_imports_no_torch():
    code = "import sys, gptoss_jax.parity; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_the_numbers_themselves():
    a, b = np.array([[3.0, 4.0], [1.0, 0.0]]), np.array([[3.0, 4.0], [0.0, 1.0]])
    assert difference(a, b) == Difference(max=1.0, mean=0.5, spread=float(b.std()), cosine=0.0)
    assert np.isnan(difference(a * np.nan, b).max)
    assert same_sets([[1, 2], [3, 4]], [[2, 1], [3, 5]]) == 0.5
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    expected = 0.5 * np.log(2) - 0.25 * np.log(2)
    got = divergence(np.log(p)[None] + 7, np.log(q)[None] - 300)
    np.testing.assert_allclose(got, [expected])
    with pytest.raises(ValueError, match=r"\(2, 2\).*\(1, 2\)"):
        difference(a, b[:1])


def test_a_missing_reference_fails_in_ci_and_skips_elsewhere(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no_such_package"):
        need("no_such_package")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="no_such_package"):
        need("json", "no_such_package")
