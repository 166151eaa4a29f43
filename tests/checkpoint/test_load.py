"""What is loaded is what the files hold: every value, in every layout, on any mesh."""

import json

import checkpoints
import edited
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from flax import nnx

import gptoss_jax as gj
from gptoss_jax.checkpoint import (
    CheckpointError,
    count_bytes,
    export,
    export_model,
    load,
    turn,
)

NUMBERS = {
    "tiny": checkpoints.TINY.replace(layers=2),
    "square": checkpoints.SQUARE.replace(layers=2),
    "square gate": checkpoints.SQUARE_GATE_UP.replace(layers=2),
}


@pytest.fixture(scope="module")
def weights():
    return {name: checkpoints.make_weights(numbers) for name, numbers in NUMBERS.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, weights):
    out = {}
    for name, numbers in NUMBERS.items():
        for layout in checkpoints.LAYOUTS:
            folder = tmp_path_factory.mktemp("checkpoint") / layout
            out[name, layout] = checkpoints.write(
                folder, numbers, weights[name], layout, tokenizer=True
            )
    return out


def cpu_mesh(**sizes):
    """Of the eight CPU devices, also where a GPU is the default."""
    return gj.make_mesh(**sizes, devices=jax.devices("cpu"))


def parameters(model) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(variable[...]) for path, variable in state}


def expected(numbers, weights) -> dict[str, np.ndarray]:
    """The parameter tree in float64 (and bytes), by loops over heads, from the stored arrays."""
    c, out = numbers, {}
    for n in range(c.layers):
        hf, at = f"model.layers.{n}.", f"blocks.{n}."
        rows = {}
        for part in ("weight", "bias"):
            q, k, v = (weights[hf + f"self_attn.{name}_proj.{part}"] for name in "qkv")
            H, G = c.head_width, c.q_per_kv
            rows[part] = np.stack([
                np.stack([q[(kv * G + g) * H :][:H] for g in range(G)]
                         + [k[kv * H :][:H], v[kv * H :][:H]])
                for kv in range(c.kv_heads)
            ])  # fmt: skip
        out[at + "attn.qkv_KMHD"], out[at + "attn.qkv_bias_KMH"] = rows["weight"], rows["bias"]
        kgh = (c.kv_heads, c.q_per_kv, c.head_width)
        out[at + "attn.out_DKGH"] = weights[hf + "self_attn.o_proj.weight"].reshape(c.embed, *kgh)
        out[at + "attn.out_bias_D"] = weights[hf + "self_attn.o_proj.bias"]
        out[at + "attn.sinks_KG"] = weights[hf + "self_attn.sinks"].reshape(kgh[:2])
        out[at + "attn_norm.scale_D"] = weights[hf + "input_layernorm.weight"]
        out[at + "moe_norm.scale_D"] = weights[hf + "post_attention_layernorm.weight"]
        out[at + "moe.router_ED"] = weights[hf + "mlp.router.weight"]
        out[at + "moe.router_bias_E"] = weights[hf + "mlp.router.bias"]
        for name in ("gate_up", "down"):
            stem = hf + f"mlp.experts.{name}_proj_"
            out[at + f"moe.experts.{name}_bias"] = weights[stem + "bias"]
            blocks, scales = weights[stem + "blocks"], weights[stem + "scales"]
            out[at + f"moe.experts.{name}_blocks"] = blocks
            out[at + f"moe.experts.{name}_scales"] = scales
            out[at + f"moe.experts.{name}"] = checkpoints.mxfp4_decode(blocks, scales)
    out["embed.weight_VD"] = weights["model.embed_tokens.weight"]
    out["norm.scale_D"] = weights["model.norm.weight"]
    out["unembed.weight_VD"] = weights["lm_head.weight"]
    return out


def assert_holds(model, expected, *, packed):
    found = parameters(model)
    halves = ("_blocks", "_scales")
    names = {n for n in expected if not n.endswith(halves if not packed else ("gate_up", "down"))}
    assert found.keys() == names
    for name, value in found.items():
        assert value.shape == expected[name].shape, name
        wide = value.astype(np.float64) if value.dtype != np.uint8 else value
        assert np.array_equal(wide, expected[name]), name


CASES = [
    ("tiny", "mxfp4", "float32", None),
    ("tiny", "mxfp4", "bfloat16", None),
    ("tiny", "mxfp4", "bfloat16", "dense"),
    ("tiny", "mxfp4", "float32", "dense"),
    ("tiny", "mxfp4-sharded", "bfloat16", "packed"),
    ("tiny", "bf16", "float32", None),
    ("tiny", "bf16", "bfloat16", "dense"),
    ("tiny", "original", "float32", "packed"),
    ("tiny", "original", "bfloat16", "dense"),
    # F = D (or P = D): an orientation taken from a shape is wrong in one of these.
    ("square", "mxfp4", "float32", "dense"),
    ("square", "bf16", "float32", None),
    ("square", "original", "float32", None),
    ("square gate", "bf16", "float32", None),
    ("square gate", "mxfp4", "float32", "dense"),
]


@pytest.mark.parametrize("numbers, layout, dtype, experts", CASES)
def test_every_value(folders, weights, numbers, layout, dtype, experts):
    """float32 and bfloat16 hold the same numbers, packed bytes are the file's."""
    model = load(folders[numbers, layout], dtype=dtype, experts=experts, backend="xla")
    packed = layout != "bf16" and experts != "dense"
    assert_holds(model, expected(NUMBERS[numbers], weights[numbers]), packed=packed)
    kept = ("norm.scale_D", "sinks_KG", "router_bias_E")
    for name, value in parameters(model).items():
        wanted = "uint8" if value.dtype == np.uint8 else "float32" if name.endswith(kept) else dtype
        assert value.dtype == jnp.dtype(wanted), name


def test_logits_are_the_oracles(folders, weights):
    """The layout whose orientation is its own; tests/parity compares all of them."""
    tokens = np.arange(24) * 7 % NUMBERS["square"].vocab
    model = load(folders["square", "bf16"], dtype="float32")
    truth = oracle.logits(NUMBERS["square"], checkpoints.decoded(weights["square"]), tokens)
    # A transposed square down_proj is off by 5; float32 rounding by 2e-5.
    assert np.abs(np.asarray(model(tokens[None]))[0] - truth).max() < 1e-4 * truth.std()


def test_scales_named_u8_or_e8m0_are_the_same(tmp_path, folders):
    """A scale is a power of two under either label, never a number to multiply by."""
    folder = edited.folder(tmp_path / "e8m0", scales="F8_E8M0", numbers=NUMBERS["tiny"])
    a = parameters(load(folder, backend="xla"))
    b = parameters(load(folders["tiny", "mxfp4"], backend="xla"))
    assert all(np.array_equal(a[name], b[name]) for name in b)


def test_router_bias_may_be_float32(tmp_path):
    def finer(tensors):
        tensors["model.layers.0.mlp.router.bias"] = (
            "F32",
            np.float32([1, 2, 3, 4]) + np.float32(1e-6),
        )

    model = load(edited.folder(tmp_path / "x", change=finer))
    bias = np.asarray(model.blocks[0].moe.router_bias_E[...])
    assert bias.tolist() == (np.float32([1, 2, 3, 4]) + np.float32(1e-6)).tolist()


def test_float32_checkpoint_rounds_only_when_asked(tmp_path):
    """What transformers saves from a float32 model."""
    fine = np.float32(1 + 2**-20)

    def wide(tensors):
        for name, (kind, value) in tensors.items():
            if kind == "BF16":
                tensors[name] = ("F32", (value.astype(np.uint32) << 16).view(np.float32) * fine)

    folder = edited.folder(tmp_path / "x", "bf16", wide)
    a, b = load(folder, dtype="float32"), load(folder, dtype="bfloat16")
    exact = np.asarray(a.embed.weight_VD[...])
    assert (exact != exact.astype(ml_dtypes.bfloat16)).mean() > 0.9
    assert np.array_equal(exact.astype(ml_dtypes.bfloat16), np.asarray(b.embed.weight_VD[...]))


def test_one_tensor_per_expert(tmp_path, weights):
    """Unsloth's linearised names, unquantised."""

    def linear(tensors):
        for name in [n for n in tensors if ".experts." in n]:
            kind, value = tensors.pop(name)
            stem, _, leaf = name.rpartition(".")
            part = "bias" if leaf.endswith("_bias") else "weight"
            for e, one in enumerate(value):
                one = one.T if part == "weight" else one
                tensors[f"{stem}.{leaf.removesuffix('_bias')}s.{e}.{part}"] = (kind, one)
        for name in [n for n in tensors if ".router." in n]:
            tensors[name.replace("router", "router.linear")] = tensors.pop(name)

    numbers = NUMBERS["tiny"]
    folder = edited.folder(tmp_path / "x", "bf16", linear, numbers=numbers, weights=weights["tiny"])
    assert_holds(load(folder), expected(numbers, weights["tiny"]), packed=False)


@pytest.mark.parametrize(
    "sizes",
    [dict(expert=4), dict(data=2, expert=2), dict(tensor=2), dict(expert=2, tensor=2)],
    ids=str,
)
@pytest.mark.parametrize("layout, experts", [("mxfp4", None), ("mxfp4", "dense"), ("bf16", None)])
def test_meshes_hold_the_same_values(tmp_path_factory, sizes, layout, experts):
    numbers = checkpoints.TINY.replace(layers=1, ffn=128)
    weights = checkpoints.make_weights(numbers)
    folder = checkpoints.write(tmp_path_factory.mktemp("m"), numbers, weights, layout)
    model = load(folder, mesh=cpu_mesh(**sizes), experts=experts, dtype="float32")
    packed = layout != "bf16" and experts is None
    assert_holds(model, expected(numbers, weights), packed=packed)
    for name, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if "experts" in map(str, name):
            shards = variable[...].sharding.num_devices // sizes.get("data", 1)
            local = variable[...].addressable_shards[0].data
            assert local.shape[0] == numbers.experts // sizes.get("expert", 1)
            assert shards == sizes.get("expert", 1) * sizes.get("tensor", 1)


def test_a_mesh_reads_each_slice_once(folders):
    """Nothing is read for replicas again."""
    folder = folders["tiny", "mxfp4"]
    stored = sum(t["bytes"] for t in gj.inspect(folder).tensors)
    for mesh in (None, cpu_mesh(data=2, expert=4), cpu_mesh(expert=2)):
        with count_bytes() as counter:
            load(folder, mesh=mesh)
        assert counter.bytes_read == stored, mesh


def test_stop_tokens_are_a_union(tmp_path):
    """Names in the tokenizer, config.json, generation_config.json."""
    folder = edited.folder(
        tmp_path / "x", tokenizer=True, config=lambda c: c.update(eos_token_id=[3, 258])
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3]}))
    assert set(load(folder).stop_tokens) == {257, 258, 264, 3, 5}
    (folder / "tokenizer.json").unlink()
    model = load(folder)
    assert set(model.stop_tokens) == {258, 3, 5} and model.text_vocab is None
    (folder / "generation_config.json").unlink()
    assert set(load(folder).stop_tokens) == {258, 3}


def test_rows_beyond_the_tokenizer_are_known(folders):
    model = load(folders["tiny", "mxfp4"])
    assert model.text_vocab == 265 < model.config.vocab


def test_original_folder_uses_the_tokenizer_above_it(tmp_path):
    checkpoints.make(tmp_path, edited.SMALL, "mxfp4", tokenizer=True)
    checkpoints.make(tmp_path / "original", edited.SMALL, "original")
    model = load(tmp_path / "original")
    assert model.text_vocab == 265 and set(model.stop_tokens) == {257, 258, 264}


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("generation_config.json", '{"eos_token_id": ["x"]}', "eos_token_id"),
        ("generation_config.json", "{", "generation_config.json is no valid JSON"),
        ("generation_config.json", "[258]", "generation_config.json must hold a JSON object"),
        ("generation_config.json", '{"eos_token_id": 290}', "outside vocab_size 290"),
        ("tokenizer.json", "{}", "tokenizer.json"),
    ],
)
def test_broken_side_files_are_refused(tmp_path, name, text, message):
    folder = edited.folder(tmp_path / "x", tokenizer=True)
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load(folder)
    assert any(message in p or name in p for p in gj.inspect(folder).problems)


def test_tokenizer_larger_than_the_model_is_refused(tmp_path):
    folder = edited.folder(tmp_path / "x", numbers=edited.SMALL.replace(vocab=260), tokenizer=True)
    with pytest.raises(
        CheckpointError, match="tokenizer.json has ids up to 264; vocab_size is 260"
    ):
        load(folder)


def test_packed_from_dense_is_refused(folders):
    with pytest.raises(CheckpointError, match="export .* --format mxfp4"):
        load(folders["tiny", "bf16"], experts="packed")


@pytest.mark.parametrize("dtype", ["float16", jnp.float16, "int8", "no such", None])
def test_dtypes_that_are_refused(folders, dtype):
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        load(folders["tiny", "bf16"], dtype=dtype)


def test_experts_argument_is_checked(folders):
    with pytest.raises(ValueError, match="experts must be"):
        load(folders["tiny", "bf16"], experts="sparse")


def test_loaded_model_does_not_follow_the_file(tmp_path):
    folder = edited.folder(tmp_path / "x")
    model = load(folder)
    before = parameters(model)
    path = folder / "model.safetensors"
    with path.open("r+b") as f:
        f.seek(path.stat().st_size // 2)
        f.write(b"\x55" * (path.stat().st_size // 2))
    after = parameters(model)
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("sizes", [None, dict(expert=2)], ids=str)
def test_not_even_where_the_file_is_aligned(tmp_path, sizes):
    """A CPU's arrays may be the very memory they are made from, where that begins at a multiple of
    64 bytes: here the embeddings do."""
    path = edited.folder(tmp_path / "x") / "model.safetensors"
    tensors = edited.tensors(checkpoints.make_weights(edited.SMALL), "mxfp4")
    name = "model.embed_tokens.weight"
    checkpoints.save(path, {name: tensors.pop(name)} | tensors)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    padded = whole[8 : 8 + length] + b" " * (-(8 + length) % 64)
    start = 8 + len(padded)
    path.write_bytes(len(padded).to_bytes(8, "little") + padded + whole[8 + length :])
    model = load(path.parent, mesh=sizes and cpu_mesh(**sizes))
    before = np.array(model.embed.weight_VD[...], copy=True)
    with path.open("r+b") as f:
        f.seek(start)
        f.write(b"\x55" * before.nbytes)
    assert np.array_equal(np.asarray(model.embed.weight_VD[...]), before)


def test_layers_keep_their_numbers(tmp_path):
    """Twelve layers, whose names do not sort as numbers, each with its own tag."""
    numbers = edited.SMALL.replace(layers=12, embed=32, ffn=32, experts=2)
    weights = checkpoints.make_weights(numbers)
    for n in range(12):
        weights[f"model.layers.{n}.input_layernorm.weight"][:] = n + 1
    for layout in ("mxfp4-sharded", "original"):
        folder = checkpoints.write(tmp_path / layout, numbers, weights, layout)
        model = load(folder)
        tags = [float(block.attn_norm.scale_D[...][0]) for block in model.blocks]
        assert tags == list(range(1, 13))


def test_nothing_is_left_abstract_or_random(folders):
    model = load(folders["tiny", "mxfp4"])
    for _, variable in nnx.to_flat_state(nnx.state(model)):
        assert isinstance(variable[...], jax.Array)


# --- layouts of the kernels ---------------------------------------------------------------


@pytest.mark.parametrize("sizes", [None, dict(expert=2, tensor=2)], ids=str)
def test_experts_are_turned_for_the_kernels_and_back(tmp_path, monkeypatch, sizes):
    """What load does on a GPU, where None and "triton" choose another layout."""
    cuts = []  # whether a tensor axis cuts the experts, as each layer was turned

    def layout_for(backend, experts=None, cut=False):
        cuts.extend([] if experts is None else [cut])
        return "triton"

    monkeypatch.setattr(turn, "layout_for", layout_for)
    numbers = checkpoints.TINY.replace(layers=2, ffn=128)
    weights = checkpoints.make_weights(numbers)
    folder = checkpoints.write(tmp_path / "x", numbers, weights, "mxfp4")
    mesh = None if sizes is None else cpu_mesh(**sizes)
    model = load(folder, mesh=mesh, backend="triton")
    assert [block.moe.experts.layout for block in model.blocks] == ["triton", "triton"]
    assert cuts == [mesh is not None] * 2
    leaf = model.blocks[1].moe.experts.gate_up_blocks[...]
    assert leaf.addressable_shards[0].data.shape[0] == numbers.experts // (2 if mesh else 1)
    for n, block in enumerate(model.blocks):
        stored = block.moe.experts.weights().to_checkpoint()
        for name in ("gate_up", "down"):
            for half in ("blocks", "scales"):
                truth = weights[f"model.layers.{n}.mlp.experts.{name}_proj_{half}"]
                assert np.array_equal(np.asarray(getattr(stored, f"{name}_{half}")), truth)
    again = export_model(model, tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == export(
        folder, tmp_path / "straight"
    ).joinpath("model.safetensors").read_bytes()


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_a_backend_that_cannot_run_is_refused_before_reading(tmp_path, backend):
    if jax.default_backend() == "gpu":
        pytest.skip("it may run here")
    with pytest.raises(NotImplementedError, match="NVIDIA|Hopper|'mosaic' needs jax 0.11"):
        load(tmp_path / "nothing", backend=backend)


@pytest.mark.parametrize("keywords", [dict(dtype="float32"), dict(experts="dense")], ids=str)
def test_triton_takes_packed_bfloat16(tmp_path, monkeypatch, keywords):
    monkeypatch.setattr(turn, "layout_for", lambda backend, experts=None, cut=False: "triton")
    with pytest.raises(NotImplementedError, match="backend 'triton'"):
        load(tmp_path / "nothing", backend="triton", **keywords)


def test_triton_from_a_dense_checkpoint_says_how(folders, monkeypatch):
    monkeypatch.setattr(turn, "layout_for", lambda backend, experts=None, cut=False: "triton")
    with pytest.raises(CheckpointError, match="read by backend 'triton'; .*--format mxfp4"):
        load(folders["tiny", "bf16"], backend="triton")


@pytest.mark.parametrize("keywords", [dict(backend="cuda"), dict(dispatch="ring")], ids=str)
def test_unknown_choices(tmp_path, keywords):
    with pytest.raises(ValueError, match=f"{next(iter(keywords))} must be one of"):
        load(tmp_path / "nothing", **keywords)


@pytest.mark.gpu
def test_on_a_gpu_none_turns_the_experts(tmp_path, folders):
    model = load(folders["tiny", "mxfp4"])
    assert model.blocks[0].moe.experts.layout.startswith("triton")
    again = load(export_model(model, tmp_path / "again"), backend="xla")
    straight = parameters(load(folders["tiny", "mxfp4"], backend="xla"))
    assert all(np.array_equal(v, straight[name]) for name, v in parameters(again).items())
