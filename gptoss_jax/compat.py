"""The differences between jax 0.10, 0.11 and 0.12 that this project meets, and nothing else."""

import jax

# (0, 10, 2): the newest for Python 3.11; (0, 11, 2): the GPU machines these kernels were tuned on.
JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
