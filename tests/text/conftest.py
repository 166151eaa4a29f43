"""Two vocabularies: the published one, and a small one whose control tokens have other ids."""

import os

import o200k as published
import pytest
import tokenizers

from gptoss_jax.text import Tokenizer

CONTROL = ["return", "channel", "message", "call", "startoftext", "end", "start", "constrain"]


@pytest.fixture(scope="session")
def o200k():
    return Tokenizer.load(published.folder())


@pytest.fixture(scope="session")
def official():
    """openai-harmony's encoding."""
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(published.folder())
    import openai_harmony

    return openai_harmony.load_harmony_encoding("HarmonyGptOss")


def bytes_only(names=(*CONTROL, "endoftext"), special=True):
    """One token a byte, and control tokens in an order of their own."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    added = [tokenizers.AddedToken(f"<|{name}|>", special=special) for name in names]
    (inner.add_special_tokens if special else inner.add_tokens)(added)
    return inner


@pytest.fixture(scope="session")
def small():
    return Tokenizer(bytes_only())


@pytest.fixture(scope="session", params=["o200k", "small"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def make_bytes_only():
    return bytes_only
