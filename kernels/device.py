"""Which device kernels are for: the one that is here, or one that they are compiled ahead for."""

import contextlib
import contextvars

import jax

# The kind of GPU that kernels are compiled ahead for, and the device that a mesh names.
_ahead = contextvars.ContextVar("kernels_compiled_ahead_for", default=None)
_placed = contextvars.ContextVar("kernels_placed_on", default=None)


@contextlib.contextmanager
def placed_on(mesh: jax.sharding.Mesh | None):
    """Inside, kernels are chosen for the mesh's devices: a host with a GPU may mesh its CPUs."""
    token = _placed.set(None if mesh is None else mesh.devices.flat[0])
    try:
        yield
    finally:
        _placed.reset(token)


def here():
    """The device that computes: the mesh's first, `jax.default_device`, or the first of all."""
    default = jax.config.jax_default_device
    if isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    return _placed.get() or default or jax.local_devices()[0]


def nvidia() -> bool:
    """Whether computations run on an NVIDIA GPU."""
    if _ahead.get() is not None:
        return True
    return here().platform == "gpu" and "NVIDIA" in here().device_kind


def capability() -> str:
    """The compute capability of the NVIDIA GPU that computes, such as "9.0"."""
    if (kind := _ahead.get()) is not None:
        hopper = any(name in kind for name in ("H100", "H200", "H800", "H20", "GH200"))
        return "9.0" if hopper else "8.0"
    return here().compute_capability


def require_nvidia(what: str) -> None:
    """Raises NotImplementedError for a kernel that was asked for by name and cannot run here."""
    if not nvidia():
        raise NotImplementedError(
            f"{what} needs an NVIDIA GPU; this is {here().device_kind}. Use backend='xla'."
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
