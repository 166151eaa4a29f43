"""Shapes are few, and using them changes no result."""

import dataclasses

import jax
import pytest
from flax import nnx
from tiny import TINY

import gptoss_jax as gj
from gptoss_jax import buckets


def test_rows():
    assert [buckets.rows(n, 1) for n in (1, 2, 3, 5, 8, 9, 33)] == [1, 2, 4, 8, 8, 16, 40]
    assert [buckets.rows(n, 4) for n in (1, 5, 9)] == [4, 8, 16]
    assert buckets.rows(7, 3) == 9


def test_capacity_wastes_at_most_half_and_is_capped():
    assert [buckets.capacity(n, 131_072) for n in (1, 128, 129, 1024, 1025, 1537, 100_000)] == [
        128,
        128,
        256,
        1024,
        1536,
        2048,
        131_072,
    ]
    assert buckets.capacity(100, 110) == 110
    sizes = {buckets.capacity(n, 131_072) for n in range(1, 131_073, 61)} | {131_072}
    assert len(sizes) <= 18


@pytest.mark.parametrize("tokens", [16, 1024, 8192])
@pytest.mark.parametrize("batch", [1, 4, 40])
def test_chunks_follow_on_and_cover_the_length_once(batch, tokens):
    for length in (0, 1, 15, 16, 17, 300, 1100, 2049, 9000):
        end = 0
        for start, size in buckets.chunks(length, batch, tokens):
            assert start == end and size in buckets.CHUNKS
            assert size == 16 or size * batch <= tokens
            end = start + size
        assert length <= end <= length + 255 + length // 4


def test_a_padded_tail_is_cut_where_padding_would_be_much():
    assert list(buckets.chunks(1100, 1, 8192)) == [(0, 1024), (1024, 256)]
    assert list(buckets.chunks(900, 1, 8192)) == [(0, 1024)]
    assert list(buckets.chunks(8191, 1, 8192)) == [(0, 8192)]
    assert list(buckets.chunks(20, 1, 8192)) == [(0, 64)]


def test_other_lengths_and_batches_compile_once_a_bucket():
    """Lengths 1..40, batches 1..4: 2 chunk sizes, 3 row counts, 1 capacity, whatever is asked."""
    model = gj.GptOss(dataclasses.replace(TINY, layers=1, sliding=None), rngs=nnx.Rngs(0))
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    def use(batch, lengths):
        prompts = [[(7 * n + i) % TINY.vocab for i in range(n)] for n in lengths]
        sampler = gj.Sampler(temperature=1 + batch / 10)
        return gj.generate(model, prompts[:batch], max_new_tokens=3 + batch, sampler=sampler)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for batch in (1, 2, 3, 4):
            use(batch, [40, 2, 17, 5])
            use(batch, [16, 2, 9, 5])
        # For each of 1, 2, 4 rows: an empty cache, chunks of 16 and 64, one decode loop.
        assert len(compiled) == 12
        for length in range(1, 41, 3):
            for batch in (1, 2, 3, 4):
                use(batch, [length, 40 - length, 1, 1][::1] if length < 40 else [40, 1, 2, 3])
        assert len(compiled) == 12
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
