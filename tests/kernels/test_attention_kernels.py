"""The Triton kernels: interpreted against float64 loops, lowered at real shapes, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import DECODE, PREFILL, REAL, REAL_ONE, loops
from tolerances import BFLOAT16_OP, FLOAT32_OP

from gptoss_jax.kernels import device
from gptoss_jax.kernels.attention import attention, choose, decode, prefill, visible
from gptoss_jax.kernels.attention.spans import seen_by_one, share_of, spans


@functools.cache
def compiled(how, window, **options):
    options |= {"interpret": jax.default_backend() == "cpu"}
    return jax.jit(functools.partial(how, window=window, **options))


def check(out, expected, bound):
    out, expected = np.asarray(out, np.float64), np.asarray(expected)
    np.testing.assert_allclose(out, expected, rtol=0, atol=bound * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.name)
def test_decode(case):
    # A sink belongs to the sum of all splits: one block in one, three blocks in four shares.
    args = case.make()
    expected = loops(*args, case.window)
    for keys, splits in ((64, 1), (16, 4)):
        run = compiled(decode.attention, case.window, keys=keys, splits=splits)
        check(run(*args), expected, FLOAT32_OP)


@pytest.mark.parametrize("case", PREFILL, ids=lambda case: case.name)
def test_prefill(case):
    args = case.make()
    run = compiled(prefill.attention, case.window, queries=4, keys=16)
    check(run(*args), loops(*args, case.window), FLOAT32_OP)


def test_real_heads_in_bfloat16():
    for case, how in ((REAL, prefill), (REAL_ONE, decode)):
        args = case.make(jnp.bfloat16)
        out = compiled(how.attention, case.window)(*args)
        assert out.dtype == jnp.bfloat16
        check(out, loops(*args, case.window), BFLOAT16_OP)


def test_a_value_that_is_not_finite_reaches_only_those_who_see_it():
    case = PREFILL[1]
    run = compiled(prefill.attention, case.window, queries=4, keys=16)
    q, k, v, *rest = case.make()
    clean, out = run(q, k, v, *rest), run(q, k, v.at[0, :, 7, 3].set(jnp.inf), *rest)
    bad = jnp.isnan(out).any(axis=(2, 3, 4))
    assert bad[0].nonzero()[0].tolist() == [7, 8, 9, 10, 11]  # a window of 5
    assert not bad[1:].any()
    np.testing.assert_array_equal(out[~bad], clean[~bad])


def test_split_counts():
    # A power of two, never more than blocks, about three programs for each of 132 SMs.
    assert [decode.split_count(8 * batch, 16) for batch in (1, 4, 8, 32, 128)] == [16, 8, 4, 1, 1]
    assert decode.split_count(8, 2048) == 32
    assert decode.split_count(8, 2) == 1  # a ring: a second launch costs more than it saves


def drawn(q_pos, k_pos, window, queries, keys):
    """Rows are tiles, columns blocks: # inside the span."""
    of_tile = spans(
        jnp.array([q_pos]), jnp.array([k_pos]), window=window, queries=queries, keys=keys
    )
    blocks = range(-(-len(k_pos) // keys))
    return ["".join(".#"[a <= j < b] for j in blocks) for a, b in of_tile[0].tolist()]


def test_span_pictures():
    prompt = list(range(8))
    assert drawn(prompt, prompt, None, 2, 2) == ["#...", "##..", "###.", "####"]
    assert drawn(prompt, prompt, 3, 2, 2) == ["#...", "##..", ".##.", "..##"]
    # A cache of 12 slots of which 6 are filled, and the chunk 4, 5.
    assert drawn([4, 5], [0, 1, 2, 3, 4, 5] + [-1] * 6, None, 2, 2) == ["###..."]
    # A ring of 4 that holds 6..9, then a chunk of 6: the first two tiles look back.
    ring, chunk = [8, 9, 6, 7], [10, 11, 12, 13, 14, 15]
    assert drawn(chunk, ring + chunk, 4, 2, 2) == ["###..", "####.", "..###"]
    # Tiles of padding alone look nowhere.
    assert drawn([-1, -1, 0, 1], [-1, -1, 0, 1], 3, 2, 2) == ["..", ".#"]


def test_spans_hold_everything_visible():
    for case in PREFILL:
        *_, q_pos, k_pos = case.make()
        of_tile = np.asarray(spans(q_pos, k_pos, window=case.window, queries=4, keys=16))
        for b, t, s in np.argwhere(visible(q_pos, k_pos, case.window)):
            first, end = of_tile[b, t // 4]
            assert first <= s // 16 < end, case.name


def lowered(how, batch, tokens, slots, window):
    shape = jax.ShapeDtypeStruct
    kv = shape((batch, 8, slots, 64), jnp.bfloat16)
    args = (
        shape((batch, tokens, 8, 8, 64), jnp.bfloat16),
        *(kv, kv),
        shape((8, 8), jnp.float32),
        shape((batch, tokens), jnp.int32),
        shape((batch, slots), jnp.int32),
    )
    with device.ahead_of_time():
        run = jax.jit(functools.partial(how, window=window))
        return run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "batch, tokens, slots, window, kernels",
    [
        (1, 1, 1024, None, ["attention_decode_16", "attention_decode_sum"]),
        (1, 1, 128, 128, ["attention_decode_1"]),
        (128, 1, 8192, None, ["attention_decode_1"]),
        (1, 2048, 131072, None, ["attention_prefill"]),
        (2, 2048, 2176, 128, ["attention_prefill"]),
    ],
)
def test_lowers_for_a_gpu_at_the_real_shapes(batch, tokens, slots, window, kernels):
    """20b and 120b have the same heads: 8 x 8 of width 64."""
    text = lowered(functools.partial(attention, backend="triton"), batch, tokens, slots, window)
    assert text.count("__gpu$xla.gpu.triton") == len(kernels)
    assert all(f'name = "{kernel}"' in text for kernel in kernels)


def test_choice():
    q = jnp.zeros((1, 1, 2, 3, 16), jnp.bfloat16)
    with device.ahead_of_time():
        assert choose(q) == "triton"
        assert choose(q.astype(jnp.float32)) == "xla"
    assert choose(q) == ("triton" if device.nvidia() else "xla")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*DECODE, *PREFILL], ids=lambda case: case.name)
def test_on_a_gpu(case):
    """Also twice the same bits. float32 kernels multiply in float32, not in tf32."""
    args = case.make()
    how = decode if case.T == 1 else prefill
    run = compiled(how.attention, case.window)
    out = run(*args)
    check(out, loops(*args, case.window), 2 * FLOAT32_OP)  # its exp2 is wrong by two last places
    np.testing.assert_array_equal(out, run(*args))


@pytest.mark.gpu
def test_a_rows_bits_do_not_depend_on_its_neighbours():
    for case, how in ((REAL, prefill), (REAL_ONE, decode)):
        args = case.make(jnp.bfloat16)
        run = compiled(how.attention, case.window)
        turned = run(*(x if x.ndim == 2 and x.shape == (3, 8) else x[::-1] for x in args))
        np.testing.assert_array_equal(run(*args), turned[::-1])


@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.name)
def test_one_query_sees_between_first_and_last(case):
    _, k, _, _, q_pos, k_pos = case.make()
    first, last = seen_by_one(q_pos[:, 0], k_pos, window=case.window)
    seen = np.asarray(visible(q_pos, k_pos, case.window))[:, 0]
    for row, low, high in zip(seen, first, last, strict=True):
        slots = row.nonzero()[0]
        assert (low, high) == ((slots[0], slots[-1]) if slots.size else (len(row), -1))


@pytest.mark.parametrize("first, last", [(0, 0), (5, 5), (3, 40), (15, 16), (37, -1), (0, 63)])
def test_shares_cover_what_is_seen_once(first, last):
    for splits in (1, 4):
        shares = [share_of(first, last, 8, split, splits) for split in range(splits)]
        blocks = [block for begin, end in shares for block in range(int(begin), int(end))]
        assert blocks == list(range(first // 8, last // 8 + 1))
