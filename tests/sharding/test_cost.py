"""The cost model's arithmetic, and that `auto` follows it."""

from pathlib import Path

import pytest
from jax.sharding import AbstractMesh

from gptoss_jax import sharding
from gptoss_jax.sharding import cost

DOCS = Path(__file__).parents[2] / "docs" / "sharding.md"
SHAPE = {"experts": 128, "chosen": 4}


def test_bytes_by_hand():
    free = cost.Link(bytes_s=1.0, latency_s=0.0)
    # Two devices: each sends half of 10 x 7 float32 to be added, and half of the sums.
    assert cost.all_reduce(10, 7, 2, free) == cost.Cost(280.0, 280.0)
    # One expert a token: half of 5 tokens go over and back, then 5 rows are shared.
    sent = cost.all_to_all(10, 7, 2, free, experts=2, chosen=1)
    assert sent.bytes == 2.5 * 7 * 4 + 5 * 7 * 2


def test_destinations_are_between_one_and_all():
    assert cost.destinations(8, 8, 4) == 4  # all experts: all devices
    assert cost.destinations(8, 1, 4) == pytest.approx(1)
    # 2 of 4 experts on 2 devices of 2: the second is on the other one in 2 of 3 cases.
    assert cost.destinations(4, 2, 2) == pytest.approx(1 + 2 / 3)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 256, 1024, 2048, 8192, 65536])
def test_auto_is_near_the_best_over_nvlink(ranks, tokens):
    mesh = AbstractMesh((1, ranks, 1), sharding.AXES)
    times = {
        "all_reduce": cost.all_reduce(tokens, 2880, ranks, cost.LINKS["NVLink"]).seconds,
        "all_to_all": cost.all_to_all(tokens, 2880, ranks, cost.LINKS["NVLink"], **SHAPE).seconds,
    }
    assert times[sharding.choose(tokens, mesh)] <= 1.4 * min(times.values())


def test_the_docs_hold_the_table():
    assert cost.table() in DOCS.read_text()
