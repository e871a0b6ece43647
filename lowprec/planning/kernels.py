"""The properties of a kernel as one row, and the choice among a device's kernels.

The rows are in ``kernel_rows.py`` of each backend, which passes them in with the capabilities of a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, unique
from typing import TYPE_CHECKING, NamedTuple

from lowprec.errors import UnsupportedError
from lowprec.formats import FLOAT32, FLOAT64, DType, NumberFormat
from lowprec.planning.layout import GemmLayout
from lowprec.planning.reasons import Reason, ReasonKind
from lowprec.planning.tensor_cores import float64_cost, tensor_cores_multiply

if TYPE_CHECKING:
    from lowprec.architectures import Architecture

#: The format of products of integers.
INT8 = "int8"


def format_name(fmt: NumberFormat | None) -> str:
    """Return the name of the multiplied numbers: a format's, or ``"int8"``."""
    return INT8 if fmt is None else fmt.name


@unique
class Summation(Enum):
    """How a kernel adds its products up; ``planning.bounds`` has the model of each."""

    SEQUENTIAL = "each product rounded into the sum"
    TILES = "bfloat16 tile instructions"
    PAIRS = "bfloat16 vector instructions, pairs of products"
    TENSOR_CORES = "tensor cores"


class KernelRow(NamedTuple):
    """What one kernel is, needs and costs."""

    name: str
    units: str  # the units it runs on, for people
    executor: str  # function from a plan to its executor, as "module:function"
    blas: str = ""  # the product of arrays, for an executor of several kernels, as "module:name"
    micro_kernel: str = ""  # the product of packed operands, as "module:name"
    formats: frozenset[str] | None = None  # formats it multiplies, by `format_name`; None for any
    requires: str | None = None  # feature that the device must have
    missing: str = ""  # reason where the device lacks it; "no" and the units by default
    instruction_sets: tuple[str, ...] = ()  # beyond the common ones, as the system calls them
    cost_per_flop: float = 1.0  # time; 1 is FP32 on the same device
    costs: tuple[tuple[str, float], ...] = ()  # of the formats that differ, on tensor cores
    cost_per_element: float = 0.0  # of rounding one element of an operand, in flops
    cost_per_byte: float = 0.0  # of moving one byte of a temporary array, in flops
    summation: Summation = Summation.SEQUENTIAL
    parts: int = 1  # bfloat16 parts whose exact sum each operand is
    products_per_complex: int = 1  # real products that a complex one becomes
    reads_any_strides: bool = False  # no operand is copied because of its strides
    holds_in: DType | None = None  # wider type of rounded operands; None: stored as rounded
    single_product: bool = False  # runs schedules of one product only
    sums_products: bool = False  # runs schedules of several products only
    concatenates: bool = False  # products of parts run as one, the parts side by side
    real_only: bool = False  # runs no product of complex numbers
    vectors: range | None = None  # runs products of a matrix and so many vectors only
    is_cublaslt: bool = False  # a call of cuBLASLt, which the plan describes
    cuts_tf32: bool = False  # float32 data may be cut to TF32 instead of rounded
    keeps_b: bool = False  # whether it keeps its packed form of a prepared operand
    emulates: Architecture | None = None  # whose tensor cores it imitates, bit by bit
    fallback: ReasonKind | None = None  # operands that it leaves to the next kernel of the device
    # Below these it costs more than it saves; elements are those of a, b and the result.
    minimum_elements: int = 0  # of each product of a batch, unless its flops decide
    minimum_elements_complex: int = 0
    minimum_k: int = 0
    minimum_mn: int = 0  # of both m and n
    is_shallow: bool = False  # k is at most m and n
    minimum_extent_complex: int = 0  # least of m, n and k
    minimum_batch_flops: int = 0  # of each product of a batch
    minimum_batch_flops_vector: int | None = None  # of a matrix and a vector, if another
    minimum_batch_flops_complex: int | None = None  # of matrices of complex numbers, if another

    @property
    def shares_sums(self) -> bool:
        """Whether products of parts share their sums, all over the same k in one pass."""
        return self.sums_products and self.summation is not Summation.SEQUENTIAL

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a device, passed in by its backend."""

    device: str  # "cpu" or "cuda:0"
    name: str  # its model, for people
    kernels: tuple[KernelRow, ...] = field(hash=False)  # preferred first; the last has no requirements
    features: frozenset[str] = frozenset()  # of device and libraries, as `KernelRow.requires` says
    flops_per_byte: float = 16.0  # peak rate over memory bandwidth
    compute_capability: tuple[int, int] | None = None  # of an NVIDIA GPU: major, minor
    workspace_bytes: int = 0  # temporary memory that cuBLASLt may use
    peak_tflops: tuple[tuple[str, float], ...] = ()  # by format ("bfloat16"), where it is known
    bytes_per_second: float = 0.0  # of its memory, where it is known
    source: str = ""  # of the figures, where the device was not asked and its plans are predictions

    @property
    def predicted(self) -> bool:
        """Whether these are the figures of a model that need not be there."""
        return bool(self.source)

    @property
    def has_float8(self) -> bool:
        """Whether the tensor cores multiply FP8."""
        return tensor_cores_multiply("float8_e4m3fn", self.compute_capability)

    def tensor_cores_of(self, kernel: KernelRow) -> tuple[int, int] | None:
        """Return the compute capability of those that sum on a kernel, or are emulated; None where there are none."""
        return kernel.emulates.capability if kernel.emulates else self.compute_capability

    def cost_per_flop(self, kernel: KernelRow, fmt: str) -> float:
        """Return the cost of a flop on a kernel of this device, in numbers of this format."""
        if fmt == FLOAT64.name:
            rates = dict(self.peak_tflops)
            single, double = rates.get(FLOAT32.name), rates.get(fmt)
            known = single / double if single and double else None
            return kernel.cost_per_flop * (known or float64_cost(self.compute_capability))
        cost = dict(kernel.costs).get(fmt)
        if cost is None or not tensor_cores_multiply(fmt, self.compute_capability):
            return kernel.cost_per_flop
        return cost


class KernelChoice(NamedTuple):
    """A kernel, why preferred ones were passed over, and the fallback for operands that it refuses."""

    kernel: KernelRow
    passed_over: tuple[Reason, ...] = ()
    fallback: KernelRow | None = None


def choose_kernel(
    fmt: str,
    capabilities: Capabilities,
    layout: GemmLayout,
    *,
    is_complex: bool = False,
    products: int = 1,
    is_chunked: bool = False,
) -> KernelChoice:
    """Return the first kernel of a device that can run the product and pays at this size.

    Raises ``UnsupportedError`` if there is none. ``fmt`` is the format of the operands, by :func:`format_name`;
    ``products`` the length of the schedule; ``is_chunked`` whether some of them are over a piece of k.
    """
    passed_over: list[Reason] = []
    chosen: KernelRow | None = None
    for row in capabilities.kernels:
        if row.formats is not None and fmt not in row.formats:
            continue
        if row.real_only and is_complex:
            continue
        if row.vectors and min(layout.m, layout.n) not in row.vectors:
            continue
        if row.sums_products and products == 1:
            continue
        reason = _unsupported_reason(row, capabilities, layout, is_complex, products, is_chunked)
        if reason is not None:
            if chosen is None and reason not in passed_over:
                passed_over.append(reason)
        elif chosen is not None:
            if not row.blas:
                continue
            return KernelChoice(chosen, tuple(passed_over), fallback=row)
        elif row.fallback is None:
            return KernelChoice(row, tuple(passed_over))
        else:
            chosen = row
    why = f" ({'; '.join(map(str, passed_over))})" if passed_over else ""
    raise UnsupportedError(
        f"no kernel for {capabilities.device} runs this product of {fmt} numbers{why}; choose another math mode or "
        "dtype"
    )


def _unsupported_reason(
    row: KernelRow, capabilities: Capabilities, layout: GemmLayout, is_complex: bool, products: int, is_chunked: bool
) -> Reason | None:
    """Return why this kernel does not run the product, None if it does.

    Tile kernels pay by the elements to touch, even of a matrix and a vector: packing converts in the same pass.
    """
    m, n, k = layout.m, layout.n, layout.k
    elements = m * k + k * n + m * n
    if row.requires is not None and row.requires not in capabilities.features:
        return Reason.of(ReasonKind.REQUIREMENT_NOT_MET, missing=row.missing or f"no {row.units}")
    if products > 1 and row.single_product:
        return Reason.of(ReasonKind.SINGLE_PRODUCT, kernel=row.name, products=products)
    if is_chunked and row.shares_sums:
        return Reason.of(ReasonKind.OWN_CHUNKS, kernel=row.name)
    flops, least = 2 * m * n * k, row.minimum_batch_flops
    if is_complex and row.minimum_batch_flops_complex is not None:
        least = row.minimum_batch_flops_complex
    if min(m, n) == 1 and row.minimum_batch_flops_vector is not None:
        least = row.minimum_batch_flops_vector
    minimum = row.minimum_elements_complex if is_complex else row.minimum_elements
    if layout.batch_count > 1 and least and not is_complex:
        minimum = 0
    if elements < minimum:
        return Reason.of(ReasonKind.TOO_FEW_ELEMENTS, kernel=row.name, minimum=minimum, elements=elements)
    if layout.batch_count > 1 and flops < least:
        return Reason.of(ReasonKind.TOO_SMALL_PRODUCTS, units=row.units, minimum=least, flops=flops)
    extent = row.minimum_extent_complex if is_complex else row.minimum_k
    if (min(m, n, k) if is_complex else k) < extent:
        return Reason.of(ReasonKind.TOO_SMALL_EXTENT, kernel=row.name, minimum=extent)
    if min(m, n) < row.minimum_mn:
        return Reason.of(ReasonKind.TOO_FEW_ROWS_OR_COLUMNS, kernel=row.name, minimum=row.minimum_mn)
    if row.is_shallow and k > min(m, n):
        return Reason.of(ReasonKind.TOO_DEEP, kernel=row.name, k=k)
    return None
