"""Reasons in a plan: an enumeration of kinds with the sentence of each, and the data of one reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique


@unique
class ReasonKind(Enum):
    """Kinds of reasons; each value is the sentence, with placeholders for the data."""

    # Reasons against a preferred kernel.
    REQUIREMENT_NOT_MET = "{missing}"
    OWN_CHUNKS = "{kernel} sets its own chunks of k and does not support k_chunk="

    # Operands that a kernel does not support, and their treatment.
    NOT_FINITE_IN_PARTS = "NaN and infinite elements of the result are recomputed in FP32"

    # Why an operand is packed or copied.
    OTHER_DTYPE = "{dtype} is converted to {data}"
    SEVERAL_PARTS = "it is split into parts"
    STRIDES = "BLAS cannot express its strides"
    INNER_CONTIGUOUS = "{data} kernels need a contiguous inner dimension"
    READ_IN_STEPS = "{data} kernels need an alignment of {step} bytes"
    QUANTIZED = "a kernel quantises it"
    PADDED_K = "{data} kernels multiply k in multiples of {step}"
    OVERLAP = "it overlaps another array"

    # Why block-scaled operands are widened.
    OTHER_BLOCKS = (
        "cuBLASLt multiplies two operands of one block-scaled format, {formats}, not {a} and {b}"
    )
    NO_BLOCK_SCALES = "block-scaled formats need tensor cores of compute capability 10.0"
    NOT_ONE_PRODUCT_OF_BLOCKS = (
        "cuBLASLt multiplies block-scaled operands with blocks along k, in one product"
    )
    BLOCK_EXTENTS = "{data} kernels need m and n in multiples of {step}, and k of {k_step}"
    EXPORTED_COPY = "{how}"
    WIDENED = "its {format} numbers are widened to {dtype} in each product"

    # Why the result is staged: written to temporary memory first.
    NOT_WRITTEN_AS = "cuBLASLt does not write products of {data} as {out}"
    RESULT_STRIDES = "BLAS cannot express the result's strides"
    WRITTEN_IN_STEPS = "{data} kernels write with an alignment of {step} bytes"
    SCALED_OPERANDS = "the scales of the operands are undone"
    PADDED_COLUMNS = "columns are padded to multiples of {step}"
    PADDED_ROWS = "rows are padded to {rows}: cuBLASLt has no {data} algorithm for fewer"
    ROWS_ONLY = "{data} kernels write row-major results only"
    REAL_PRODUCT = "complex operands are multiplied as real matrices"
    SEVERAL_PRODUCTS = "{products} products are summed"
    NO_FUSED_ALGORITHM = "cuBLASLt has no algorithm with this epilogue"
    ADDEND_DIFFERS = "c and the result differ in layout or element type"
    BIAS_NOT_FUSED = (
        "bias is fused only if contiguous, aligned, real, and of the type of a row-major result; for nvfp4 only "
        "with an activation"
    )
    ACTIVATION_NOT_FUSED = "{activation} is not fused for {out}"

    # Use of a prepared operand.
    KEPT = "the first product in {mode} keeps its packed b for later ones"
    PREPARED_FOR_ANOTHER_MODE = (
        "prepared for {prepared}, but the mode is {mode}: read as an ordinary array"
    )
    CODES_READ = "{kernel} decodes its codes as it multiplies; those along k are kept in its order"
    SCALES_KEPT = (
        "the first product keeps its scales in the order of cuBLASLt; the codes are read in place"
    )
    NOT_KEPT = "{kernel} does not keep its packed b: read as an ordinary array"
    NOTHING_TO_KEEP = "{kernel} reads b in place: nothing to keep"

    # Use of a 2:4 sparse operand.
    SPARSE = "cuSPARSELt multiplies at most half of b, which takes {share:.4g} of its bytes in addition, compressed"
    ZEROS_MULTIPLIED = (
        "{kernel} multiplies the zeros of b like other numbers: the same cost as a dense b"
    )
    DENSE_PRODUCT = "a dense product, as without sparsity: {why}"
    NO_SPARSE_UNITS = "sparse tensor cores need compute capability 8.0, here {capability}"
    SPARSE_PACKED = "cuSPARSELt multiplies b as it is stored: store float16, bfloat16, or int8 in column-major order"
    SPARSE_TYPES = "cuSPARSELt is not used for {a} by {b} into {out}"
    SPARSE_CALLS = "cuSPARSELt is used for one row-major product without a batch, with alpha, beta c and a bias alone"
    SPARSE_EXTENTS = "cuSPARSELt needs {name} in multiples of {step}, here {shape} with leading dimension {leading}"

    # Why ``rtol`` chose or rejected a mode.
    TOLERANCE = "limits the {bound} bound to {rtol:.3g}; bound={other!r} would choose {choice}"
    EXCLUDED = "excluded by the environment"
    BOUND_TOO_LARGE = "its bound exceeds rtol = {rtol:.3g}"
    BOUND_NEEDS_RANGE = "its bound depends on the data's range: {condition}"
    CHEAPEST = "the cheapest within rtol"
    NO_CHEAPER = "no cheaper than {chosen}"

    # Advice.
    MISALIGNED = "{listing} {verb} of {step}, as tensor cores prefer for {bits}-bit data: pad"
    SMALL_DIMENSIONS = "{listing} (at most {most}): memory-bound rather than compute-bound"
    LOW_INTENSITY = "{intensity:.3g} flops per byte, below the device's {device:.3g}: memory-bound"
    ROUNDING_COSTS_MORE = (
        "rounding the operands costs more than the product: a low-precision mode is slower here"
    )


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason; ``str`` returns its sentence."""

    kind: ReasonKind
    data: tuple[tuple[str, object], ...] = ()  # values of the sentence's placeholders

    @classmethod
    def of(cls, kind: ReasonKind, **data: object) -> Reason:
        return cls(kind, tuple(data.items()))

    def __str__(self) -> str:
        data = dict(self.data)
        names = data.get("dimensions")
        if isinstance(names, tuple):
            *first, last = names
            data["listing"] = last
            data["verb"] = "is not a multiple"
            if first:
                data["listing"] = f"{', '.join(first)} and {last}"
                data["verb"] = "are not multiples"
        return self.kind.value.format(**data)
