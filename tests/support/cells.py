"""Meshes of all devices there are, and what each says of the same prompts: one cell of a matrix.

One process and one process a device run these same lines, on GPUs and on CPU devices.
"""

import functools
import tempfile
from pathlib import Path

import checkpoints
import jax
import numpy as np

import gptoss_jax as gj
from gptoss_jax import sharding

# 16 experts and 8 key/value heads go round 2, 4 and 8 devices; F is 4 blocks of 32; widths that the
# kernels of a GPU take.
NUMBERS = checkpoints.TINY.replace(
    layers=2, embed=192, kv_heads=8, q_per_kv=3, head_width=32, experts=16, ffn=128
)
PROMPTS = [[3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62], [64, 33, 83, 27]]
TOKENS = np.random.default_rng(0).integers(0, NUMBERS.vocab, (2, 40))
ALL_REDUCE, ALL_TO_ALL = "all_reduce", "all_to_all"


@functools.cache
def folder() -> Path:
    """Written once a process; the operating system clears it away."""
    path = Path(tempfile.mkdtemp(prefix="cells-"))
    checkpoints.write(path, NUMBERS, checkpoints.make_weights(NUMBERS, seed=3), "mxfp4")
    return path


def meshes(devices: int) -> list[dict[str, int]]:
    """Every mesh of exactly so many devices that the model fits, each axis alone first."""
    every = [
        dict(data=data, expert=expert, tensor=devices // data // expert)
        for data in range(1, devices + 1)
        for expert in range(1, devices // data + 1)
        if devices % (data * expert) == 0
    ]
    fitting = [
        axes
        for axes in every
        if not NUMBERS.experts % axes["expert"] and not NUMBERS.kv_heads % axes["tensor"]
    ]
    return sorted(fitting, key=lambda axes: sum(size > 1 for size in axes.values()))


def cells(devices: int) -> list[tuple[dict[str, int], str]]:
    """With every dispatch that differs there: without an axis of experts nothing is sent."""
    return [
        (axes, how)
        for axes in meshes(devices)
        for how in (ALL_REDUCE, ALL_TO_ALL)
        if how == ALL_REDUCE or axes["expert"] > 1
    ]


def named(axes: dict[str, int], how: str) -> str:
    return " x ".join(f"{axis}={n}" for axis, n in axes.items() if n > 1) + f" {how}"


def said(path, dtype: str, new: int, mesh=None, how: str = "auto"):
    """(greedy tokens of PROMPTS, float32 logits [2, 40, V] of TOKENS) of a mesh or one device."""
    model = gj.load(path, mesh=mesh, dtype=dtype, dispatch=how)
    out = gj.generate(
        model,
        PROMPTS,
        max_new_tokens=new,
        sampler=gj.Sampler(temperature=0.0),
        stop_tokens=(),
    )
    return out.tokens, np.asarray(model(TOKENS))


def mesh_of(axes: dict[str, int], devices=None):
    return sharding.make_mesh(**axes, devices=devices or jax.devices())
