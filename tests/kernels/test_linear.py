"""Dense layers for few rows: every form against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import BFLOAT16_OP, FLOAT32_OP

from gptoss_jax.kernels import device
from gptoss_jax.kernels.linear import linear, norm_router, router, tile, vector, xla

IN, OUT = 100, 37  # neither is a multiple of any block


def inputs(rows, dtype=jnp.float32, n_out=OUT, n_in=IN):
    rng = np.random.default_rng(rows)

    def array(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return (
        array(rows, n_in) * jnp.asarray(3, dtype),
        array(n_out, n_in) * jnp.asarray(n_in**-0.5, dtype),
        array(n_out),
        array(n_in, dtype=jnp.float32),
        array(rows, n_out),
    )


def float64(x, weight, bias=None, norm=None, residual=None, eps=1e-5):
    x, weight, bias, norm, residual = (
        None if a is None else np.asarray(a.astype(jnp.float32), np.float64)
        for a in (x, weight, bias, norm, residual)
    )
    if norm is not None:
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * norm
    out = x @ weight.T
    for term in (bias, residual):
        out = out if term is None else out + term
    return out


def check(out, expected, bound):
    out = np.asarray(out, np.float64)
    np.testing.assert_allclose(out, expected, rtol=0, atol=bound * np.abs(expected).max())


@functools.cache
def compiled(how, **options):
    if how not in (linear, norm_router, xla.linear):
        options |= {"interpret": jax.default_backend() == "cpu"}
    return jax.jit(functools.partial(how, **options))


@pytest.mark.parametrize("rows", [1, 3])
def test_float32(rows):
    x, weight, bias, norm, residual = inputs(rows)
    expected = float64(x, weight, bias, norm, residual)
    for how in (
        functools.partial(linear, backend="reference"),
        functools.partial(linear, backend="xla"),
        compiled(vector.linear, rows=8, together=8, columns=64),
        compiled(vector.linear, rows=8, together=2, columns=64),  # in turns
    ):
        out = how(x, weight, bias, norm_I=norm, **_residual(how, residual))
        check(out, expected, FLOAT32_OP)
    plain = float64(x, weight)
    check(compiled(vector.linear, rows=8, together=8, columns=64)(x, weight), plain, FLOAT32_OP)
    for tiles in (dict(rows=16), dict(rows=8, parts=2), dict(rows=16, parts=4)):
        check(compiled(tile.linear, columns=32, **tiles)(x, weight), plain, FLOAT32_OP)


def _residual(how, residual):
    """The door takes leading axes of any number and so names its argument without N."""
    door = getattr(how, "func", None) is linear
    return {"residual_O" if door else "residual_NO": residual}


def test_bfloat16_is_rounded_once():
    x, weight, bias, norm, residual = inputs(5, jnp.bfloat16)
    exact = float64(x, weight, bias, None, residual)
    for tiles in (dict(rows=16), dict(rows=8, parts=4)):
        run = compiled(tile.linear, columns=32, **tiles)
        out = run(x, weight, bias, residual_NO=residual)
        assert out.dtype == jnp.bfloat16
        # Half of the last of 8 bits, plus float32's sums: no second rounding fits in between.
        assert (np.abs(np.asarray(out, np.float64) - exact) <= 2**-8 * np.abs(exact) + 1e-5).all()
    out = compiled(vector.linear, rows=8, together=2, columns=64)(x, weight, norm_I=norm)
    check(out, float64(x, weight, None, norm), BFLOAT16_OP)


def test_leading_axes_and_what_does_not_fit():
    x, weight, bias, norm, residual = inputs(6)
    flat = linear(x, weight, bias, norm_I=norm, residual_O=residual)
    apart = linear(
        x.reshape(2, 3, IN), weight, bias, norm_I=norm, residual_O=residual.reshape(2, 3, OUT)
    )
    np.testing.assert_array_equal(apart.reshape(6, OUT), flat)
    with pytest.raises(NotImplementedError, match="mosaic"):
        linear(x, weight, backend="mosaic")
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
            linear(x, weight, backend="triton")
    with (
        device.ahead_of_time(),
        pytest.raises(NotImplementedError, match="at most 64 rows; got 65"),
    ):
        linear(jnp.zeros((65, IN)), weight, backend="triton")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norm_router(dtype):
    x, weight, bias, norm, _ = inputs(3, dtype, n_out=9)
    bias = bias.astype(jnp.float32)
    normed = float64(x, jnp.eye(IN), None, norm)
    forms = (
        compiled(norm_router, backend="xla"),
        compiled(router.norm_router, rows=4, columns=64),
        compiled(router.norm_router),
    )
    for how in forms:
        out, logits = how(x, norm, weight, bias)
        assert out.dtype == dtype and logits.dtype == jnp.float32
        check(out, normed, FLOAT32_OP if dtype == jnp.float32 else 2**-8)
        # The router sees the normed row as it is rounded, and adds nothing to its error.
        check(logits, float64(out, weight, bias), FLOAT32_OP)


def lowered(f, *args):
    with device.ahead_of_time():
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("rows, n_out, n_in", [(1, 5120, 2880), (8, 5120, 2880), (64, 2880, 4096)])
def test_one_launch_at_the_real_shapes(rows, n_out, n_in):
    shape, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16

    def run(x, weight, bias, norm, residual):
        return linear(x, weight, bias, norm_I=norm, residual_O=residual, backend="triton")

    args = (
        shape((rows, n_in), bf16),
        shape((n_out, n_in), bf16),
        shape((n_out,), bf16),
        shape((n_in,), jnp.float32),
        shape((rows, n_out), bf16),
    )
    assert lowered(run, *args).count("__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize("experts", [32, 128])
def test_router_lowers_at_the_real_shapes(experts):
    shape, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    args = (
        shape((2, 2880), bf16),
        shape((2880,), jnp.float32),
        shape((experts, 2880), bf16),
        shape((experts,), jnp.float32),
    )
    text = lowered(functools.partial(norm_router, backend="triton"), *args)
    assert text.count("__gpu$xla.gpu.triton") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 31, 64])
def test_on_a_gpu(rows):
    for n_out, n_in in ((5120, 2880), (2880, 4096)):
        x, weight, bias, norm, residual = inputs(rows, jnp.bfloat16, n_out, n_in)
        run = functools.partial(linear, x, weight, bias, norm_I=norm, residual_O=residual)
        out = run(backend="triton")
        check(out, float64(x, weight, bias, norm, residual), BFLOAT16_OP)
        np.testing.assert_array_equal(out, run(backend="triton"))
    x, weight, bias, norm, _ = inputs(rows, jnp.bfloat16, 32, 2880)
    normed, logits = norm_router(x, norm, weight, bias.astype(jnp.float32), backend="triton")
    check(logits, float64(normed, weight, bias), FLOAT32_OP)
