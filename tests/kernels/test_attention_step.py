"""append_and_attend: the kernel and the plain form against loops over the cache as it becomes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import loops
from tolerances import BFLOAT16_OP, FLOAT32_OP

from gptoss_jax.kernels import device
from gptoss_jax.kernels.attention import append_and_attend, step


def case(*, B=3, K=2, G=3, H=10, S=37, wraps=False, dtype=jnp.float32):
    """A cache before the step; the last row is padding and writes nothing."""
    rng = np.random.default_rng(0)
    qkv, k, v = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((B, K, G + 2, H), (B, K, S, H), (B, K, S, H))
    )
    angle = rng.uniform(0, 6, (B, H // 2))
    cos, sin = (jnp.asarray(1.3 * f(angle), jnp.float32) for f in (np.cos, np.sin))
    sinks = jnp.asarray(rng.standard_normal((K, G)), jnp.float32)
    pos = rng.integers(2 * S, 5 * S, B) if wraps else rng.integers(0, S, B)
    pos[-1] = -1
    slot = np.where(pos < 0, S, pos % S)
    held = pos[:, None] - (pos[:, None] - np.arange(S)) % S
    k_pos = np.where(pos[:, None] < 0, -1, np.maximum(held, -1))
    # What the step writes over, and empty slots, hold what must not matter.
    stale = (np.arange(S) == slot[:, None]) | (k_pos < 0)
    k, v = (jnp.where(stale[:, None, :, None], jnp.nan, x) for x in (k, v))
    pos, k_pos, slot = (jnp.asarray(x, jnp.int32) for x in (pos, k_pos, slot))
    return qkv, cos, sin, k, v, sinks, pos, k_pos, slot


def expected(qkv, cos, sin, k, v, sinks, pos, k_pos, slot, window):
    """float64, with the turned values rounded to the dtype that is stored."""
    x, c, s = (np.asarray(a.astype(jnp.float32), np.float64) for a in (qkv, cos, sin))
    half = x.shape[-1] // 2
    turned = x.copy()
    for b in range(x.shape[0]):
        for i in range(half):
            low, high = x[b, ..., i], x[b, ..., i + half]
            turned[b, ..., i] = low * c[b, i] - high * s[b, i]
            turned[b, ..., i + half] = high * c[b, i] + low * s[b, i]
    turned = jnp.asarray(turned, jnp.float32).astype(qkv.dtype)
    k, v = k.copy(), v.copy()
    for b in range(x.shape[0]):
        if slot[b] < k.shape[2]:
            k = k.at[b, :, slot[b]].set(turned[b, :, -2])
            v = v.at[b, :, slot[b]].set(qkv[b, :, -1])
    q = turned[:, None, :, :-2]
    return loops(q, k, v, sinks, pos[:, None], k_pos, window)[:, 0], k, v


@functools.cache
def compiled(**options):
    options |= {"interpret": jax.default_backend() == "cpu"}
    return jax.jit(functools.partial(step.append_and_attend, **options))


def check(actual, wanted, bound):
    for a, w in zip(actual, wanted, strict=True):
        a, w = np.asarray(a, np.float64), np.asarray(w, np.float64)
        np.testing.assert_allclose(a, w, rtol=0, atol=bound * max(1, np.nanmax(np.abs(w))))


@pytest.mark.parametrize("window", [None, 37, 9])
def test_step(window):
    args = case(wraps=window is not None)
    wanted = expected(*args, window)
    plain = jax.jit(functools.partial(append_and_attend, window=window, backend="xla"))
    check(plain(*args), wanted, FLOAT32_OP)
    splits = 1 if window == 37 else 2
    check(compiled(window=window, keys=16, splits=splits)(*args), wanted, FLOAT32_OP)


def test_real_heads_in_bfloat16():
    args = case(B=2, K=3, G=8, H=64, S=70, dtype=jnp.bfloat16)
    out, k, v = compiled(window=None)(*args)
    wanted = expected(*args, None)
    check([out], wanted[:1], BFLOAT16_OP)
    check([k, v], wanted[1:], 2**-8)  # a turned key may round to the neighbour


@pytest.mark.parametrize("slots, window, launches", [(1536, None, 2), (128, 128, 1)])
def test_lowers_to_one_launch_and_one_more_for_splits(slots, window, launches):
    shape, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    kv = shape((1, 8, slots, 64), bf16)
    args = (
        shape((1, 8, 10, 64), bf16),
        *[shape((1, 32), jnp.float32)] * 2,
        *(kv, kv),
        shape((8, 8), jnp.float32),
        shape((1,), jnp.int32),
        shape((1, slots), jnp.int32),
        shape((1,), jnp.int32),
    )
    with device.ahead_of_time():
        run = jax.jit(functools.partial(append_and_attend, window=window, backend="triton"))
        text = run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == launches
    assert "output_operand_alias" in text


def test_sizes_that_do_not_belong_together():
    args = list(case())
    args[1] = jnp.concatenate([args[1], args[1]], axis=1)
    with pytest.raises(
        Exception, match="cos"
    ):  # jaxtyping's error, or ours where it is not installed
        append_and_attend(*args)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 37, 9])
def test_on_a_gpu(window):
    args = case(wraps=window is not None)
    for options in ({}, {"keys": 16, "splits": 2}):
        check(compiled(window=window, **options)(*args), expected(*args, window), 2 * FLOAT32_OP)
