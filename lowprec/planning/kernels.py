"""``KernelRow``, the properties of a kernel, and the choice among a device's kernels.

A backend passes its rows (``kernel_rows.py`` on the CPU) with the capabilities of a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, unique
from typing import TYPE_CHECKING, NamedTuple

from lowprec.errors import UnsupportedError
from lowprec.formats import FLOAT32, FLOAT64, ComputeType, DType, NumberFormat
from lowprec.planning.layout import GemmLayout
from lowprec.planning.reasons import Reason, ReasonKind
from lowprec.planning.tensor_cores import float64_cost, tensor_cores_multiply

if TYPE_CHECKING:
    from lowprec.architectures import Architecture

#: Format name of int8 operands.
INT8 = "int8"


def format_name(fmt: NumberFormat | None) -> str:
    """Return the name of a format; None is ``"int8"``."""
    return INT8 if fmt is None else fmt.name


@unique
class Summation(Enum):
    """How a kernel sums products; ``planning.bounds`` has the error model of each."""

    SEQUENTIAL = "each product rounded into the sum"
    TILES = "bfloat16 tile instructions"
    PAIRS = "bfloat16 vector instructions, pairs of products"
    TENSOR_CORES = "tensor cores"


class KernelRow(NamedTuple):
    """Properties, requirements and costs of one kernel."""

    name: str
    units: str  # description of the hardware units
    executor: str  # function from a plan to its executor, as "module:function"
    blas: str = ""  # GEMM on arrays, for executors of several kernels, as "module:name"
    micro_kernel: str = ""  # GEMM on packed operands, as "module:name"
    formats: frozenset[str] | None = None  # operand formats, by `format_name`; None for any
    requires: str | None = None  # required feature of the device
    missing: str = ""  # reason if the device lacks it; default: "no" and the units
    instruction_sets: tuple[str, ...] = ()  # required, by the operating system's names
    cost_per_flop: float = 1.0  # time relative to FP32 on the same device
    costs: tuple[tuple[str, float], ...] = ()  # ``cost_per_flop`` by format, on tensor cores that support the format
    cost_per_element: float = 0.0  # of rounding one element of an operand, in flops
    cost_per_byte: float = 0.0  # of moving one byte of a temporary array, in flops
    summation: Summation = Summation.SEQUENTIAL
    parts: int = 1  # bfloat16 parts that represent an operand exactly
    products_per_complex: int = 1  # real products per complex product
    reads_any_strides: bool = False  # operands with any strides are read without a copy
    holds_in: DType | None = None  # wider storage type of rounded operands; None: as rounded
    single_product: bool = False  # only for schedules of one product
    sums_products: bool = False  # only for schedules of several products
    concatenates: bool = False  # products of parts run as one, over concatenated parts
    real_only: bool = False  # not for complex numbers
    vectors: range | None = None  # only for a matrix and this many vectors
    is_cublaslt: bool = False  # a call of cuBLASLt
    emulation: ComputeType | None = None  # only for modes that cuBLASLt emulates by this compute type, in one call
    part_format: str = ""  # format of the parts of this emulation, by `format_name`
    part_products: int = 0  # their products per product, if it is known
    truncates_tf32: bool = False  # may truncate float32 data to TF32 instead of rounding
    keeps_b: bool = False  # keeps the packed ``b`` of a prepared operand
    decodes_b: bool = False  # keeps ``b`` of 8- or 4-bit formats as codes, which it decodes while it packs
    emulates: Architecture | None = None  # GPU generation whose tensor cores it emulates bit by bit
    fallback: ReasonKind | None = None  # the unsupported operands, for which the device's next kernel is used
    # Smallest products for which the kernel is used; elements are those of a, b and the result.
    minimum_elements: int = 0  # of each product of a batch, unless the limit is in flops
    minimum_elements_complex: int = 0
    minimum_k: int = 0
    minimum_mn: int = 0  # of both m and n
    is_shallow: bool = False  # only if m and n are at least k
    minimum_extent_complex: int = 0  # of the smallest of m, n and k
    minimum_batch_flops: int = 0  # of each product of a batch
    minimum_batch_flops_vector: int | None = None  # of a matrix and a vector, if it differs
    minimum_batch_flops_complex: int | None = None  # of complex matrices, if it differs

    @property
    def shares_sums(self) -> bool:
        """Whether all products of parts are summed in one pass over k, in the same accumulator."""
        return self.sums_products and self.summation is not Summation.SEQUENTIAL

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a device, passed in by its backend."""

    device: str  # "cpu" or "cuda:0"
    name: str  # name of the model
    kernels: tuple[KernelRow, ...] = field(hash=False)  # in order of preference; the last has no requirements
    features: frozenset[str] = frozenset()  # of device and libraries, for `KernelRow.requires`
    flops_per_byte: float = 16.0  # peak rate divided by memory bandwidth
    compute_capability: tuple[int, int] | None = None  # of an NVIDIA GPU: major, minor
    workspace_bytes: int = 0  # cuBLASLt's workspace
    peak_tflops: tuple[tuple[str, float], ...] = ()  # by format ("bfloat16"), if known
    bytes_per_second: float = 0.0  # memory bandwidth, if known
    source: str = ""  # source of published figures; plans are then predictions

    @property
    def predicted(self) -> bool:
        """Whether the figures are published ones of a model, not those of a device."""
        return bool(self.source)

    @property
    def has_float8(self) -> bool:
        """Whether the tensor cores multiply FP8."""
        return tensor_cores_multiply("float8_e4m3fn", self.compute_capability)

    def tensor_cores_of(self, kernel: KernelRow) -> tuple[int, int] | None:
        """Return the compute capability of the tensor cores that a kernel uses or emulates; None for none."""
        return kernel.emulates.capability if kernel.emulates else self.compute_capability

    def cost_per_flop(self, kernel: KernelRow, fmt: str) -> float:
        """Return the cost of a flop of a kernel of this device for operands of this format."""
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
    """The chosen kernel, the reasons against preferred ones, and the fallback for some operands."""

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
    has_blocks: bool = False,
    decodes_b: bool = False,
    emulation: ComputeType | None = None,
) -> KernelChoice:
    """Return the first kernel of a device that supports the product and is efficient at its size.

    ``fmt`` is the operands' format, by :func:`format_name`, ``products`` the length of the schedule, and ``is_chunked``
    whether some products cover only a part of k. With ``has_blocks`` an operand is quantised, with
    ``decodes_b`` kernels that decode ``b`` are preferred at every size. ``emulation`` is the compute type of the mode's
    emulation. Raises UnsupportedError if no kernel supports the product.
    """
    passed_over: list[Reason] = []
    chosen: KernelRow | None = None
    for row in capabilities.kernels:
        if row.formats is not None and fmt not in row.formats:
            continue
        if (row.real_only and is_complex) or row.emulation not in (None, emulation):
            continue
        if row.vectors and (has_blocks or min(layout.m, layout.n) not in row.vectors):
            continue
        if row.sums_products and products == 1:
            continue
        if decodes_b and row.decodes_b:
            row = row._replace(minimum_elements=0, minimum_batch_flops=0, minimum_mn=0, is_shallow=False)
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
        f"no kernel for {capabilities.device} supports this product of {fmt} numbers{why}; choose another math mode "
        "or dtype"
    )


def _unsupported_reason(
    row: KernelRow, capabilities: Capabilities, layout: GemmLayout, is_complex: bool, products: int, is_chunked: bool
) -> Reason | None:
    """Return the reason against this kernel for the product, None if there is none."""
    m, n, k = layout.m, layout.n, layout.k
    elements = m * k + k * n + m * n
    if row.requires is not None and row.requires not in capabilities.features:
        return Reason.of(ReasonKind.REQUIREMENT_NOT_MET, missing=row.missing or f"no {row.units}")
    if products > 1 and row.single_product:
        return Reason.of(ReasonKind.SINGLE_PRODUCT, kernel=row.name, products=products)
    if is_chunked and (row.shares_sums or row.emulation):
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
