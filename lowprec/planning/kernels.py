"""``KernelRow``, the properties of a kernel, and the choice among a device's kernels.

A backend passes its rows (``kernel_rows.py`` on the CPU) with the capabilities of a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from lowprec.errors import UnsupportedError
from lowprec.formats import FLOAT32, FLOAT64, ComputeType, DType, NumberFormat
from lowprec.planning.reasons import Reason, ReasonKind
from lowprec.planning.tensor_cores import Capability, float64_cost, tensor_cores_multiply

if TYPE_CHECKING:
    from lowprec.architectures import Cores, Emulated

#: Format name of int8 operands.
INT8 = "int8"

#: The same of two operands of integers in blocks along k.
BLOCKS = "integers in blocks"
#: Length of the chunks of k in which these are summed, at most.
BLOCKS_CHUNK = 512


def format_name(fmt: NumberFormat | None) -> str:
    """Return the name of a format; None is ``"int8"``."""
    return INT8 if fmt is None else fmt.name


#: How a kernel sums products; ``planning.bounds`` has the error model of each.
Summation: TypeAlias = Literal[
    "sequential",  # each product rounded into the sum
    "tiles",  # bfloat16 tile instructions
    "pairs",  # bfloat16 vector instructions, pairs of products
    "pairs_to_odd",  # the same, rounded to odd
    "tensor_cores",
    "blocks",  # exact sums of blocks, each added with one rounding
]


class KernelRow(NamedTuple):
    """Properties, requirements and costs of one kernel."""

    name: str
    units: str  # description of the hardware units
    formats: frozenset[str] | None = None  # operand formats, by `format_name`; None for any
    requires: str | None = None  # required feature of the device
    missing: str = ""  # reason if the device lacks it; default: "no" and the units
    instruction_sets: tuple[str, ...] = ()  # required, by the operating system's names
    cost_per_flop: float = 1.0  # time relative to FP32 on the same device
    # ``cost_per_flop`` by format, on tensor cores that support the format
    costs: tuple[tuple[str, float], ...] = ()
    cost_per_element: float = 0.0  # of rounding one element of an operand, in flops
    cost_per_byte: float = 0.0  # of moving one byte of a temporary array, in flops
    summation: Summation = "sequential"
    # longest of the chunks in which it sums k, see `planning.schedule.chunk_length`; 0: one chunk
    k_chunk: int = 0
    parts: int = 1  # bfloat16 parts that represent an operand exactly
    products_per_complex: int = 1  # real products per complex product
    packs: bool = False  # packs operands of any strides, and all of their parts at once
    holds_in: DType | None = None  # wider storage type of rounded operands; None: as rounded
    concatenates: bool = False  # products of parts run as one, over concatenated parts
    is_cublaslt: bool = False  # a call of cuBLASLt
    # only for modes that cuBLASLt emulates by this compute type, in one call
    cublas_emulation: ComputeType | None = None
    part_format: str = ""  # format of the parts of this emulation, by `format_name`
    part_products: int = 0  # their products per product, if it is known
    truncates_tf32: bool = False  # may truncate float32 data to TF32 instead of rounding
    keeps_b: bool = False  # keeps the packed ``b`` of a prepared operand
    # formats with blocks whose codes in ``b`` it decodes as it packs, as FP8's
    decodes_b: frozenset[str] = frozenset()
    imitates: Emulated | None = None  # GPU generation whose tensor cores it emulates bit by bit

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a device, passed in by its backend."""

    device: str  # "cpu" or "cuda:0"
    name: str  # name of the model
    # in order of preference; the last has no requirements
    kernels: tuple[KernelRow, ...] = field(hash=False)
    features: frozenset[str] = frozenset()  # of device and libraries, for `KernelRow.requires`
    flops_per_byte: float = 16.0  # peak rate divided by memory bandwidth
    compute_capability: Capability | None = None  # of an NVIDIA GPU: major, minor
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
        return tensor_cores_multiply("float8_e4m3fn", self.compute_capability)

    def tensor_cores_of(self, kernel: KernelRow) -> Cores | None:
        """Return the compute capability of the tensor cores that a kernel uses or emulates; None for none."""
        return kernel.imitates.cores if kernel.imitates else self.compute_capability

    def cost_per_flop(self, kernel: KernelRow, fmt: str) -> float:
        """Return the cost of a flop of a kernel of this device for operands of this format."""
        if fmt == FLOAT64.name:
            rates = dict(self.peak_tflops)
            single = rates.get(FLOAT32.name)
            double = rates.get(fmt)
            known = None
            if single and double:
                known = single / double
            return kernel.cost_per_flop * (known or float64_cost(self.compute_capability))
        cost = dict(kernel.costs).get(fmt)
        if cost is None or not tensor_cores_multiply(fmt, self.compute_capability):
            return kernel.cost_per_flop
        return cost


def choose_kernel(
    fmt: str,
    capabilities: Capabilities,
    *,
    is_chunked: bool = False,
    emulation: ComputeType | None = None,
) -> tuple[KernelRow, tuple[Reason, ...]]:
    """Return the first kernel that supports products of operands of this format, and reasons against preferred ones.

    ``fmt`` is a name by :func:`format_name`, ``is_chunked`` whether the caller divides k, and ``emulation`` the compute
    type of the mode's emulation. Raises UnsupportedError if no kernel supports the product.
    """
    passed_over: list[Reason] = []
    for row in capabilities.kernels:
        is_of_format = row.formats is None or fmt in row.formats
        if not is_of_format or row.cublas_emulation not in (None, emulation):
            continue
        if row.requires is not None and row.requires not in capabilities.features:
            reason = Reason.of(
                ReasonKind.REQUIREMENT_NOT_MET, missing=row.missing or f"no {row.units}"
            )
        elif is_chunked and (row.k_chunk or row.cublas_emulation):
            reason = Reason.of(ReasonKind.OWN_CHUNKS, kernel=row.name)
        else:
            return row, tuple(passed_over)
        if reason not in passed_over:
            passed_over.append(reason)
    why = ""
    if passed_over:
        why = f" ({'; '.join(map(str, passed_over))})"
    raise UnsupportedError(
        f"no kernel for {capabilities.device} supports this product of {fmt} numbers{why}; choose another math mode "
        "or dtype"
    )
