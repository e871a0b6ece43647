"""Kernels that imitate tensor cores, as data: one for each format that an architecture's tensor cores multiply."""

from __future__ import annotations

from lowprec.architectures import Architecture
from lowprec.backends.cpu.emulation.arithmetic import arithmetic, formats_of
from lowprec.backends.cpu.kernel_rows import NUMPY
from lowprec.planning import KernelRow, Summation

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
