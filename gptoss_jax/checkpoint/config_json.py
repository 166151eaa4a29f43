"""config.json of the published families to Config, and back.

    Hugging Face, as published      rope_scaling + rope_theta, num_local_experts
    Hugging Face, transformers 5    rope_parameters with rope_theta in it, dtype for torch_dtype
    OpenAI `original/`              num_experts, rope_scaling_factor, rope_ntk_alpha, rope_ntk_beta

Whatever changes what the model computes is read and honoured, or refused by name.
"""

from typing import Any

from ..config import Config

_MISSING = object()
_LAYER_TYPES = {"sliding_attention": True, "full_attention": False}
_MAX_LAYERS = 10_000  # 120b has 36; a list is made of them before a tensor is looked at
# What transformers assumes where a config says nothing of rotary positions.
_PUBLISHED_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def config_from_json(values: dict[str, Any]) -> Config:
    """Reads any of the families. Raises ValueError naming every key that is missing or wrong."""
    if not isinstance(values, dict):
        raise ValueError(f"config.json must hold a JSON object; it holds {type(values).__name__}.")
    read = _Reader(values)
    if "architectures" in values or "model_type" in values:
        fields = _from_hf(read)
    elif "rope_scaling_factor" in values or "num_experts" in values:
        fields = _from_original(read)
    else:
        raise ValueError(
            "config.json names no architecture: neither model_type 'gpt_oss' (Hugging Face) nor "
            "num_experts and rope_scaling_factor (OpenAI's original/)."
        )
    if not read.problems:
        try:
            return Config(**fields)
        except ValueError as e:
            read.problems.append(str(e))
    raise ValueError("config.json: " + "; ".join(read.problems))


class _Reader:
    """Takes values out of the JSON and collects what is wrong with them."""

    def __init__(self, values: dict[str, Any], where: str = "", problems: list | None = None):
        self.values, self.where = values, where
        self.problems = [] if problems is None else problems

    def inside(self, key: str) -> "_Reader":
        value = self.values[key]
        if not isinstance(value, dict):
            self.problems.append(f"{key} must be an object; got {value!r:.80}")
            value = {}
        return _Reader(value, f"{self.where}{key}.", self.problems)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def whole(self, key: str, default=_MISSING, *, most: int = 2**31 - 1) -> int:
        value = self._get(key, default)
        if value is _MISSING:
            return 1
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return self._wrong(key, "must be a whole number of at least 1", value)
        if value > most:
            return self._wrong(key, f"must be at most {most}", value)
        return value

    def real(self, key: str, default=_MISSING) -> float:
        value = self._get(key, default)
        if value is _MISSING:
            return 1.0
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return float(self._wrong(key, "must be a number", value))
        if not abs(value) < 1e300:  # NaN and infinity; float() of whole numbers beyond it raises
            return float(self._wrong(key, "must be finite", value))
        return float(value)

    def same(self, key: str, only, why: str) -> None:
        """Refuses any value but the one this architecture has."""
        value = self.values.get(key)
        if value is not None and (
            value != only or isinstance(value, bool) != isinstance(only, bool)
        ):
            self.problems.append(f"{self.where}{key} {value!r:.80} is not implemented: {why}")

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in listed):
            self._wrong(key, "must be a token id or a list of them", value)
            return ()
        return tuple(dict.fromkeys(listed))

    def _get(self, key: str, default):
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            self.problems.append(f"{self.where}{key} is missing")
        return default

    def _wrong(self, key: str, must: str, value) -> int:
        self.problems.append(f"{self.where}{key} {must}; got {value!r:.80}")
        return 1


def _from_hf(read: _Reader) -> dict[str, Any]:
    v = read.values
    named = v.get("architectures")
    if named is not None and named != ["GptOssForCausalLM"]:
        read.problems.append(
            f"architectures {named!r:.80}; only GptOssForCausalLM is implemented here"
        )
    elif v.get("model_type", "gpt_oss") != "gpt_oss":
        read.problems.append(
            f"model_type {v['model_type']!r:.80}; only 'gpt_oss' is implemented here"
        )
    if read.problems:  # nothing else in it need make sense
        return {}
    read.same("attention_bias", True, "gpt-oss has biases on q, k, v and o")
    read.same("tie_word_embeddings", False, "gpt-oss has an unembedding of its own")
    read.same("hidden_act", "silu", "gpt-oss has a clamped SwiGLU")
    layers = read.whole("num_hidden_layers", most=_MAX_LAYERS)
    fields = _common(read, layers)
    fields["experts"] = read.whole("num_local_experts")
    chosen = "num_experts_per_tok" if read.has("num_experts_per_tok") else "experts_per_token"
    fields["experts_per_token"] = read.whole(chosen)
    if read.has("experts_per_token"):
        read.same(
            "experts_per_token",
            fields["experts_per_token"],
            f"num_experts_per_tok says {fields['experts_per_token']}",
        )
    fields["sliding"] = _sliding(read, layers)
    fields["norm_eps"] = read.real("rms_norm_eps", 1e-5)
    fields["swiglu_alpha"] = read.real("swiglu_alpha", 1.702)
    fields["max_context"] = read.whole("max_position_embeddings", 131_072)
    fields["eos"] = read.ids("eos_token_id")
    pad = read.ids("pad_token_id")
    fields["pad"] = pad[0] if pad else None
    return fields | _rope(read)


def _common(read: _Reader, layers: int) -> dict[str, Any]:
    if "swiglu_limit" in read.values and read.values["swiglu_limit"] is None:
        read.problems.append("swiglu_limit null; leave it out for 7.0, or give a number")
    heads, kv_heads = read.whole("num_attention_heads"), read.whole("num_key_value_heads")
    if heads % kv_heads:
        read.problems.append(
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    return dict(
        layers=layers,
        embed=read.whole("hidden_size"),
        kv_heads=kv_heads,
        q_per_kv=max(heads // kv_heads, 1),
        head_width=read.whole("head_dim"),
        ffn=read.whole("intermediate_size"),
        vocab=read.whole("vocab_size"),
        window=read.whole("sliding_window"),
        swiglu_limit=read.real("swiglu_limit", 7.0),
    )


def _sliding(read: _Reader, layers: int) -> tuple[bool, ...] | None:
    types = read.values.get("layer_types")
    if types is None:
        return None
    known = isinstance(types, list) and all(isinstance(t, str) and t in _LAYER_TYPES for t in types)
    if not known:
        read.problems.append(
            f"layer_types must list {' or '.join(_LAYER_TYPES)}; got {types!r:.80}"
        )
        return None
    if len(types) != layers:
        read.problems.append(
            f"layer_types names {len(types)} layers but num_hidden_layers is {layers}"
        )
        return None
    return tuple(_LAYER_TYPES[t] for t in types)


def _rope(read: _Reader) -> dict[str, Any]:
    """rope_parameters (transformers 5), rope_scaling and rope_theta (4), both, or neither."""
    spellings = [k for k in ("rope_parameters", "rope_scaling") if read.has(k)]
    if not spellings:
        read = _Reader({**read.values, "rope_scaling": _PUBLISHED_ROPE}, "", read.problems)
        spellings = ["rope_scaling"]
    found = [_rope_of(read, read.inside(key)) for key in spellings]
    if found[0] != found[-1]:
        read.problems.append(f"rope_parameters and rope_scaling differ: {found[0]}, {found[-1]}")
    return found[0]


def _rope_of(read: _Reader, rope: _Reader) -> dict[str, Any]:
    kind = rope.values.get("rope_type", rope.values.get("type"))
    if kind != "yarn":
        rope.problems.append(f"{rope.where}rope_type {kind!r:.80}; gpt-oss has 'yarn'")
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        rope.same(key, None, "only YaRN's own concentration 0.1·ln(factor) + 1")
    rope.same("partial_rotary_factor", 1.0, "every channel of a head turns")
    truncate = rope.values.get("truncate", True)  # transformers' default; the published say false
    if not isinstance(truncate, bool):
        rope.problems.append(f"{rope.where}truncate must be true or false; got {truncate!r:.80}")
    theta = rope if rope.has("rope_theta") else read
    original = "original_max_position_embeddings"
    if rope.has(original) or not read.has("initial_context_length"):
        context = rope.whole(original)
    else:
        context = read.whole("initial_context_length")
    return dict(
        rope_theta=theta.real("rope_theta", 150_000.0),
        rope_factor=rope.real("factor"),
        rope_original_context=context,
        rope_beta_fast=rope.real("beta_fast", 32.0),
        rope_beta_slow=rope.real("beta_slow", 1.0),
        rope_truncate=truncate,
    )


def _from_original(read: _Reader) -> dict[str, Any]:
    layers = read.whole("num_hidden_layers", most=_MAX_LAYERS)
    fields = _common(read, layers)
    fields["experts"] = read.whole("num_experts")
    fields["experts_per_token"] = read.whole("experts_per_token")
    context = read.whole("initial_context_length", 4096)
    factor = read.real("rope_scaling_factor", 32.0)
    return fields | dict(
        rope_theta=read.real("rope_theta", 150_000.0),
        rope_factor=factor,
        rope_original_context=context,
        rope_beta_fast=read.real("rope_ntk_beta", 32.0),
        rope_beta_slow=read.real("rope_ntk_alpha", 1.0),
        max_context=max(int(context * factor), 1),
    )


def config_to_hf(config: Config, *, packed: bool) -> dict[str, Any]:
    """The keys of openai/gpt-oss-20b's config.json, in its order.

    packed: experts in MXFP4; otherwise the weights are bfloat16 and the file says so. Raises
    ValueError where the file has no words for the config.
    """
    c = config
    if c.swiglu_limit is None:
        raise ValueError("config.json cannot say swiglu_limit None: its readers take that as 7.0.")
    out: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": None if not c.eos else c.eos[0] if len(c.eos) == 1 else list(c.eos),
        "experts_per_token": c.experts_per_token,
        "head_dim": c.head_width,
        "hidden_act": "silu",
        "hidden_size": c.embed,
        "initial_context_length": c.rope_original_context,
        "initializer_range": 0.02,
        "intermediate_size": c.ffn,
        "layer_types": [
            next(name for name, slides in _LAYER_TYPES.items() if slides == s) for s in c.sliding
        ],
        "max_position_embeddings": c.max_context,
        "model_type": "gpt_oss",
        "num_attention_heads": c.q_heads,
        "num_experts_per_tok": c.experts_per_token,
        "num_hidden_layers": c.layers,
        "num_key_value_heads": c.kv_heads,
        "num_local_experts": c.experts,
        "output_router_logits": False,
        "pad_token_id": c.pad,
        "rms_norm_eps": c.norm_eps,
        "rope_scaling": {
            "beta_fast": c.rope_beta_fast,
            "beta_slow": c.rope_beta_slow,
            "factor": c.rope_factor,
            "original_max_position_embeddings": c.rope_original_context,
            "rope_type": "yarn",
            "truncate": c.rope_truncate,
        },
        "rope_theta": int(c.rope_theta) if c.rope_theta.is_integer() else c.rope_theta,
        "router_aux_loss_coef": 0.9,
        "sliding_window": c.window,
        "swiglu_limit": c.swiglu_limit,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": c.vocab,
    }
    if c.swiglu_alpha != 1.702:
        out["swiglu_alpha"] = c.swiglu_alpha
    return with_storage(out, packed=packed)


def with_storage(values: dict[str, Any], *, packed: bool) -> dict[str, Any]:
    """A Hugging Face config that says how the experts are stored; other keys stay as they are."""
    out = {
        k: v for k, v in values.items() if k not in ("quantization_config", "dtype", "torch_dtype")
    }
    if packed:
        out["quantization_config"] = {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        }
    else:
        out["dtype" if "rope_parameters" in values else "torch_dtype"] = "bfloat16"
    return dict(sorted(out.items()))


def config_to_original(config: Config) -> dict[str, Any]:
    """OpenAI's keys. Raises ValueError naming what that file, or OpenAI's code, cannot say."""
    c = config
    cannot = [
        f"{name} {getattr(c, name)!r} (it is always {only!r})"
        for name, only in (
            ("norm_eps", 1e-5),
            ("swiglu_alpha", 1.702),
            ("rope_truncate", False),
            ("sliding", tuple(i % 2 == 0 for i in range(c.layers))),
        )
        if getattr(c, name) != only
    ]
    if c.swiglu_limit is None:
        cannot.append("swiglu_limit None (it is always a number)")
    if cannot:
        raise ValueError("OpenAI's original/ layout cannot say " + "; ".join(cannot))
    return {
        "num_hidden_layers": c.layers,
        "num_experts": c.experts,
        "experts_per_token": c.experts_per_token,
        "vocab_size": c.vocab,
        "hidden_size": c.embed,
        "intermediate_size": c.ffn,
        "swiglu_limit": c.swiglu_limit,
        "head_dim": c.head_width,
        "num_attention_heads": c.q_heads,
        "num_key_value_heads": c.kv_heads,
        "sliding_window": c.window,
        "initial_context_length": c.rope_original_context,
        "rope_theta": c.rope_theta,
        "rope_scaling_factor": c.rope_factor,
        "rope_ntk_alpha": c.rope_beta_slow,
        "rope_ntk_beta": c.rope_beta_fast,
    }
