"""The arithmetic of a tensor core on numbers of one format, and the kernels that emulate it, as data."""

from __future__ import annotations

import functools
from typing import NamedTuple

from lowprec.architectures import Architecture
from lowprec.backends.cpu.kernel_rows import NUMPY
from lowprec.errors import UnsupportedError
from lowprec.formats import BFLOAT16, FLOAT16, TF32, NumberFormat
from lowprec.planning import KernelRow, Summation
from lowprec.planning.tensor_cores import accumulation

#: Formats that are emulated, by name.
FORMATS: dict[str, NumberFormat] = {fmt.name: fmt for fmt in (FLOAT16, BFLOAT16, TF32)}


class Arithmetic(NamedTuple):
    """How ``c + a_1 b_1 + ... + a_g b_g`` is computed for one group of ``g`` products.

    1. The products are exact. The exponent of one is the sum of its factors' exponents, where a subnormal factor has
       that of the smallest normal number: it is not normalised.
    2. The nonzero terms, c among them, are aligned to the largest of their exponents, at least ``least_exponent``: bits
       more than ``fraction_bits`` below it are cut off.
    3. The remaining sum is exact and rounded toward zero to float32, subnormal numbers included; infinite beyond the
       largest float32. An exact zero is +0.

    A NaN in a product or in c, infinities of both signs, and an infinity times zero give the NaN 0x7fffffff.
    """

    group: int
    fraction_bits: int
    least_exponent: int
    emin: int  # exponent of the smallest normal number of the factors' format


def formats_of(architecture: Architecture) -> tuple[str, ...]:
    """Return the names of the formats that are emulated for an architecture.

    Examples
    --------
    >>> formats_of(Architecture.VOLTA), formats_of(Architecture.HOPPER)
    (('float16',), ('float16', 'bfloat16', 'tf32'))
    """
    return tuple(name for name in FORMATS if accumulation(name, architecture.capability))


@functools.cache
def arithmetic(architecture: Architecture, fmt: str) -> Arithmetic:
    """Return the arithmetic of an architecture's tensor cores on numbers of a format, by its name.

    Raises UnsupportedError if they do not multiply such numbers.

    Examples
    --------
    >>> arithmetic(Architecture.AMPERE, "float16")
    Arithmetic(group=8, fraction_bits=24, least_exponent=-132, emin=-14)
    """
    model = accumulation(fmt, architecture.capability) if fmt in FORMATS else None
    if model is None:
        raise UnsupportedError(
            f"the tensor cores of {architecture.label} do not multiply {fmt} numbers; emulated are: "
            f"{', '.join(formats_of(architecture))}"
        )
    return Arithmetic(model.group, model.fraction_bits, model.least_exponent, FORMATS[fmt].emin)


_BLAS = "lowprec.backends.cpu.emulation.products"


def kernels(architecture: Architecture) -> tuple[KernelRow, ...]:
    """Return the kernels of an architecture.

    Examples
    --------
    >>> [row.name for row in kernels(Architecture.HOPPER)]
    ['hopper_float16', 'hopper_bfloat16', 'hopper_tf32']
    """
    return tuple(_kernel(architecture, fmt) for fmt in formats_of(architecture))


def _kernel(architecture: Architecture, fmt: str) -> KernelRow:
    model = arithmetic(architecture, fmt)
    return NUMPY._replace(
        name=f"{architecture}_{fmt}",
        units=(
            f"{architecture.label}'s tensor cores, imitated bit by bit: groups of {model.group} products, "
            f"{model.fraction_bits} fraction bits, rounded toward zero"
        ),
        executor=f"{_BLAS}:prepare",
        blas=f"{_BLAS}:{architecture}_{fmt}",
        formats=frozenset({fmt}),
        summation=Summation.TENSOR_CORES,
        emulates=architecture,
        # 512 x 512 x 512 with numba, one thread against one of numpy.matmul.
        cost_per_flop=4.0,
    )
