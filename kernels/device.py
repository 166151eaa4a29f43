"""Which device kernels are for: the one that is here, or one that they are compiled ahead for."""

import contextlib
import contextvars

import jax

# The kind of GPU that kernels are compiled ahead for.
_ahead = contextvars.ContextVar("kernels_compiled_ahead_for", default=None)


def nvidia() -> bool:
    """Whether computations run on an NVIDIA GPU unless they are placed elsewhere."""
    return _ahead.get() is not None or (
        jax.default_backend() == "gpu" and "NVIDIA" in jax.devices()[0].device_kind
    )


def dependent_launch() -> bool:
    """Whether kernels may signal the next one's launch: compute capability 9 (Hopper) and later."""
    if (kind := _ahead.get()) is not None:
        return any(name in kind for name in ("H100", "H200", "H800", "H20", "GH200", "B200"))
    return nvidia() and float(jax.devices()[0].compute_capability) >= 9


def require_nvidia(what: str) -> None:
    """Raises NotImplementedError for a kernel that was asked for by name and cannot run here."""
    if not nvidia():
        raise NotImplementedError(
            f"{what} needs an NVIDIA GPU; this is {jax.devices()[0].device_kind}. "
            "Use backend='xla'."
        )


@contextlib.contextmanager
def ahead_of_time(device_kind: str = "NVIDIA H200"):
    """Trace and lower kernels for a GPU on a host that has none.

    >>> with ahead_of_time():
    ...     jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))

    From jax 0.11 on, Pallas asks the abstract mesh which GPU it lowers for; 0.10 takes a Hopper.
    """
    token = _ahead.set(device_kind)
    try:
        with _abstract_gpu(device_kind):
            yield
    finally:
        _ahead.reset(token)


def _abstract_gpu(device_kind):
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind=device_kind, num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
