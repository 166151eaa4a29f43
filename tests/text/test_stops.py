import pytest

from gptoss_jax.text.harmony import stop_tokens


def test_by_name(o200k, small):
    assert stop_tokens(o200k) == (200002, 200012, 199999)
    assert stop_tokens(small) == tuple(
        small.special[name] for name in ("<|return|>", "<|call|>", "<|endoftext|>")
    )


@pytest.mark.parametrize("config", [None, 200002, [200002], [5, 7]])
@pytest.mark.parametrize("generation", [None, 7, [200002, 199999, 200012], [], (9,)])
def test_union(config, generation, o200k):
    listed = set()
    for eos in (config, generation):
        listed |= {eos} if isinstance(eos, int) else set(eos or ())
    stops = stop_tokens(o200k, config, generation)
    assert set(stops) == {200002, 200012, 199999} | listed
    assert len(stops) == len(set(stops))
    assert 200007 not in stops  # <|end|> ends a message, not the turn


def test_precedence_and_missing_names(o200k, make_bytes_only):
    assert stop_tokens(o200k, [9, 200012], 3) == (200002, 200012, 199999, 9, 3)
    assert stop_tokens(None, 4, [4, 5]) == (4, 5)
    assert stop_tokens(None) == ()


@pytest.mark.parametrize("eos", [-1, True, [1, "2"]])
def test_what_is_no_token_id(eos, o200k):
    with pytest.raises(ValueError, match="generation_config"):
        stop_tokens(o200k, None, eos)
