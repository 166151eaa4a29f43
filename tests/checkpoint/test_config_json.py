"""config.json of every family, the published files to the byte, and values that cannot be."""

import copy
import dataclasses
import hashlib
import json

import checkpoints
import pytest

from gptoss_jax.checkpoint import config_from_json, config_to_hf, config_to_original
from gptoss_jax.checkpoint.config_json import with_storage
from gptoss_jax.config import Config

TINY = checkpoints.TINY


def ours(numbers: checkpoints.Numbers, **changes) -> Config:
    return Config(**dataclasses.asdict(numbers) | {"eos": numbers.eos[:1]} | changes)


@pytest.mark.parametrize(
    "config, size, sha256",
    [
        (
            Config.gpt_oss_20b(),
            1806,
            "3a2a26ded679375b7928ddeca59764df7cea83220c1961035f6d6e232659e9ce",
        ),
        (
            Config.gpt_oss_120b(),
            2089,
            "933aeb666a3fd851133ddd7686414f369bc564c4185fb5704416550879f10566",
        ),
    ],
    ids=["20b", "120b"],
)
def test_published_config_to_the_byte(config, size, sha256):
    text = json.dumps(config_to_hf(config, packed=True), indent=2) + "\n"
    assert len(text) == size
    assert hashlib.sha256(text.encode()).hexdigest() == sha256
    assert config_from_json(json.loads(text)) == config


@pytest.mark.parametrize("family", [4, 5])
def test_hugging_face_families(family):
    assert config_from_json(checkpoints.config_hf(TINY, family=family)) == ours(TINY)


def test_openai_family():
    expected = ours(TINY, eos=(), pad=None)
    assert config_from_json(checkpoints.config_original(TINY)) == expected
    assert config_from_json(config_to_original(expected)) == expected


def test_transformers_reads_what_we_write_and_we_what_it_writes(tmp_path):
    import transformers

    numbers = TINY.replace(rope_truncate=True, window=17, sliding=(False, True, True, False))
    config = ours(numbers)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config, packed=False)))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.layer_types == ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"]
    assert theirs.rope_parameters["truncate"] is True
    theirs.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "rope_scaling" not in again and "rope_parameters" in again
    again["architectures"] = ["GptOssForCausalLM"]
    assert config_from_json(again) == config


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters", "both", "neither"])
def test_yarn_is_never_skipped(spelling):
    """All four spellings give the same tables."""
    values = checkpoints.config_hf(TINY, family=4)
    rope, theta = values.pop("rope_scaling"), values.pop("rope_theta")
    if spelling in ("rope_scaling", "both"):
        values |= {"rope_scaling": rope, "rope_theta": theta}
    if spelling in ("rope_parameters", "both"):
        values |= {"rope_parameters": rope | {"rope_theta": theta}}
    assert config_from_json(values) == ours(TINY)


def test_rope_that_says_two_things():
    values = checkpoints.config_hf(TINY, family=4)
    values["rope_parameters"] = values["rope_scaling"] | {"rope_theta": 10_000.0}
    with pytest.raises(ValueError, match="rope_parameters and rope_scaling differ"):
        config_from_json(values)


def test_truncate_left_out_is_what_transformers_takes():
    values = checkpoints.config_hf(TINY, family=5)
    del values["rope_parameters"]["truncate"]
    assert config_from_json(values).rope_truncate is True


@pytest.mark.parametrize(
    "eos, read",
    [(None, ()), (7, (7,)), ([7, 9, 7], (7, 9)), (0, (0,))],
)
def test_eos(eos, read):
    assert config_from_json(checkpoints.config_hf(TINY) | {"eos_token_id": eos}).eos == read


NONSENSE = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "tie_word_embeddings": True,
    "hidden_act": "gelu",
    "num_hidden_layers": 0,
    "hidden_size": -96,
    "num_attention_heads": 7,
    "num_key_value_heads": "2",
    "head_dim": 7,
    "num_local_experts": 2.5,
    "num_experts_per_tok": 99,
    "experts_per_token": 3,
    "intermediate_size": True,
    "vocab_size": None,
    "sliding_window": 0,
    "layer_types": ["sliding_attention", "chunked_attention"] * 2,
    "rms_norm_eps": float("nan"),
    "swiglu_limit": 0,
    "swiglu_alpha": "1.7",
    "max_position_embeddings": 0,
    "eos_token_id": [1, -2],
    "rope_theta": float("inf"),
    "rope_scaling.rope_type": "linear",
    "rope_scaling.factor": 0.5,
    "rope_scaling.beta_fast": 1.0,
    "rope_scaling.truncate": "no",
    "rope_scaling.attention_factor": 1.2,
    "rope_scaling.original_max_position_embeddings": 0,
}


@pytest.mark.parametrize("key", NONSENSE)
def test_nonsense_is_refused_by_name(key):
    values = copy.deepcopy(checkpoints.config_hf(TINY, family=4))
    inside, _, leaf = key.rpartition(".")
    (values[inside] if inside else values)[leaf] = NONSENSE[key]
    with pytest.raises(ValueError) as caught:
        config_from_json(values)
    # The dataclass checks what needs several values together, under our own names.
    names = {"head_dim": "head_width", "rope_scaling.factor": "rope_factor",
             "rope_scaling.beta_fast": "rope_beta_fast"}  # fmt: skip
    assert names.get(key, leaf).rpartition(".")[2] in str(caught.value)


HOSTILE = [None, True, False, "", "7", "\ud800", [], [None], {}, {"a": 1}, 0, -1, 1.5, -0.0, 1e-320,
           10**12, 10**400, -(10**400), float("inf"), float("nan"), "x" * 10**5]  # fmt: skip


@pytest.mark.parametrize("written", [checkpoints.config_hf(TINY), checkpoints.config_hf(
    TINY, family=5), checkpoints.config_original(TINY)], ids=["4", "5", "original"])  # fmt: skip
def test_any_value_of_any_key_is_read_or_refused_in_a_short_line(written):
    """JSON of any kind: nothing but ValueError, nothing that takes long, no message without end."""
    places = [(written, key) for key in written]
    for key, value in written.items():
        if key.startswith("rope_") and isinstance(value, dict):
            places += [(value, inner) for inner in value]
    for where, key in places:
        before = where[key]
        for value in HOSTILE:
            where[key] = value
            try:
                config_from_json(written)
            except ValueError as e:
                assert len(str(e).encode()) < 400, (key, value)
        where[key] = before


@pytest.mark.parametrize(
    "written, key, field, value",
    [
        ("hf", "rms_norm_eps", "norm_eps", 1e-5),
        ("hf", "swiglu_limit", "swiglu_limit", 7.0),
        ("hf", "swiglu_alpha", "swiglu_alpha", 1.702),
        ("hf", "max_position_embeddings", "max_context", 131_072),
        ("hf", "rope_theta", "rope_theta", 150_000.0),
        ("hf", "rope_scaling", "rope_factor", 32.0),
        ("hf", "eos_token_id", "eos", ()),
        ("hf", "pad_token_id", "pad", None),
        ("hf", "layer_types", "sliding", (True, False, True, False)),
        ("original", "swiglu_limit", "swiglu_limit", 7.0),
        ("original", "initial_context_length", "rope_original_context", 4096),
        ("original", "rope_scaling_factor", "rope_factor", 32.0),
        ("original", "rope_theta", "rope_theta", 150_000.0),
        ("original", "rope_ntk_beta", "rope_beta_fast", 32.0),
        ("original", "rope_ntk_alpha", "rope_beta_slow", 1.0),
    ],
)
def test_what_is_left_out_is_as_published(written, key, field, value):
    """Here all the others differ from the published ones, so that no default hides another."""
    other = TINY.replace(
        norm_eps=1e-6, swiglu_limit=5.0, swiglu_alpha=1.5, max_context=777, rope_theta=9e4,
        rope_factor=4.0, rope_original_context=99, rope_beta_fast=9.0, rope_beta_slow=2.0,
        sliding=(False, True, True, False),
    )  # fmt: skip
    if written == "original":
        other = other.replace(norm_eps=1e-5, swiglu_alpha=1.702, sliding=None)
        values = checkpoints.config_original(other)
    else:
        values = checkpoints.config_hf(other) | {"swiglu_alpha": 1.5}
    assert getattr(config_from_json(values), field) != value
    values.pop(key)
    assert getattr(config_from_json(values), field) == value


@pytest.mark.parametrize(
    "key, value",
    [("attention_bias", 1), ("tie_word_embeddings", 0), ("layer_types", ["full_attention"] * 3)],
)
def test_one_is_not_true_and_every_layer_has_a_type(key, value):
    with pytest.raises(ValueError, match=key):
        config_from_json(checkpoints.config_hf(TINY) | {key: value})


@pytest.mark.parametrize(
    "key, value",
    [("num_hidden_layers", 10_001), ("vocab_size", 2**31), ("rope_theta", 10**400),
     ("rms_norm_eps", -(10**400)), ("num_hidden_layers", 1e308)],
)  # fmt: skip
def test_numbers_beyond_any_model(key, value):
    with pytest.raises(ValueError, match=key):
        config_from_json(checkpoints.config_hf(TINY) | {key: value})


def test_all_nonsense_is_named_together():
    values = checkpoints.config_hf(TINY) | {
        "hidden_size": -1,
        "head_dim": "x",
        "hidden_act": "relu",
    }
    del values["vocab_size"]
    with pytest.raises(ValueError) as caught:
        config_from_json(values)
    for key in ("hidden_size", "head_dim", "hidden_act", "vocab_size"):
        assert key in str(caught.value)


@pytest.mark.parametrize("values", [{}, {"hidden_size": 96}, {"model_type": "llama"}])
def test_unknown_architecture(values):
    with pytest.raises(ValueError, match="architecture|model_type 'llama'"):
        config_from_json(values)


@pytest.mark.parametrize(
    "change",
    [
        dict(norm_eps=1e-6),
        dict(swiglu_alpha=1.0),
        dict(rope_truncate=True),
        dict(sliding=(True,) * 4),
        dict(swiglu_limit=None),
    ],
    ids=lambda c: next(iter(c)),
)
def test_original_layout_refuses_what_openais_code_would_ignore(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        config_to_original(ours(TINY, **change))


def test_dense_config_says_nothing_of_quantisation():
    values = config_to_hf(ours(TINY), packed=False)
    assert "quantization_config" not in values and values["torch_dtype"] == "bfloat16"
    for family, key in ((4, "torch_dtype"), (5, "dtype")):
        values = with_storage(checkpoints.config_hf(TINY, family=family), packed=False)
        kinds = {k for k in values if k in ("dtype", "torch_dtype", "quantization_config")}
        assert kinds == {key} and values[key] == "bfloat16"
