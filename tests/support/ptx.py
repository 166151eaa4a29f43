"""Runs the few PTX instructions of the Mosaic kernel, one thread at a time, on NumPy bits."""

import re

import jax.numpy as jnp
import numpy as np

U32 = 0xFFFFFFFF


def _as_float(bits):
    return np.uint32(bits).view(np.float32)


def _as_bits(value):
    return int(np.float32(value).view(np.uint32))


def _bfloat16(value):
    """Bits of a float32 rounded to nearest even; subnormals stay."""
    return int(np.asarray(value, np.float32).astype(jnp.bfloat16).view(np.uint16))


def _each_half(a, b):
    """mul.rn.bf16x2: both halves multiplied on their own."""
    out = 0
    for shift in (0, 16):
        x, y = (_as_float((v >> shift & 0xFFFF) << 16) for v in (a, b))
        with np.errstate(over="ignore", invalid="ignore"):
            out |= _bfloat16(x * y) << shift
    return out


def _floating(name):
    def run(*bits):
        with np.errstate(all="ignore"):
            return _as_bits(name(*(_as_float(b) for b in bits)))

    return run


def _prmt(a, b, selector):
    both = [a >> s & 255 for s in (0, 8, 16, 24)] + [b >> s & 255 for s in (0, 8, 16, 24)]
    return sum(both[selector >> 4 * i & 7] << 8 * i for i in range(4))


INSTRUCTIONS = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, n: a << n & U32,
    "shr.u32": lambda a, n: a >> n,
    "mov.b32": lambda a: a,
    "prmt.b32": _prmt,
    "mul.lo.u32": lambda a, b: a * b & U32,
    "mad.lo.u32": lambda a, b, c: a * b + c & U32,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.gt.s32": lambda a, b: a > b,
    "selp.b32": lambda a, b, p: a if p else b,
    "mul.rn.bf16x2": _each_half,
    "add.f32": _floating(lambda a, b: a + b),
    "mul.f32": _floating(lambda a, b: a * b),
    "fma.rn.f32": _floating(lambda a, b, c: np.float32(np.float64(a) * np.float64(b) + c)),
    "min.NaN.f32": _floating(np.minimum),
    "max.NaN.f32": _floating(np.maximum),
    "ex2.approx.ftz.f32": _floating(np.exp2),
    "rcp.approx.ftz.f32": _floating(lambda a: np.float32(1) / a),
    "cvt.rn.bf16.f32": lambda a: _bfloat16(_as_float(a)),
    "cvt.rn.bf16x2.f32": lambda a, b: _bfloat16(_as_float(a)) << 16 | _bfloat16(_as_float(b)),
}


def run(text: str, given: dict[str, int], memory: dict[int, int]) -> dict[str, int]:
    """Registers after `text`, from those given by name, over 16-bit memory by byte address."""
    registers = dict(given)

    def value(name):
        if name.startswith("0f"):
            return int(name[2:], 16)
        return int(name, 0) if name[0].isdigit() else registers[name]

    def address(operand):
        base, _, offset = operand.strip("[]").partition("+")
        return registers[base] + int(offset or 0)

    for line in text.strip().strip("{}").split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        if line.startswith("@"):
            predicate, line = line[1:].split(" ", 1)
            if not registers[predicate]:
                continue
        name, rest = line.split(" ", 1)
        operands = re.findall(r"\[[^]]*\]|[$\w]+", rest)
        if name.startswith("ld."):
            *targets, source = operands
            for i, target in enumerate(targets):
                at = address(source) + 4 * i
                registers[target] = memory[at] | memory[at + 2] << 16
        elif name.startswith("st."):
            target, *sources = operands
            for i, source in enumerate(sources):
                at = address(target) + 4 * i
                memory[at] = registers[source] & 0xFFFF
                if not name.endswith("b16"):
                    memory[at + 2] = registers[source] >> 16
        else:
            registers[operands[0]] = INSTRUCTIONS[name](*map(value, operands[1:]))
    return registers
