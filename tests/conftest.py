"""Eight CPU devices, strict promotion, and shape annotations that are checked."""

import os
import tempfile

# Eight CPU devices stand for a mesh; on a GPU machine the flag changes nothing.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# Compiling is most of the run: what one test compiled, the next (and the next run) takes from disk.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    os.path.join(tempfile.gettempdir(), f"gptoss_jax-tests-{os.getuid()}"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

# Imported before the hook: these report wrong types themselves, and tests look at how.
import gptoss_jax.config  # noqa: E402, F401

try:
    import beartype  # noqa: F401
    from jaxtyping import install_import_hook

    install_import_hook("gptoss_jax", "beartype.beartype")
except ImportError:
    if os.environ.get("CI"):
        raise

jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_modifyitems(items):
    on_gpu = None
    for item in items:
        if item.get_closest_marker("gpu"):
            if on_gpu is None:
                on_gpu = jax.default_backend() == "gpu"
            if not on_gpu:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def annotations_unchecked():
    """What a user meets: annotations are checked in our tests alone."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
