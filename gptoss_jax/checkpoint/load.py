"""Fills a model from a checkpoint, one tensor at a time. All of it, or CheckpointError."""

import contextlib
import functools
from collections.abc import Iterator
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from ..errors import CheckpointError
from ..kernels import mxfp4
from ..model import GptOss
from ..sharding import Dispatch, parameter_sharding, place, together
from .layouts import Checkpoint, open_checkpoint
from .parts import Part, parts_of
from .stops import tokens
from .turn import check_backend, turn_experts
from .values import Watch

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def load(
    path,
    *,
    mesh: Mesh | None = None,
    dtype=jnp.bfloat16,
    experts: str | None = None,
    backend: str | None = None,
    dispatch: str = "auto",
    allow_zero: bool = False,
) -> GptOss:
    """A complete model, or CheckpointError (a ValueError) with everything that is wrong.

    path: "tiny" (the embedded model), a folder in one of the published layouts, or a name like
        openai/gpt-oss-20b in Hugging Face's local cache.
    mesh: where the parameters go; each process reads its own slices only.
    dtype: bfloat16 or float32, of dense weights and activations; the values are the same wherever
        the checkpoint holds bfloat16 or MXFP4.
    experts: None as stored; "packed" keeps MXFP4 (refused for a dense checkpoint); "dense" decodes.
    backend: None chooses | "xla" | "triton" | "mosaic"; one that cannot run here raises
        NotImplementedError. Packed experts are turned into the layout it reads, bit for bit.
    dispatch: "auto" | "all_reduce" | "all_to_all", used where the mesh's expert axis is above 1.
    allow_zero: accept weights that are zero throughout, which otherwise mean a bad conversion.

    Host memory: the parameters on a CPU, and about the largest tensor.
    """
    dtype = _checked(dtype)
    if experts not in (None, "packed", "dense"):
        raise ValueError(f"experts must be None, 'packed' or 'dense'; got {experts!r}.")
    if dispatch not in get_args(Dispatch):
        raise ValueError(f"dispatch must be one of {get_args(Dispatch)}; got {dispatch!r}.")
    runs = check_backend(backend, dtype, experts, mesh)
    with together(mesh):
        found = _opened(path, experts, backend)
        stop_tokens, text_vocab = tokens(found)
    packed = found.packed and experts != "dense"
    model = nnx.eval_shape(
        lambda: GptOss(
            found.config,
            rngs=nnx.Rngs(0),
            dtype=dtype,
            experts="packed" if packed else "dense",
            mesh=mesh,
            backend=backend,
            dispatch=dispatch,
        )
    )
    with together(mesh):
        _fill(model, found, dtype, packed=packed, mesh=mesh, watch=Watch(allow_zero=allow_zero))
    if packed:
        turn_experts(model, runs)
    model.stop_tokens, model.text_vocab = stop_tokens, text_vocab
    return model


def _opened(path, experts: str | None, backend: str | None) -> Checkpoint:
    found = open_checkpoint(path).require()
    if not found.packed and (experts == "packed" or backend in ("triton", "mosaic")):
        wanted = "kept packed" if experts == "packed" else f"read by backend {backend!r}"
        raise CheckpointError(
            found.folder,
            [
                f"its experts are dense, so they cannot be {wanted}; "
                f"`gptoss-jax export {path} FOLDER --format mxfp4` quantises them."
            ],
        )
    return found


def _checked(dtype) -> np.dtype:
    try:
        named = jnp.dtype(dtype)
    except TypeError:
        named = None
    if named not in _DTYPES:
        why = " (float16 overflows in gpt-oss's activations)" if named == jnp.float16 else ""
        raise ValueError(f"dtype must be bfloat16 or float32; got {dtype!r}{why}.")
    return named


def _fill(
    model: GptOss, found: Checkpoint, dtype, *, packed: bool, mesh: Mesh | None, watch: Watch
) -> None:
    """Replaces every abstract parameter of the model by the checkpoint's."""
    empty = {_dotted(path): v for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    # A CPU's arrays may be the very memory they are made from (where it begins at a multiple of 64
    # bytes, even with may_alias=False), and a file can be written over: there, copies are read.
    own = _platform(mesh) == "cpu"
    parts = parts_of(found, watch, dtype, own=own)
    filled: dict[str, jax.Array] = {}
    with _bar(sum(p.nbytes for p in parts.values())) as bar:
        for name, part in parts.items():
            if name.endswith("_blocks") and not packed:
                continue  # decoded together with its scales
            if name.endswith("_scales") and not packed:
                sources, name = [part.blocks, part], name.removesuffix("_scales")
                value = _decoded(name, *sources, dtype, found, mesh)
            else:
                sources = [part]
                value = _placed(name, part, found, mesh, "checkpoint" if packed else "dense")
            filled[name] = jax.block_until_ready(value)
            for source in sources:
                source.forget()
                bar.update(source.nbytes)
    if problems := watch.problems():
        raise CheckpointError(found.folder, problems)
    wrong = [
        f"{name}: {_drawn(filled.get(name))} for {_drawn(empty.get(name))}"
        for name in empty.keys() | filled.keys()
        if _drawn(filled.get(name)) != _drawn(empty.get(name))
    ]
    assert not wrong, wrong  # the tables and the model are both ours
    state = [(_split(name), empty[name].replace(value)) for name, value in filled.items()]
    nnx.update(model, nnx.from_flat_state(state))


def _placed(name: str, part: Part, found: Checkpoint, mesh: Mesh | None, layout: str) -> jax.Array:
    if mesh is not None:
        return place(part, parameter_sharding(name, found.config, mesh, layout))
    return jax.device_put(part[...])


def _decoded(stem: str, blocks: Part, scales: Part, dtype, found: Checkpoint, mesh: Mesh | None):
    """MXFP4 to dense on the device, exactly."""
    if mesh is None:
        return _decode_each(jax.device_put(blocks[...]), jax.device_put(scales[...]), dtype)
    whole = NamedSharding(mesh, PartitionSpec("expert"))
    decode = _decoder(parameter_sharding(stem, found.config, mesh, "dense"))
    return decode(place(blocks, whole), place(scales, whole), dtype)


@functools.cache
def _decoder(final: NamedSharding):
    return jax.jit(mxfp4.decode, static_argnums=2, out_shardings=final)


@functools.partial(jax.jit, static_argnums=2)
def _decode_each(blocks, scales, dtype):
    """Expert by expert: the int32 temporaries of a whole 20b stack would be 2 GB."""
    return jax.lax.map(lambda part: mxfp4.decode(*part, dtype), (blocks, scales))


def _platform(mesh: Mesh | None) -> str:
    """Of the devices that the parameters go to."""
    if mesh is not None:
        return mesh.devices.flat[0].platform
    return next(iter(jax.device_put(np.int32(0)).devices())).platform


def _dotted(path: tuple) -> str:
    return ".".join(map(str, path))


def _split(name: str) -> tuple:
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))


def _drawn(array) -> str:
    return "nothing" if array is None else f"{array.dtype}{list(array.shape)}"


@contextlib.contextmanager
def _bar(total: int) -> Iterator[tqdm]:
    """A progress bar on a terminal; nothing elsewhere."""
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=None) as bar:
        yield bar
