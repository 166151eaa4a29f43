"""Tiny random gpt-oss checkpoints, written byte by byte from the published formats.

Imports nothing of ours.

    weights = make_weights(TINY, seed=0)               # what is stored, as arrays
    write(folder, TINY, weights, "mxfp4-sharded")      # config.json, shards, index
    oracle.logits(TINY, decoded(weights), tokens)      # the same numbers in float64

`make_weights` draws experts on the MXFP4 grid and everything else on the bfloat16 grid, so the
three layouts hold exactly the same numbers.
"""

import dataclasses
import json
import math
import struct
from pathlib import Path

import numpy as np

LAYOUTS = ("mxfp4", "mxfp4-sharded", "bf16", "original")
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # by the low three bits of a code; bit 3 is the sign

# Byte-level vocabulary: 256 bytes, then these. Ids from 256 + len(SPECIALS) on belong to no token.
SPECIALS = (
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>",
    "<|start|>", "<|end|>", "<|message|>", "<|call|>",
)  # fmt: skip
ENDOFTEXT, RETURN, CALL = 257, 258, 264


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a config.json fixes, under the names of our Config (whose attributes these shadow)."""

    layers: int
    embed: int
    kv_heads: int
    q_per_kv: int
    head_width: int
    experts: int
    experts_per_token: int
    ffn: int
    vocab: int
    window: int
    sliding: tuple[bool, ...] | None = None
    norm_eps: float = 1e-5
    swiglu_limit: float | None = 7.0
    swiglu_alpha: float = 1.702
    rope_theta: float = 150000.0
    rope_factor: float = 32.0
    rope_original_context: int = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = False
    max_context: int = 131072
    eos: tuple[int, ...] = (RETURN, ENDOFTEXT, CALL)
    pad: int | None = ENDOFTEXT

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.q_per_kv

    def replace(self, **changes) -> "Numbers":
        return dataclasses.replace(self, **changes)


# No two axes of any array have the same length: q is 120 wide, k and v 40, the fused qkv 200 (5
# times 20 a kv head); D = 96 and F = 160 are 3 and 5 MXFP4 blocks.
TINY = Numbers(
    layers=4, embed=96, kv_heads=2, q_per_kv=3, head_width=20,
    experts=12, experts_per_token=4, ffn=160, vocab=288, window=8,
)  # fmt: skip
# F = D, as in the real models: down_proj is square and its orientation cannot be seen.
SQUARE = TINY.replace(ffn=96)
# P = 2F = D: gate_up_proj is square instead.
SQUARE_GATE_UP = TINY.replace(embed=128, ffn=64)


# --- values -----------------------------------------------------------------------------


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16 (nearest, ties to even) and return its 16 bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def on_bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 numbers, held in float32."""
    return (bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)


def mxfp4_encode(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[..., 32g] -> blocks [..., g, 16], scales [..., g] = floor(log2(amax)) - 2 + 127."""
    x = np.asarray(values, np.float64).reshape(*values.shape[:-1], -1, 32)
    largest = np.abs(x).max(axis=-1)
    exponent = np.where(largest > 0, np.floor(np.log2(np.where(largest > 0, largest, 1))) - 2, 0)
    scaled = np.abs(x) / np.exp2(exponent)[..., None]
    codes = np.abs(scaled[..., None] - FP4).argmin(axis=-1).astype(np.uint8)
    codes |= (np.signbit(x) << 3).astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).astype(np.uint8)


def mxfp4_decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """blocks [..., g, 16] and scales [..., g] -> float64 [..., 32g]."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    values = np.where(codes & 8, -1.0, 1.0) * FP4[codes & 7]
    values = values * np.exp2(scales.astype(np.float64) - 127)[..., None]
    return values.reshape(*values.shape[:-2], -1)


def make_weights(numbers: Numbers, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under the names of the Hugging Face MXFP4 layout.

    uint8 for `*_blocks` and `*_scales`, float32 on the bfloat16 grid for the rest. Every bias is
    nonzero, sinks are N(1, 1), gate and up pre-activations pass the clamp at 7 and every expert is
    chosen (tests of the oracle say so), which is what makes the usual faults visible.
    """
    c, draw = numbers, np.random.default_rng(seed).standard_normal
    D, K, H, E, F = c.embed, c.kv_heads, c.head_width, c.experts, c.ffn
    inner = c.q_heads * H
    out: dict[str, np.ndarray] = {}

    def normal(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None:
        out[name] = on_bfloat16((mean + std * draw(shape)).astype(np.float32))

    def packed(name: str, shape: tuple[int, ...], std: float) -> None:
        out[name + "_blocks"], out[name + "_scales"] = mxfp4_encode(std * draw(shape))

    for n in range(c.layers):
        at = f"model.layers.{n}."
        normal(at + "input_layernorm.weight", (D,), 0.2, 1.0)
        normal(at + "self_attn.o_proj.bias", (D,), 0.3)
        normal(at + "self_attn.o_proj.weight", (D, inner), 1 / math.sqrt(inner))
        for name, heads in (("q", c.q_heads), ("k", K), ("v", K)):
            normal(at + f"self_attn.{name}_proj.bias", (heads * H,), 0.3)
            normal(at + f"self_attn.{name}_proj.weight", (heads * H, D), 1 / math.sqrt(D))
        normal(at + "self_attn.sinks", (c.q_heads,), 1.0, 1.0)
        normal(at + "mlp.router.bias", (E,), 0.7)
        normal(at + "mlp.router.weight", (E, D), 1.5 / math.sqrt(D))
        normal(at + "mlp.experts.gate_up_proj_bias", (E, 2 * F), 1.0)
        packed(at + "mlp.experts.gate_up_proj", (E, 2 * F, D), 3 / math.sqrt(D))
        normal(at + "mlp.experts.down_proj_bias", (E, D), 0.5)
        packed(at + "mlp.experts.down_proj", (E, D, F), 1 / math.sqrt(F))
        normal(at + "post_attention_layernorm.weight", (D,), 0.2, 1.0)
    normal("model.embed_tokens.weight", (c.vocab, D), 1.0)
    normal("model.norm.weight", (D,), 0.2, 1.0)
    normal("lm_head.weight", (c.vocab, D), 1 / math.sqrt(D))
    return out


def decoded(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same numbers in float64 under the oracle's names (expert rows are outputs)."""
    out = {}
    for name, value in weights.items():
        if name.endswith("_proj_blocks"):
            scales = weights[name.removesuffix("blocks") + "scales"]
            out[name.replace("_proj_blocks", "_rows")] = mxfp4_decode(value, scales)
        elif not name.endswith("_scales"):
            out[name] = value.astype(np.float64)
    return out


# --- names and orientations of the three layouts ----------------------------------------


def as_bf16(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts unpacked and transposed: gate_up_proj [E, D, 2F] and down_proj [E, F, D]."""
    out = {}
    for name, value in weights.items():
        if name.endswith("_blocks"):
            rows = mxfp4_decode(value, weights[name.removesuffix("blocks") + "scales"])
            out[name.removesuffix("_blocks")] = rows.swapaxes(1, 2).astype(np.float32)
        elif not name.endswith("_scales"):
            out[name] = value
    return out


def as_original(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """OpenAI's names, q, k and v rows in one tensor."""
    layers = 1 + max(int(n.split(".")[2]) for n in weights if n.startswith("model.layers."))
    out = {"embedding.weight": weights["model.embed_tokens.weight"]}
    for n in range(layers):
        hf, at = f"model.layers.{n}.", f"block.{n}."
        out[at + "attn.norm.scale"] = weights[hf + "input_layernorm.weight"]
        for part in ("weight", "bias"):
            qkv = [weights[hf + f"self_attn.{name}_proj.{part}"] for name in "qkv"]
            out[at + f"attn.qkv.{part}"] = np.concatenate(qkv)
            out[at + f"attn.out.{part}"] = weights[hf + f"self_attn.o_proj.{part}"]
            out[at + f"mlp.gate.{part}"] = weights[hf + f"mlp.router.{part}"]
        out[at + "attn.sinks"] = weights[hf + "self_attn.sinks"]
        out[at + "mlp.norm.scale"] = weights[hf + "post_attention_layernorm.weight"]
        for ours, theirs in (("mlp1", "gate_up_proj"), ("mlp2", "down_proj")):
            for part in ("blocks", "scales"):
                out[at + f"mlp.{ours}_weight.{part}"] = weights[hf + f"mlp.experts.{theirs}_{part}"]
            out[at + f"mlp.{ours}_bias"] = weights[hf + f"mlp.experts.{theirs}_bias"]
    out["norm.scale"] = weights["model.norm.weight"]
    out["unembedding.weight"] = weights["lm_head.weight"]
    return out


# --- config.json ------------------------------------------------------------------------


def config_hf(numbers: Numbers, *, family: int = 4, quantized: bool = True) -> dict:
    """config.json as published (family 4) or as transformers 5 writes it again (family 5)."""
    c = numbers
    sliding = c.sliding or tuple(n % 2 == 0 for n in range(c.layers))
    rope = {
        "beta_fast": c.rope_beta_fast, "beta_slow": c.rope_beta_slow, "factor": c.rope_factor,
        "original_max_position_embeddings": c.rope_original_context, "rope_type": "yarn",
        "truncate": c.rope_truncate,
    }  # fmt: skip
    out = {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": c.eos[0] if c.eos else None, "experts_per_token": c.experts_per_token,
        "head_dim": c.head_width, "hidden_act": "silu", "hidden_size": c.embed,
        "initial_context_length": c.rope_original_context, "initializer_range": 0.02,
        "intermediate_size": c.ffn,
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        "max_position_embeddings": c.max_context, "model_type": "gpt_oss",
        "num_attention_heads": c.q_heads, "num_experts_per_tok": c.experts_per_token,
        "num_hidden_layers": c.layers, "num_key_value_heads": c.kv_heads,
        "num_local_experts": c.experts, "output_router_logits": False, "pad_token_id": c.pad,
        "rms_norm_eps": c.norm_eps, "router_aux_loss_coef": 0.9, "sliding_window": c.window,
        "swiglu_limit": c.swiglu_limit, "tie_word_embeddings": False, "use_cache": True,
        "vocab_size": c.vocab,
    }  # fmt: skip
    if family == 4:
        out |= {
            "rope_scaling": rope, "rope_theta": c.rope_theta, "transformers_version": "4.55.0.dev0"
        }  # fmt: skip
    else:
        out |= {
            "rope_parameters": rope | {"rope_theta": c.rope_theta}, "dtype": "bfloat16",
            "swiglu_alpha": c.swiglu_alpha, "transformers_version": "5.24.0",
        }  # fmt: skip
    if quantized:
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
        out["quantization_config"] = {
            "modules_to_not_convert": [*kept, "lm_head"],
            "quant_method": "mxfp4",
        }
    return out


def config_original(numbers: Numbers) -> dict:
    c = numbers
    return {
        "num_hidden_layers": c.layers, "num_experts": c.experts,
        "experts_per_token": c.experts_per_token, "vocab_size": c.vocab, "hidden_size": c.embed,
        "intermediate_size": c.ffn, "swiglu_limit": c.swiglu_limit, "head_dim": c.head_width,
        "num_attention_heads": c.q_heads, "num_key_value_heads": c.kv_heads,
        "sliding_window": c.window, "initial_context_length": c.rope_original_context,
        "rope_theta": c.rope_theta, "rope_scaling_factor": c.rope_factor,
        "rope_ntk_alpha": c.rope_beta_slow, "rope_ntk_beta": c.rope_beta_fast,
    }  # fmt: skip


# --- files ------------------------------------------------------------------------------


def save(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """One safetensors file: 8 bytes of header length, JSON padded to 8 bytes, the data."""
    header: dict = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (kind, value) in tensors.items():
        end = position + value.nbytes
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, value in tensors.values():
            file.write(np.ascontiguousarray(value).tobytes())


def stored(
    weights: dict[str, np.ndarray], *, float32: tuple[str, ...] = (), scales: str = "U8"
) -> dict[str, tuple[str, np.ndarray]]:
    """Every tensor with its dtype on disk: bytes as they are, the rest BF16 or (by ending) F32."""
    out = {}
    for name, value in weights.items():
        if value.dtype == np.uint8:
            out[name] = (scales if name.endswith("scales") else "U8", value)
        elif float32 and name.endswith(float32):
            out[name] = ("F32", value.astype(np.float32))
        else:
            out[name] = ("BF16", bfloat16_bits(value))
    return out


def write(
    folder: str | Path,
    numbers: Numbers,
    weights: dict[str, np.ndarray],
    layout: str = "mxfp4",
    *,
    family: int = 4,
    router_bias_float32: bool = False,
    scales: str = "U8",
    shards: int = 3,
    tokenizer: bool = False,
) -> Path:
    """Write a checkpoint folder.

    layout   "mxfp4" one model.safetensors without an index; "mxfp4-sharded" `shards` files with an
             index, cut inside layers and (TINY's second cut) inside one expert stack, as 20b's are;
             "bf16" one file; "original" OpenAI's names.
    family   4 or 5: which transformers wrote config.json.
    scales   "U8" or "F8_E8M0": how the same scale bytes are labelled.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is one of {LAYOUTS}, got {layout!r}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    named = {"bf16": as_bf16, "original": as_original}.get(layout, dict)(weights)
    float32 = ("mlp.router.bias", "mlp.gate.bias") if router_bias_float32 else ()
    tensors = stored(named, float32=float32, scales=scales)
    if layout == "original":
        config = config_original(numbers)
        kinds = {"U8": "FP4", "F8_E8M0": "UE8"}
        dtypes = {
            n: "UE8" if n.endswith("scales") else kinds.get(k, k) for n, (k, _) in tensors.items()
        }
        (folder / "dtypes.json").write_text(json.dumps(dtypes))
    else:
        config = config_hf(numbers, family=family, quantized=layout != "bf16")
        generation = {
            "bos_token_id": 256, "do_sample": True, "eos_token_id": list(numbers.eos),
            "pad_token_id": numbers.pad, "transformers_version": "4.55.0.dev0",
        }  # fmt: skip
        (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if layout == "mxfp4-sharded":
        write_shards(folder, tensors, shards)
    else:
        save(folder / "model.safetensors", tensors)
    if tokenizer:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    return folder


def write_shards(folder: Path, tensors: dict, shards: int) -> None:
    names, last = list(tensors), shards - 1
    assert shards > 1, "one shard has no index"
    # Layers in string order, as published: 0, 1, 10, 11, ..., 2.
    names.sort(key=lambda n: n.split(".")[2] if n.startswith("model.layers.") else "~")
    weight_map = {}
    for shard in range(shards):
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        file = f"model-{shard:05}-of-{last:05}.safetensors"
        save(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    size = sum(value.nbytes for _, value in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def tokenizer_json() -> dict:
    """A byte-level tokenizer.json of 256 bytes and SPECIALS: token i < 256 is byte i, no merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letter = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    added = [
        {
            "id": 256 + i, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for i, name in enumerate(SPECIALS)
    ]  # fmt: skip
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": {letter[b]: b for b in range(256)}, "merges": [],
        },
    }  # fmt: skip


def make(
    folder: str | Path, numbers: Numbers = TINY, layout: str = "mxfp4", *, seed: int = 0, **options
) -> dict[str, np.ndarray]:
    """make_weights and write in one call; returns the weights."""
    weights = make_weights(numbers, seed)
    write(folder, numbers, weights, layout, **options)
    return weights
