"""Writes a checkpoint of full size with random values, for measuring loads and decoding.

    python recipes/random_checkpoint.py 20b FOLDER
    python recipes/random_checkpoint.py 120b FOLDER --layers 4

Names, shapes, dtypes, order, cuts and index are the published ones: 20b gives three files of
exactly 4792272488, 4798702184 and 4170342232 bytes. The values are of a model this size:
weights near 1/sqrt(2880), norms near 1, every MXFP4 code, scale bytes 118 to 121.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from gptoss_jax.checkpoint.export import LAYOUT_OF, SHARD, Source, write
from gptoss_jax.checkpoint.names import fills
from gptoss_jax.checkpoint.values import Watch
from gptoss_jax.config import Config

SIZES = {"20b": Config.gpt_oss_20b, "120b": Config.gpt_oss_120b}


class Random:
    """Makes up what it is asked for; the same for the same seed."""

    def __init__(self, config: Config, seed: int = 0):
        self.shapes = {f.param: f.shape for f in fills("hf-mxfp4", config)}
        self.generator = np.random.Generator(np.random.SFC64(seed))
        self.pool = self.generator.integers(0, 2**64, 2**23, dtype=np.uint64).view(np.uint8)

    def __call__(self, param: str, experts: slice) -> np.ndarray:
        full = self.shapes[param]
        shape = (len(range(full[0])[experts]), *full[1:])
        if param.endswith("_blocks"):
            return self._bytes(shape)
        if param.endswith("_scales"):
            return 118 + (self._bytes(shape) & 3)
        # bfloat16 by its bits: random sign and mantissa, a fixed exponent, so 2^e <= |x| < 2^(e+1).
        norm = param.endswith("norm.scale_D")
        bits = self._bytes((*shape[:-1], 2 * shape[-1])).view(np.uint16)
        bits &= 0x007F if norm else 0x807F
        bits |= (127 if norm else 127 - 6) << 7
        return bits.view(ml_dtypes.bfloat16)

    def _bytes(self, shape: tuple[int, ...]) -> np.ndarray:
        """From anywhere in 64 MiB of random bytes: drawing all 13 GB would take a minute."""
        out = np.empty(int(np.prod(shape)), np.uint8)
        for begin in range(0, out.size, self.pool.size // 2):
            part = out[begin : begin + self.pool.size // 2]
            offset = self.generator.integers(self.pool.size // 2)
            part[:] = self.pool[offset : offset + part.size]
        return out.reshape(shape)


def random_checkpoint(config: Config, folder, *, limit: int = SHARD, seed: int = 0) -> Path:
    """A folder in Hugging Face's MXFP4 layout; `limit` bytes of tensors a file."""
    read = Random(config, seed)
    source = Source(
        where="random values",
        config=config,
        packed=True,
        read=read,
        watch=Watch(),
        side=None,
        hf=None,
        stop_tokens=config.eos,
    )
    return write(source, Path(folder), LAYOUT_OF["mxfp4"], limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int, help="fewer (or more) layers than the real model")
    arguments = parser.parse_args()
    config = SIZES[arguments.size]()
    if arguments.layers:
        config = dataclasses.replace(config, layers=arguments.layers, sliding=None)
    start = time.perf_counter()
    folder = random_checkpoint(config, arguments.folder)
    size, seconds = sum(f.stat().st_size for f in folder.iterdir()), time.perf_counter() - start
    print(f"{folder}: {size:,} bytes in {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
