"""Why a plan is as it is: kinds of reasons, each with its data. Code decides by these; the sentences are for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique


@unique
class ReasonKind(Enum):
    """Kinds of reasons; each value is the sentence, with placeholders for the data."""

    # Why a kernel was passed over.
    REQUIREMENT_NOT_MET = "{missing}"
    SINGLE_PRODUCT = "{kernel} runs one product, here are {products}"
    OWN_CHUNKS = "{kernel} cuts k itself, k_chunk= asks for other pieces"
    TOO_FEW_ELEMENTS = "{kernel} pays from {minimum:,} elements of a, b and the result, here are {elements:,}"
    TOO_SMALL_EXTENT = "{kernel} pays from an inner dimension (complex: m, n and k) of {minimum}"
    TOO_FEW_ROWS_OR_COLUMNS = "{kernel} pays from {minimum} rows and columns of the result"
    TOO_DEEP = "{kernel} pays where m and n are no less than k, which is {k}"
    TOO_SMALL_PRODUCTS = "{units} pays from {minimum:.3g} flops for each product of a batch, these have {flops:.3g}"

    # Operands that a kernel refuses, and the consequence.
    NOT_FINITE_IN_TWO_PARTS = "an Inf or NaN in an operand: FP32 units with the same rounded operands"
    NOT_FINITE_IN_PARTS = "an element that comes out NaN or infinite is computed again, in FP32"

    # Why an operand is rewritten, or copied.
    OTHER_DTYPE = "{dtype} becomes {data}"
    SEVERAL_PARTS = "it is split into parts"
    STRIDES = "BLAS cannot express its strides"
    INNER_CONTIGUOUS = "{data} kernels read it with the inner dimension contiguous"
    READ_IN_STEPS = "{data} kernels read it in steps of {step} bytes"
    OVERLAP = "it overlaps another array"
    EXPORTED_COPY = "{how}"

    # Why the result is staged: computed in temporary memory, from which it is written.
    NOT_WRITTEN_AS = "products of {data} are not written as {out}"
    RESULT_STRIDES = "BLAS cannot express the result's strides"
    WRITTEN_IN_STEPS = "{data} kernels write in steps of {step} bytes"
    SCALED_OPERANDS = "the powers of two that scaled the operands are taken back"
    PADDED_COLUMNS = "columns are padded to multiples of {step}"
    PADDED_ROWS = "rows are padded to {rows}: cuBLASLt has no {data} algorithm for fewer"
    ROWS_ONLY = "{data} kernels write rows"
    REAL_PRODUCT = "the product is made of real numbers"
    SEVERAL_PRODUCTS = "{products} products are summed"
    NO_FUSED_ALGORITHM = "cuBLASLt has no algorithm that adds or activates here"
    ADDEND_DIFFERS = "c has another layout or element type than the result"
    BIAS_NOT_FUSED = "bias is fused for real row-major results, packed, aligned and of their element type"
    ACTIVATION_NOT_FUSED = "{activation} is not fused for {out}"

    # Uses of a prepared operand.
    KEPT = "what the first product in {mode} makes of b is kept for the others"
    PREPARED_FOR_ANOTHER_MODE = "prepared for {prepared}, the mode in force is {mode}: read as any array"
    NOT_KEPT = "{kernel} keeps nothing of b: read as any array"
    NOTHING_TO_KEEP = "{kernel} reads b as it is: nothing to keep"
    TRANSPOSED_RESULT = "b^T is packed as the left operand of a result by columns: read as any array"

    # Why ``rtol`` took a mode, or passed it over.
    EXCLUDED = "excluded by the environment"
    BOUND_TOO_LARGE = "its bound exceeds rtol = {rtol:.3g}"
    BOUND_NEEDS_RANGE = "its bound depends on the data's range: {condition}"
    CHEAPEST = "the cheapest within rtol"
    NO_CHEAPER = "no cheaper than {chosen}"

    # Advice.
    MISALIGNED = "{listing} {verb} of {step}, which tensor cores want of {bits}-bit data: pad"
    SMALL_DIMENSIONS = "{listing} (at most {most}): memory-bound rather than compute-bound"
    LOW_INTENSITY = "{intensity:.3g} flops per byte, the device does {device:.3g}: memory-bound"
    ROUNDING_COSTS_MORE = "rounding the operands costs more than the product: a low-precision mode does not pay here"


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason; ``str`` gives its sentence."""

    kind: ReasonKind
    data: tuple[tuple[str, object], ...] = ()  # by the words of the sentence's template

    @classmethod
    def of(cls, kind: ReasonKind, **data: object) -> Reason:
        """Return the reason of this kind with its data."""
        return cls(kind, tuple(data.items()))

    def __str__(self) -> str:
        data = dict(self.data)
        names = data.get("dimensions")
        if isinstance(names, tuple):
            data["listing"] = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
            data["verb"] = "is not a multiple" if len(names) == 1 else "are not multiples"
        return self.kind.value.format(**data)
