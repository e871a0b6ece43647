"""The arithmetic of a tensor core on numbers of one format, and the kernels that emulate it, as data."""

from __future__ import annotations

import functools

from lowprec.architectures import Emulated
from lowprec.backends.cpu.kernel_rows import NUMPY
from lowprec.errors import UnsupportedError
from lowprec.formats import BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT16, TF32, NumberFormat
from lowprec.planning import KernelRow
from lowprec.planning.tensor_cores import BLOCK_KINDS, Accumulation, accumulation

#: Formats that are emulated, by name.
FORMATS: dict[str, NumberFormat] = {
    fmt.name: fmt for fmt in (FLOAT16, BFLOAT16, TF32, FLOAT8_E4M3FN, FLOAT8_E5M2)
}


def formats_of(architecture: Emulated, *more: str) -> tuple[str, ...]:
    return tuple(name for name in (*FORMATS, *more) if accumulation(name, architecture.cores))


@functools.cache
def arithmetic(architecture: Emulated, fmt: str) -> Accumulation:
    """Return the arithmetic of an architecture's tensor cores for a format; UnsupportedError if they lack it."""
    model = accumulation(fmt, architecture.cores)
    if model is None:
        raise UnsupportedError(
            f"the tensor cores of {architecture.label} do not support {fmt}; emulated formats: "
            f"{', '.join(formats_of(architecture))}"
        )
    return model._replace(emin=FORMATS.get(fmt, FLOAT8_E5M2).emin)


def kernels(architecture: Emulated) -> tuple[KernelRow, ...]:
    return tuple(_kernel(architecture, fmt) for fmt in formats_of(architecture, *BLOCK_KINDS))


def _kernel(architecture: Emulated, fmt: str) -> KernelRow:
    model = arithmetic(architecture, fmt)
    return NUMPY._replace(
        name=f"{architecture}_{fmt}",
        units=(
            f"{architecture.label}'s tensor cores, emulated bit by bit: groups of {model.group} products, "
            f"{model.fraction_bits} fraction bits, rounded toward zero"
        ),
        formats=frozenset({fmt}),
        summation="tensor_cores",
        imitates=architecture,
        # Measured for 512 x 512 x 512 with AVX-512 against numpy.matmul, one thread each: 6 to 12.
        cost_per_flop=8.0,
    )
