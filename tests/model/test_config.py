import dataclasses

import pytest
from tiny import TINY

from gptoss_jax.config import Config


def test_published_sizes():
    assert Config.gpt_oss_20b().parameters == 20_914_757_184
    assert Config.gpt_oss_120b().parameters == 116_829_156_672


def test_even_layers_slide_unless_told_otherwise():
    assert [TINY.window_of(i) for i in range(3)] == [5, None, 5]
    other = dataclasses.replace(TINY, sliding=(False, True, True))
    assert [other.window_of(i) for i in range(3)] == [None, 5, 5]


@pytest.mark.parametrize(
    "field, value",
    [
        ("layers", 0),
        ("embed", 96.0),
        ("experts", True),
        ("window", -1),
        ("vocab", None),
        ("norm_eps", float("nan")),
        ("rope_theta", 0.0),
        ("rope_theta", 1.0),
        ("rope_theta", float("inf")),
        ("norm_eps", 10**400),
        ("norm_eps", "1e-5"),
        ("rope_factor", 0.5),
        ("rope_beta_fast", 1.0),
        ("head_width", 11),
        ("experts_per_token", 9),
        ("swiglu_limit", 0.0),
        ("sliding", (True,)),
        ("eos", (-1,)),
        ("pad", -7),
    ],
)
def test_nonsense_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(TINY, **{"sliding": None} | {field: value})


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError, match=r"layers.*ffn.*norm_eps"):
        dataclasses.replace(TINY, layers=0, ffn=-3, norm_eps=0.0)
