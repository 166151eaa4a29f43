"""The kernels' benchmark tells right from wrong and goes on after what does not compile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gptoss_jax.kernels import bench_dense, profile


def test_measure():
    x = bench_dense.normal(0, (8, 16))
    forms = {
        "right": lambda x: x * 2,
        "wrong": lambda x: x * 3,
        "broken": lambda x: x.reshape(3),
    }
    rows = list(bench_dense.measure("twice", forms, [(x,), (x,)], 2 * bench_dense.wide(x)))
    assert [row["form"] for row in rows] == list(forms)
    assert rows[0]["relative_error"] == 0
    assert rows[1]["relative_error"] == 0.5
    assert "reshape" in rows[2]["error"]


def test_no_kernels_are_found_without_a_gpu():
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    assert profile.kernel_times(lambda: jax.block_until_ready(jnp.ones(3) + 1)) == []


@pytest.mark.gpu
def test_kernels_are_found():
    run = jax.jit(lambda x: x @ x, compiler_options=bench_dense.ALONE)
    x = jnp.ones((1024, 1024))
    jax.block_until_ready(run(x))
    found = profile.kernel_times(lambda: jax.block_until_ready([run(x), run(x)]), calls=2)
    assert sum(kernel["launches"] for kernel in found) >= 1
    assert found[0]["us"] > 1


@pytest.mark.gpu
@pytest.mark.parametrize("group", list(bench_dense.GROUPS))
def test_every_form_that_is_timed_is_right(group):
    """bfloat16's rounding is 2e-3 of a result; not only the first configuration counts."""
    rows = list(bench_dense.GROUPS[group]())
    wrong = [row for row in rows if not row.get("relative_error", np.inf) < 4e-3]
    assert not [row for row in wrong if "error" not in row]
