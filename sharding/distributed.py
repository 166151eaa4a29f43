"""Several processes that run one program.

They start only when asked: `start(detect=True)`, where JAX finds SLURM, Open MPI or Kubernetes by
their environment, or `start(coordinator=..., processes=..., process_id=...)`, which reads none of
it. Otherwise the environment means nothing here: RANK, WORLD_SIZE, OMPI_* and SLURM_* left over
from a launcher do not make a program distributed, and nothing in routing or in the model asks how
many processes there are.
"""

import contextlib
import sys
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gptoss_jax.sharding.mesh import is_shared

# A dead peer is noticed after this long. JAX's own default is 100 s.
HEARTBEAT_S = 30
_MESSAGE_BYTES = 4096


class PeerError(ValueError):
    """Another process failed; the text is that process's own."""


def start(
    *,
    detect: bool = False,
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    heartbeat_s: int = HEARTBEAT_S,
    connect_s: int = 300,
) -> bool:
    """Joins the other processes, before anything touches a device. Nothing asked: does nothing.

    detect: let JAX read SLURM's, Open MPI's or Kubernetes' environment. coordinator: HOST:PORT of
    process 0, with how many `processes` there are and which this is; the environment is not read.
    heartbeat_s: a process that dies, or that fails while others wait for it, ends all of them
    with an error within about twice this many seconds. connect_s: how long to wait for the others
    to start. Returns whether processes were joined. Raises ValueError for a triple that is
    incomplete, mixed
    with `detect`, or out of range, and where nothing is detected.
    """
    triple = {"coordinator": coordinator, "processes": processes, "process_id": process_id}
    given = [name for name, value in triple.items() if value is not None]
    if not given and not detect:
        return False
    if given and detect:
        raise ValueError(f"either detect the cluster or give {', '.join(triple)}; got both.")
    if given and len(given) < len(triple):
        missing = [name for name in triple if name not in given]
        raise ValueError(f"{', '.join(given)} needs {', '.join(missing)} as well.")
    times = {
        "initialization_timeout": connect_s,
        "heartbeat_timeout_seconds": heartbeat_s,
        # A process that fails waits here for the others before it leaves them.
        "shutdown_timeout_seconds": heartbeat_s,
    }
    if given:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"coordinator is HOST:PORT; got {coordinator!r}.")
        if processes < 1 or not 0 <= process_id < processes:
            raise ValueError(
                f"process_id must lie in 0..processes - 1; got {process_id} of {processes}."
            )
        # "deactivate": JAX would otherwise take the local devices from SLURM's environment.
        jax.distributed.initialize(
            coordinator, processes, process_id, cluster_detection_method="deactivate", **times
        )
        return True
    try:
        jax.distributed.initialize(**times)
    except ValueError as error:
        why = str(error).rstrip(".")
        raise ValueError(
            f"JAX detects no cluster here ({why}). Start under srun or mpirun, or give a "
            "coordinator, the number of processes and this process's id."
        ) from error
    return True


def stop() -> None:
    """Waits for the other processes, however long, and leaves them. Alone: does nothing.

    A process that fails and never comes here waits `heartbeat_s` on its way out and ends the rest.
    """
    if jax.distributed.is_initialized():
        multihost_utils.sync_global_devices("gptoss_jax stops")
        jax.distributed.shutdown()


def is_first() -> bool:
    """Whether this process is the one that prints."""
    return jax.process_index() == 0


def say(*values, file=None, **keywords) -> None:
    """`print`, once for all processes."""
    if is_first():
        print(*values, file=sys.stdout if file is None else file, **keywords)


@contextlib.contextmanager
def together(mesh: Mesh | None) -> Iterator[None]:
    """What fails in one of the mesh's processes fails in all, with that one's message.

    For work without collectives, such as reading files: every process of the mesh enters and leaves
    it once, and they exchange what went wrong on leaving. A process that failed raises its own
    error, the others `PeerError` with the same text. Where the mesh lies in one process, and with
    mesh=None, nothing is exchanged.
    """
    if not is_shared(mesh):
        yield
        return
    try:
        yield
    except Exception as error:
        _exchange(mesh, str(error) or type(error).__name__)
        raise
    if (text := _exchange(mesh, "")) is not None:
        raise PeerError(text)


def _exchange(mesh: Mesh, text: str) -> str | None:
    """The first message of any process of the mesh, in the order of its devices."""
    raw = text.encode()[:_MESSAGE_BYTES]
    mine = np.frombuffer(raw.ljust(_MESSAGE_BYTES, b"\0"), np.uint8)[None]
    shape = (mesh.size, _MESSAGE_BYTES)
    cut = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    everyone = jax.make_array_from_callback(shape, cut, lambda index: mine)
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(everyone)
    rows = [bytes(row).rstrip(b"\0") for row in np.asarray(whole)]
    return next((row.decode(errors="replace") for row in rows if row), None)
