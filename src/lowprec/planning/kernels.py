"""Which kernel runs a product: cuBLASLt on a GPU; on the CPU a preference per kind of numbers, and what each needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from typing import Literal

from lowprec.planning.layout import GemmLayout

__all__ = ["Capabilities", "Kernel", "KernelChoice", "choose_kernel"]


@unique
class Kernel(str, Enum):
    """How a product is computed."""

    AMX_BF16 = "amx_bf16"  # lowprec's tile kernel, one bfloat16 product
    AMX_BF16_PAIR = (
        "amx_bf16_pair"  # values as the exact sum of two bfloat16 parts, four tile products
    )
    AMX_INT8 = "amx_int8"  # lowprec's tile kernel for int8
    MKL = "mkl"  # cblas_?gemm on the rounded operands
    NUMPY = "numpy"  # numpy.matmul on the rounded operands
    CUBLASLT = "cublaslt"  # cublasLtMatmul on a GPU

    def __str__(self) -> str:
        return self.value

    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device can do; whoever asked the device passes it in.

    Parameters
    ----------
    device : str
        Kind of the device, ``"cpu"`` or ``"cuda:0"``.
    name : str
        Its model, for people.
    amx_bf16, amx_int8 : bool
        Whether lowprec's tile kernels run: the CPU has the units, the system grants them, and the compiler is there.
    mkl, numba : bool
        Whether these libraries are loaded.
    amx_minimum_elements, amx_complex_minimum_elements : int
        Elements of a, b and the result of one product (of a batch, each) below which a tile kernel costs more than it
        saves, where they are real and where they are complex.
    mkl_batch_minimum_flops : int
        Flops of each product of a batch below which NumPy's own loop over the batch beats one call of MKL for each.
    flops_per_byte : float
        Peak rate over memory bandwidth: products of lower arithmetic intensity wait for memory.
    compute_capability : tuple of int or None
        Of a GPU, (major, minor); None for a CPU.
    workspace_bytes : int
        Temporary memory that cuBLASLt may use.
    peak_tflops : tuple of (str, float)
        Highest rate of the device by the format of what is multiplied (``"bfloat16"``), for the formats where it is
        known.
    """

    device: str
    name: str
    amx_bf16: bool = False
    amx_int8: bool = False
    mkl: bool = False
    numba: bool = False
    amx_minimum_elements: int = 20_000
    amx_complex_minimum_elements: int = 100_000
    mkl_batch_minimum_flops: int = 3_000_000
    flops_per_byte: float = 16.0
    compute_capability: tuple[int, int] | None = None
    workspace_bytes: int = 0
    peak_tflops: tuple[tuple[str, float], ...] = ()

    @property
    def is_gpu(self) -> bool:
        """Whether cuBLASLt computes here."""
        return self.compute_capability is not None

    @property
    def has_float8(self) -> bool:
        """Whether the tensor cores multiply FP8: compute capability 8.9, 9.0 and later."""
        return self.compute_capability is not None and self.compute_capability >= (8, 9)


#: What is multiplied: the operands' format once rounded.
NumberKind = Literal["float64", "float32", "tf32", "bfloat16", "float16", "int8"]


@dataclass(frozen=True, slots=True)
class KernelRow:
    """What one kernel is and what it needs.

    Parameters
    ----------
    requires : str or None
        Attribute of :class:`Capabilities` that must be true.
    units : str
        What it runs on, for people.
    missing : str
        What to say where the requirement is not met.
    """

    requires: str | None
    units: str
    missing: str


KERNELS: dict[Kernel, KernelRow] = {
    Kernel.AMX_BF16: KernelRow(
        "amx_bf16", "bfloat16 tile units (AMX)", "no bfloat16 tile units (AMX)"
    ),
    Kernel.AMX_BF16_PAIR: KernelRow(
        "amx_bf16",
        "bfloat16 tile units (AMX), on the exact sum of two bfloat16 parts",
        "no bfloat16 tile units (AMX)",
    ),
    Kernel.AMX_INT8: KernelRow("amx_int8", "int8 tile units (AMX)", "no int8 tile units (AMX)"),
    Kernel.MKL: KernelRow("mkl", "MKL", "MKL is not installed"),
    Kernel.NUMPY: KernelRow(None, "NumPy's BLAS", ""),
}

#: Kernels per kind of numbers, the most welcome first; the last one needs nothing.
PREFERENCES: dict[NumberKind, tuple[Kernel, ...]] = {
    "float64": (Kernel.MKL, Kernel.NUMPY),
    "float32": (Kernel.MKL, Kernel.NUMPY),
    "tf32": (Kernel.AMX_BF16_PAIR, Kernel.MKL, Kernel.NUMPY),
    "float16": (Kernel.AMX_BF16_PAIR, Kernel.MKL, Kernel.NUMPY),
    "bfloat16": (Kernel.AMX_BF16, Kernel.MKL, Kernel.NUMPY),
    "int8": (Kernel.AMX_INT8, Kernel.MKL, Kernel.NUMPY),
}

#: Kernels that read operands at any strides, so that no operand is copied for them.
READS_ANY_STRIDES = frozenset({Kernel.AMX_BF16, Kernel.AMX_BF16_PAIR, Kernel.AMX_INT8})

#: Kernels that multiply bfloat16 parts, and into how many parts each operand goes.
PARTS: dict[Kernel, int] = {Kernel.AMX_BF16_PAIR: 2}

#: What happens at run time to operands that the chosen kernel cannot treat.
FALLBACKS: dict[Kernel, tuple[str, ...]] = {
    Kernel.AMX_BF16_PAIR: (
        "an Inf or NaN in an operand: FP32 units with the same rounded operands",
    ),
}

_INT32_MAX = 2**31 - 1

# Below these, most of what the tile kernel does is padding: the least inner dimension of a real product, and the least
# of m, n and k of a complex one.
_MINIMUM_EXTENTS = {False: 16, True: 64}


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A kernel, and why it and not a faster one."""

    kernel: Kernel
    reason: str


def choose_kernel(
    kind: NumberKind, capabilities: Capabilities, layout: GemmLayout, *, is_complex: bool = False
) -> KernelChoice:
    """Return the first kernel of the table that the device has and that pays at this size.

    Parameters
    ----------
    kind : str
        What is multiplied, a key of ``PREFERENCES``.
    capabilities : Capabilities
    layout : GemmLayout
    is_complex : bool
        Whether the operands are complex, which tile kernels take as four real products.

    Examples
    --------
    >>> from lowprec.formats import DType
    >>> from lowprec.planning.layout import OperandSpec, gemm_layout
    >>> square = OperandSpec.contiguous(DType.FLOAT32, (8, 8))
    >>> choose_kernel("tf32", Capabilities("cpu", "any"), gemm_layout(square, square)).reason
    "NumPy's BLAS; no bfloat16 tile units (AMX); MKL is not installed"
    """
    if capabilities.is_gpu:
        return KernelChoice(Kernel.CUBLASLT, "the arrays are on a GPU")
    passed_over: list[str] = []
    for kernel in PREFERENCES[kind]:
        objection = _objection(kernel, capabilities, layout, is_complex)
        if not objection:
            return KernelChoice(kernel, "; ".join([KERNELS[kernel].units, *passed_over]))
        passed_over.append(objection)
    raise AssertionError(f"no kernel without requirements for {kind}")


def _objection(
    kernel: Kernel, capabilities: Capabilities, layout: GemmLayout, is_complex: bool
) -> str:
    """Return why this kernel does not run the product, empty if it does."""
    row = KERNELS[kernel]
    if row.requires and not getattr(capabilities, row.requires):
        return row.missing
    if kernel in READS_ANY_STRIDES:
        return _objection_to_tiles(kernel, capabilities, layout, is_complex)
    if kernel is Kernel.MKL:
        return _objection_to_mkl(capabilities, layout)
    return ""


def _objection_to_tiles(
    kernel: Kernel, capabilities: Capabilities, layout: GemmLayout, is_complex: bool
) -> str:
    """Tiles pay by the elements to touch, even of a matrix and a vector: packing converts in the same pass."""
    m, n, k = layout.m, layout.n, layout.k
    elements = m * k + k * n + m * n
    minimum = capabilities.amx_minimum_elements
    if is_complex:
        minimum = capabilities.amx_complex_minimum_elements
    if elements < minimum:
        return (
            f"{kernel} pays from {minimum:,} elements of a, b and the result, here are {elements:,}"
        )
    extent = _MINIMUM_EXTENTS[is_complex]
    if min(m, n, k) < extent and (is_complex or k < extent):
        return f"{kernel} pays from an inner dimension (complex: m, n and k) of {extent}"
    return ""


def _objection_to_mkl(capabilities: Capabilities, layout: GemmLayout) -> str:
    if _exceeds_32_bits(layout):
        return "MKL counts rows, columns and leading dimensions with 32 bits"
    each, minimum = 2 * layout.m * layout.n * layout.k, capabilities.mkl_batch_minimum_flops
    if layout.batch_count > 1 and each < minimum:
        return (
            f"MKL pays from {minimum:.3g} flops for each product of a batch, these have {each:.3g}"
        )
    return ""


def _exceeds_32_bits(layout: GemmLayout) -> bool:
    sizes = [layout.m, layout.n, layout.k]
    sizes += [o.leading_dimension or 0 for o in (layout.a, layout.b, layout.out)]
    return max(sizes) > _INT32_MAX


def flops_per_conversion(kernel: Kernel) -> float:
    """Return what rounding one element for this kernel costs, in flops of numpy.matmul on float32.

    Measured on two threads, where that does 3.7e11 flops a second: tile kernels round and pack 2.8e9 elements a
    second (a row times a matrix), and NumPy rounds 1.3e9 for the others. A GPU writes and reads the bytes: 4 of float32
    and twice 2 of a 16-bit type, at some 13 FP32 flops each.
    """
    if kernel is Kernel.CUBLASLT:
        return 100.0
    return 130.0 if kernel in READS_ANY_STRIDES else 300.0
