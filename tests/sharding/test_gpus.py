"""Meshes of real GPUs against one of them: `pytest -m gpu tests/sharding` on several."""

import jax
import numpy as np
import pytest
from tolerances import BFLOAT16_ROW, clear_choices, row_difference, spread

import gptoss_jax as gj
from gptoss_jax import sharding

pytestmark = pytest.mark.gpu

MESHES = ["expert=2", "tensor=2", "data=2", "expert=4", "expert=2,tensor=2", "expert=8"]
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 40))


def run(mesh: str | None, how: str, dtype: str):
    made = None
    if mesh is not None:
        sizes = sharding.parse_mesh(mesh)
        needed = int(np.prod(list(sizes.values())))
        if len(jax.devices()) < needed:
            pytest.skip(f"needs {needed} GPUs; there are {len(jax.devices())}")
        made = sharding.make_mesh(**sizes)
    model = gj.load("tiny", mesh=made, dtype=dtype, dispatch=how)
    out = gj.generate(
        model,
        [[int(token) for token in TOKENS[0]], [int(token) for token in TOKENS[1, :9]]],
        max_new_tokens=24,
        sampler=gj.Sampler(temperature=0.0),
        stop_tokens=(),
    )
    return np.asarray(model(TOKENS)), out.tokens


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def alone(request):
    return request.param, *run(None, "auto", request.param)


@pytest.mark.parametrize("how", ["all_reduce", "all_to_all"])
@pytest.mark.parametrize("mesh", MESHES)
def test_as_one_gpu(mesh, how, alone):
    if how == "all_to_all" and "expert" not in mesh:
        pytest.skip("nothing to send: the same program as all_reduce")
    dtype, logits, tokens = alone
    meshed, said = run(mesh, how, dtype)
    if dtype == "float32":
        assert np.abs(meshed - logits).max() < 1e-4 * spread(logits)
        assert said == tokens
        return
    clear = clear_choices(meshed, logits)
    np.testing.assert_array_equal(meshed.argmax(-1)[clear], logits.argmax(-1)[clear])
    assert np.median(row_difference(meshed, logits)) < BFLOAT16_ROW * spread(logits)
