"""One wrong tensor is caught, whichever it is and whatever is wrong with it."""

import functools

import checkpoints
import edited
import jax
import numpy as np
import pytest

import gptoss_jax as gj
from gptoss_jax.checkpoint import CheckpointError, load, open_checkpoint

LAYOUTS = ("mxfp4", "bf16", "original")
WEIGHTS = checkpoints.make_weights(edited.SMALL)


def deleted(tensors, name):
    del tensors[name]


def renamed(tensors, name):
    tensors[name + "_old"] = tensors.pop(name)


def reshaped(tensors, name):
    """The same bytes in another shape."""
    kind, value = tensors[name]
    tensors[name] = (kind, value.reshape(*value.shape, 1))


def longer(tensors, name):
    kind, value = tensors[name]
    tensors[name] = (kind, np.concatenate([value, value[:1]]))


def transposed(tensors, name):
    """Where the shape shows it: H = D is tested by values, in test_load."""
    kind, value = tensors[name]
    if value.ndim > 1:
        tensors[name] = (kind, value.swapaxes(0, 1))
    else:
        tensors[name] = (kind, value[None])


def retyped(tensors, name):
    kind, value = tensors[name]
    tensors[name] = ("F16", value) if kind == "BF16" else ("BF16", value.repeat(2).view(np.uint16)
                                                           .reshape(value.shape))  # fmt: skip


def doubled(tensors, name):
    """One that no parameter needs."""
    tensors[name + ".copy"] = tensors[name]


@pytest.mark.parametrize(
    "mutate", [deleted, renamed, reshaped, longer, transposed, retyped, doubled]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor(tmp_path, layout, mutate):
    for i, name in enumerate(edited.tensors(WEIGHTS, layout)):
        change = functools.partial(mutate, name=name)
        folder = edited.folder(tmp_path / str(i), layout, change, weights=WEIGHTS)
        with pytest.raises(CheckpointError) as caught:
            load(folder)
        assert name in str(caught.value), (name, str(caught.value))
        if mutate is renamed:
            assert name + "_old" in str(caught.value)


@pytest.mark.parametrize("layout, leaf", [("mxfp4", "down_proj_scales"), ("bf16", "down_proj")])
def test_no_experts_at_all(tmp_path, layout, leaf):
    """Nothing is left that shows the layout but config.json."""

    def change(tensors):
        for name in [n for n in tensors if ".experts." in n]:
            del tensors[name]

    folder = edited.folder(tmp_path / "x", layout, change, weights=WEIGHTS)
    with pytest.raises(CheckpointError, match=f"model.layers.0.mlp.experts.{leaf} is missing"):
        load(folder)


@pytest.mark.parametrize(
    "layout, key, value",
    [("mxfp4", "num_hidden_layers", 9_999), ("linear", "num_local_experts", 2**31 - 1)],
)
def test_a_config_of_more_than_the_files_hold_is_not_listed_name_by_name(
    tmp_path, layout, key, value
):
    def rename(tensors):
        for name in [n for n in tensors if n.endswith("down_proj_blocks")]:
            tensors[name.replace("down_proj_blocks", "down_projs.0.weight")] = tensors.pop(name)
        for name in [n for n in tensors if n.endswith(("_blocks", "_scales"))]:
            del tensors[name]

    def grow(values):
        del values["layer_types"]
        values[key] = value

    change = rename if layout == "linear" else None
    folder = edited.folder(tmp_path / "x", change=change, weights=WEIGHTS, config=grow)
    with pytest.raises(CheckpointError, match=f"{value} (layers|experts).*; the files hold"):
        load(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_truncated(tmp_path, layout):
    """A download that stopped inside any tensor: all from there on are named."""
    folder = edited.folder(tmp_path / "x", layout, weights=WEIGHTS)
    path = folder / "model.safetensors"
    whole, size = path.read_bytes(), 0
    tensors = edited.tensors(WEIGHTS, layout)
    start = len(whole) - sum(value.nbytes for _, value in tensors.values())
    for i, (name, (_, value)) in enumerate(tensors.items()):
        path.write_bytes(whole[: start + size + value.nbytes - 1])
        with pytest.raises(CheckpointError) as caught:
            load(folder)
        assert name in str(caught.value) and "truncated" in str(caught.value)
        assert len(caught.value.problems) == len(tensors) - i
        size += value.nbytes


def poisoned(kind, value, position):
    value = value.copy()
    wrong = {"U8": 255, "BF16": (0x7FC0, 0x7F80, 0xFF80)[position % 3]}[kind]
    value.flat[position % value.size] = wrong
    return kind, value


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_value_of_every_tensor_not_finite(tmp_path, layout):
    """Anywhere in it: NaN, infinities, and scale byte 255. Blocks have no bad codes."""
    names = [n for n in edited.tensors(WEIGHTS, layout) if not n.endswith("blocks")]
    for i, name in enumerate(names):

        def change(tensors, name=name, i=i):
            tensors[name] = poisoned(*tensors[name], position=i * 7919)

        report = gj.inspect(edited.folder(tmp_path / str(i), layout, change, weights=WEIGHTS))
        problems = [p for p in report.problems if name in p]
        assert len(problems) == len(report.problems) == 1
        assert "1 scale bytes are 255" in problems[0] or "not finite" in problems[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_bad_values_are_named_together(tmp_path, layout):
    names = [n for n in edited.tensors(WEIGHTS, layout) if not n.endswith("blocks")]

    def change(tensors):
        for name in names:
            tensors[name] = poisoned(*tensors[name], position=3)

    folder = edited.folder(tmp_path / "x", layout, change, weights=WEIGHTS)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize("experts", ["packed", "dense"])
@pytest.mark.parametrize("scale, code, refused", [(252, 7, False), (253, 5, False), (253, 6, True),
                                                  (254, 3, False), (254, 4, True)])  # fmt: skip
def test_codes_that_are_infinite(tmp_path, experts, scale, code, refused):
    """6 * 2^125 is finite; 4 * 2^126 and 2 * 2^127 are not."""

    def change(tensors):
        stem = "model.layers.0.mlp.experts.down_proj_"
        blocks, scales = (tensors[stem + half][1].copy() for half in ("blocks", "scales"))
        scales[1, 2, 3] = scale
        blocks[1, 2, 3] = 0
        blocks[1, 2, 3, 5] = code << 4 | 8 << 4
        tensors[stem + "blocks"], tensors[stem + "scales"] = ("U8", blocks), ("U8", scales)

    folder = edited.folder(tmp_path / "x", change=change, weights=WEIGHTS)
    if refused:
        with pytest.raises(CheckpointError, match="down_proj_scales: 1 values are infinite"):
            load(folder, experts=experts)
    else:
        load(folder, experts=experts)


MAY_BE_ZERO = ("bias", "sinks", "scales")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_all_zero(tmp_path, layout):
    """Reported by inspect and refused by load, biases apart; minus zero is zero too."""
    for i, (name, (kind, value)) in enumerate(edited.tensors(WEIGHTS, layout).items()):
        zero = np.full_like(value, {"U8": 0x88, "BF16": 0x8000}[kind])

        def change(tensors, name=name, zero=zero, kind=kind):
            tensors[name] = (kind, zero)

        folder = edited.folder(tmp_path / str(i), layout, change, weights=WEIGHTS)
        report = gj.inspect(folder)
        if name.endswith(MAY_BE_ZERO):
            assert report.ok, report.problems
        else:
            assert any(name in p and "all zero" in p for p in report.problems), name
            assert gj.inspect(folder, allow_zero=True).ok


@pytest.mark.parametrize("rows", [slice(0, 120), slice(120, 160), slice(160, 200)])
def test_queries_keys_or_values_all_zero_in_a_fused_tensor(tmp_path, rows):
    def change(tensors):
        kind, value = tensors["block.0.attn.qkv.weight"]
        value = value.copy()
        value[rows] = 0
        tensors["block.0.attn.qkv.weight"] = (kind, value)

    folder = edited.folder(tmp_path / "x", "original", change, weights=WEIGHTS)
    (problem,) = gj.inspect(folder).problems
    assert f"qkv.weight[{rows.start}:{rows.stop}]: all zero" in problem


@pytest.mark.parametrize("layout, leaf", [("mxfp4", "down_proj_blocks"), ("bf16", "gate_up_proj"),
                                          ("original", "mlp1_weight.blocks")])  # fmt: skip
def test_one_expert_all_zero(tmp_path, layout, leaf):
    """A mean over the stack would hide it."""

    def change(tensors):
        name = next(n for n in tensors if n.endswith(leaf))
        kind, value = tensors[name]
        value = value.copy()
        value[2] = 0
        tensors[name] = (kind, value)

    folder = edited.folder(tmp_path / "x", layout, change, weights=WEIGHTS)
    halves = gj.make_mesh(
        expert=2, devices=jax.devices("cpu")
    )  # where 2 is the first of the second
    for mesh in (None, halves):
        with pytest.raises(CheckpointError, match=f"{leaf}: all zero in expert 2.*allow_zero"):
            load(folder, mesh=mesh)
    load(folder, allow_zero=True)


@pytest.mark.parametrize("changes", [dict(embed=112), dict(ffn=144)], ids=str)
def test_widths_that_cannot_be_packed(tmp_path, changes):
    numbers = edited.SMALL.replace(**changes)
    folder = edited.folder(tmp_path / "x", weights=WEIGHTS, numbers=numbers)
    with pytest.raises(CheckpointError, match="MXFP4 packs blocks of 32; [hi].*size 1[14].*cannot"):
        load(folder)


def test_opening_alone_finds_nothing_wrong(tmp_path):
    """The unchanged folder, so that the tests above fail for what they changed."""
    for layout in LAYOUTS:
        folder = edited.folder(tmp_path / layout, layout, weights=WEIGHTS)
        assert open_checkpoint(folder).problems == [] and gj.inspect(folder).ok
