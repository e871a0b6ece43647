"""The arithmetic of a tensor core on numbers of one format, and the kernels that emulate it, as data."""

from __future__ import annotations

import functools
from typing import NamedTuple

from lowprec.architectures import Architecture
from lowprec.backends.cpu.kernel_rows import NUMPY
from lowprec.errors import UnsupportedError
from lowprec.formats import BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT16, TF32, NumberFormat
from lowprec.planning import KernelRow, Summation
from lowprec.planning.tensor_cores import accumulation

#: Formats that are emulated, by name.
FORMATS: dict[str, NumberFormat] = {fmt.name: fmt for fmt in (FLOAT16, BFLOAT16, TF32, FLOAT8_E4M3FN, FLOAT8_E5M2)}


class Arithmetic(NamedTuple):
    """Computation of ``c + a_1 b_1 + ... + a_g b_g`` for one group of ``g`` products.

    1. The products are exact. The exponent of a product is the sum of its factors' exponents; a subnormal factor is not
       normalised and has the exponent of the smallest normal number.
    2. The nonzero terms, including c, are aligned to their largest exponent, at least ``least_exponent``, and truncated
       to ``fraction_bits`` below it.
    3. The sum of these is exact, and rounded toward zero to float32, subnormal numbers included, of which
       ``result_bits`` fraction bits remain; it is infinite beyond the largest float32. An exact zero is +0.
    4. With ``adds_after`` c is not among the terms: it is added to the rounded sum, to nearest.

    A NaN in a product or in c, infinities of both signs, and an infinity times zero give the NaN 0x7fffffff.
    """

    group: int
    fraction_bits: int
    least_exponent: int
    emin: int  # exponent of the smallest normal number of the factors' format
    result_bits: int = 23
    adds_after: bool = False


def formats_of(architecture: Architecture) -> tuple[str, ...]:
    return tuple(name for name in FORMATS if accumulation(name, architecture.capability))


@functools.cache
def arithmetic(architecture: Architecture, fmt: str) -> Arithmetic:
    """Return the arithmetic of an architecture's tensor cores for a format; UnsupportedError if they lack it."""
    model = accumulation(fmt, architecture.capability) if fmt in FORMATS else None
    if model is None:
        raise UnsupportedError(
            f"the tensor cores of {architecture.label} do not support {fmt}; emulated formats: "
            f"{', '.join(formats_of(architecture))}"
        )
    bits, after = model.result_bits, model.adds_after
    return Arithmetic(model.group, model.fraction_bits, model.least_exponent, FORMATS[fmt].emin, bits, after)


def kernels(architecture: Architecture) -> tuple[KernelRow, ...]:
    return tuple(_kernel(architecture, fmt) for fmt in formats_of(architecture))


def _kernel(architecture: Architecture, fmt: str) -> KernelRow:
    model = arithmetic(architecture, fmt)
    return NUMPY._replace(
        name=f"{architecture}_{fmt}",
        units=(
            f"{architecture.label}'s tensor cores, emulated bit by bit: groups of {model.group} products, "
            f"{model.fraction_bits} fraction bits, rounded toward zero"
        ),
        formats=frozenset({fmt}),
        summation=Summation.TENSOR_CORES,
        emulates=architecture,
        # Measured for 512 x 512 x 512 with AVX-512 against numpy.matmul, one thread each: 6 to 12.
        cost_per_flop=8.0,
    )
