"""The definition against pictures and float64 loops, and the XLA form against the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import DECODE, PREFILL, REAL, loops
from tolerances import BFLOAT16_OP, FLOAT32_OP

from gptoss_jax.kernels.attention import attention, reference, visible, xla

CASES = [pytest.param(case, id=f"{case.name}, T={case.T}") for case in DECODE + PREFILL]


def drawn(seen_TS):
    return ["".join(".#"[int(seen)] for seen in row) for row in seen_TS]


def test_window_picture():
    pos = jnp.arange(6)[None]
    assert drawn(visible(pos, pos, window=3)[0]) == [
        "#.....",
        "##....",
        "###...",
        ".###..",
        "..###.",
        "...###",
    ]


def test_ring_picture():
    # A ring of four slots after positions 0..5: slots 0 and 1 were written over by 4 and 5.
    q_pos, k_pos = jnp.array([[5]]), jnp.array([[4, 5, 2, 3]])
    assert drawn(visible(q_pos, k_pos, window=3)[0]) == ["##.#"]


def test_ragged_picture():
    # Left padding sees nothing and is seen by nobody.
    pos = jnp.array([[-1, -1, 0, 1]])
    assert drawn(visible(pos, pos, window=None)[0]) == ["....", "....", "..#.", "..##"]


def test_a_sink_takes_weight_and_gives_no_value():
    # Scores 1 and 2 and a sink of 3: the weights are read off as the values' sum.
    q = jnp.ones((1, 1, 1, 1, 1))
    k = jnp.array([1.0, 2.0]).reshape(1, 1, 2, 1)
    pos = jnp.arange(2)[None]
    for backend in ("reference", "xla"):
        for v, expected in (([1, 0], 0.09003057), ([0, 1], 0.24472847), ([1, 1], 0.33475904)):
            v = jnp.array(v, jnp.float32).reshape(1, 1, 2, 1)
            args = (q, k, v, jnp.array([[3.0]]), jnp.array([[1]]), pos)
            assert attention(*args, backend=backend).item() == pytest.approx(expected, abs=1e-7)


def check(out, expected, bound):
    out, expected = np.asarray(out, np.float64), np.asarray(expected)
    np.testing.assert_allclose(out, expected, rtol=0, atol=bound * max(1, np.abs(expected).max()))


@functools.cache
def compiled(how, window, **options):
    return jax.jit(functools.partial(how, window=window, **options))


@pytest.mark.parametrize("case", CASES)
def test_reference_and_xla_equal_loops(case):
    args = case.make()
    expected = loops(*args, case.window)
    check(compiled(reference.attention, case.window)(*args), expected, FLOAT32_OP)
    check(compiled(xla.attention, case.window)(*args), expected, FLOAT32_OP)
    # Four queries at once, so that the blocks' seams show.
    few = 4 * case.B * case.K * case.G * case.S
    blocks = compiled(xla.attention, case.window, scores_at_once=few)
    check(blocks(*args), expected, FLOAT32_OP)


def test_xla_in_bfloat16():
    args = REAL.make(jnp.bfloat16)
    out = compiled(xla.attention, REAL.window)(*args)
    assert out.dtype == jnp.bfloat16
    check(out, loops(*args, REAL.window), BFLOAT16_OP)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_a_value_that_is_not_finite_reaches_only_those_who_see_it(backend):
    case = PREFILL[1]
    run = compiled({"reference": reference, "xla": xla}[backend].attention, case.window)
    q, k, v, *rest = case.make()
    clean = run(q, k, v, *rest)
    out = run(q, k, v.at[0, :, 7].set(jnp.nan), *rest)
    bad = jnp.isnan(out).any(axis=(2, 3, 4))
    assert bad[0].nonzero()[0].tolist() == [7, 8, 9, 10, 11]  # a window of 5
    assert not bad[1:].any()
    np.testing.assert_array_equal(out[~bad], clean[~bad])


def test_no_sink_is_the_plain_softmax_and_nothing_seen_is_zero():
    q, k, v, sinks, q_pos, k_pos = PREFILL[0].make()
    k, v = jnp.nan_to_num(k), jnp.nan_to_num(v)
    none = jnp.full_like(sinks, -jnp.inf)
    for how in (reference, xla):
        out = compiled(how.attention, None)(q, k, v, none, q_pos, k_pos)
        # The first token sees itself alone.
        np.testing.assert_allclose(out[0, 0], v[0, :, None, 0] + 0 * out[0, 0], rtol=1e-6)
        assert (out[q_pos < 0] == 0).all()


def test_gradients():
    """xla's equal the definition's, blocks or not; the sinks' equal finite differences."""
    case = PREFILL[1]
    q, k, v, sinks, q_pos, k_pos = case.make()
    k, v = jnp.nan_to_num(k), jnp.nan_to_num(v)

    def loss(how, **kw):
        def of(q, k, v, sinks):
            return jnp.sum(jnp.square(how(q, k, v, sinks, q_pos, k_pos, window=5, **kw)))

        return of

    def gradient(how, **kw):
        return jax.jit(jax.grad(loss(how, **kw), argnums=(0, 1, 2, 3)))(q, k, v, sinks)

    expected = gradient(reference.attention)
    for actual in (gradient(xla.attention), gradient(xla.attention, scores_at_once=2000)):
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, e, atol=4 * FLOAT32_OP * np.abs(e).max())

    one = jnp.zeros_like(sinks).at[1, 2].set(1e-2)
    run = jax.jit(loss(xla.attention))
    slope = (run(q, k, v, sinks + one) - run(q, k, v, sinks - one)) / 2e-2
    assert expected[3][1, 2] == pytest.approx(float(slope), rel=2e-3)
    assert np.abs(expected[3]).min() > 0


def test_wrong_calls_say_what_is_wrong():
    q, k, v, sinks, q_pos, k_pos = PREFILL[0].make()
    with pytest.raises(ValueError, match="at least 1; got 0"):
        attention(q, k, v, sinks, q_pos, k_pos, window=0)
    with pytest.raises(ValueError, match="bfloat16"):
        attention(q, k.astype(jnp.bfloat16), v, sinks, q_pos, k_pos)
    with pytest.raises(NotImplementedError, match="mosaic"):
        attention(q, k, v, sinks, q_pos, k_pos, backend="mosaic")
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
            attention(q, k, v, sinks, q_pos, k_pos, backend="triton")
