"""Checkpoints and PyTorch's results, made once for all tests of parity."""

import functools

import numpy as np
import pytest
from checkpoints import SQUARE, SQUARE_GATE_UP, TINY, decoded, make_weights, write
from needed import need

NUMBERS = {"tiny": TINY, "square": SQUARE, "square-gate-up": SQUARE_GATE_UP}


@pytest.fixture(scope="session")
def weights():
    """size name -> what is stored, under Hugging Face's names."""
    return functools.cache(lambda size: make_weights(NUMBERS[size]))


@pytest.fixture(scope="session")
def folder(tmp_path_factory, weights):
    """(size name, layout) -> a checkpoint's folder."""

    @functools.cache
    def make(size: str, layout: str):
        path = tmp_path_factory.mktemp(f"{size}-{layout}")
        family = 5 if layout == "bf16" else 4
        return write(path, NUMBERS[size], weights(size), layout, family=family)

    return make


@pytest.fixture(scope="session")
def tokens():
    """Far beyond the window of 8, and beyond 256, the first position that bfloat16 cannot hold."""
    return np.random.default_rng(5).integers(0, TINY.vocab, 300).tolist()


@pytest.fixture(scope="session")
def expected(weights, tokens):
    """size name -> the oracle's trace of the 300 tokens."""
    import oracle

    return functools.cache(lambda size: oracle.trace(NUMBERS[size], decoded(weights(size)), tokens))


@pytest.fixture(scope="session")
def reference(folder):
    """(size name, layout, dtype) -> PyTorch's model of that checkpoint."""

    @functools.cache
    def open_one(size: str, layout: str, dtype: str = "float32"):
        need("torch", "gpt_oss.torch.model" if layout == "original" else "transformers")
        import torch

        from gptoss_jax.references import open_reference

        torch.set_num_threads(1)  # tiny matrices: two threads cost more than they give
        return open_reference(folder(size, layout), dtype=dtype)

    return open_one


@pytest.fixture(scope="session")
def theirs(reference, tokens):
    """(size name, layout, dtype) -> PyTorch's trace of the 300 tokens."""
    return functools.cache(lambda *which: reference(*which).trace(tokens))


@pytest.fixture(scope="session")
def load(folder):
    """(size name, layout, dtype, experts) -> our model of that checkpoint."""
    import gptoss_jax as gj

    @functools.cache
    def load_one(size: str, layout: str, dtype: str = "float32", experts: str | None = None):
        model = gj.load(folder(size, layout), dtype=dtype, experts=experts)
        # Layouts state different stops; with none, models of one shape share what is compiled.
        model.stop_tokens = ()
        return model

    return load_one


@pytest.fixture(scope="session")
def ours(load, tokens):
    """(size name, layout, dtype, experts) -> our trace of the 300 tokens, without batch axis."""

    @functools.cache
    def trace(*which):
        return {
            name: [a[0] for a in value] if isinstance(value, list) else value[0]
            for name, value in load(*which).trace([tokens]).items()
        }

    return trace
