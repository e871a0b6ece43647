"""``GemmProblem``: a product as a value, and checks of its element types and epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowprec.errors import DTypeError, ShapeError, UnsupportedError
from lowprec.formats import (
    FLOAT8_E4M3FN,
    FLOAT8_E8M0FNU,
    OPERAND_DTYPES,
    Blocks,
    DType,
    number_format,
    operand_names,
    promote,
)
from lowprec.modes import ActivationName
from lowprec.planning.kernels import Capabilities
from lowprec.planning.layout import GemmLayout, OperandSpec
from lowprec.planning.tensor_cores import BLOCK_SCALES_SINCE, accumulation, tensor_cores_multiply

#: Formats with blocks whose codes represent integers, E2M1 halves of integers.
_INTEGERS = frozenset({"mxfp4", "nvfp4", "int8_blocks"})
_INTEGERS_OF_B = _INTEGERS | {"int8", "int4"}

#: Kinds of tensor cores' instructions; the elements, scales and length of the blocks that they multiply.
_KINDS = (
    ("mxf4nvf4", ("e2m1",), FLOAT8_E8M0FNU, 32),
    ("mxf4nvf4", ("e2m1",), FLOAT8_E4M3FN, 16),
    ("mxf8f6f4", ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1"), FLOAT8_E8M0FNU, 32),
)


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """``out = activation(alpha * a @ b + beta * c + bias)`` without addresses and values of alpha and beta."""

    a: OperandSpec  # shape (..., m, k) or (k,)
    b: OperandSpec  # shape (..., k, n) or (k,)
    out_dtype: DType | None = None  # by default the operands' common type, int32 for int8
    out: OperandSpec | None = None  # with the result's shape and element type
    c: OperandSpec | None = None  # broadcasts to the result's shape
    bias: OperandSpec | None = None  # shape (n,)
    has_alpha: bool = False  # alpha is not 1
    has_beta: bool = False  # beta is not 0
    activation: ActivationName | None = None
    k_chunk: int | None = None  # length of the chunks of k in which the leading product is summed
    ignores_product: bool = False  # alpha is 0: the operands are not read
    # sums are multiplied by a float32 scale of each row and column, those of int8 included
    is_scaled: bool = False

    @property
    def has_blocks(self) -> bool:
        return self.a.blocks is not None or self.b.blocks is not None

    @property
    def blocks_along_k(self) -> tuple[Blocks, ...]:
        """The blocks of both operands, none if one has none along k."""
        a = self.a.blocks
        b = self.b.blocks
        if a is None or b is None or (a.axis, b.axis) != (-1, -min(2, len(self.b.shape))):
            return ()
        return a, b

    @property
    def in_integers(self) -> bool:
        """Whether both operands are integers in blocks along k."""
        names = [blocks.format for blocks in self.blocks_along_k]
        return bool(names) and names[0] in _INTEGERS and names[1] in _INTEGERS_OF_B

    @property
    def has_epilogue(self) -> bool:
        """Whether anything is applied to the product: alpha, c, bias or an activation."""
        return (
            self.has_alpha or self.has_beta or self.bias is not None or self.activation is not None
        )


def block_kind(problem: GemmProblem, capabilities: Capabilities) -> str:
    """Return the kind of the emulated tensor cores' instructions that multiply codes; empty if there is none."""
    emulated = capabilities.kernels[0].imitates
    if emulated is None:
        return ""
    blocks = problem.blocks_along_k
    # Names of others are those of arrays with several further scales.
    rows = [x.row for x in blocks if x.format == x.row.name]
    given = {(row.elements, row.scales, row.block) for row in rows}
    for kind, names, *blocks_of_kind in _KINDS:
        known = {(number_format(name), *blocks_of_kind) for name in names}
        if len(rows) == 2 and given <= known and accumulation(kind, emulated.cores):
            return kind
    return ""


def common_dtype(problem: GemmProblem, capabilities: Capabilities) -> DType:
    """Return the type in which the operands are multiplied on a device; raise DTypeError if there is none."""
    for name, spec in (("a", problem.a), ("b", problem.b)):
        if not spec.dtype.results:
            raise DTypeError(f"{name} has dtype {spec.dtype}; supported: {operand_names()}")
    dtypes = (problem.a.dtype, problem.b.dtype)
    emulated = capabilities.kernels[0].imitates
    if (
        emulated
        and problem.a.blocks
        and problem.b.blocks
        and emulated.capability >= BLOCK_SCALES_SINCE
        and not block_kind(problem, capabilities)
    ):
        raise UnsupportedError(
            f"products of {problem.a.blocks.format} and {problem.b.blocks.format} on the tensor cores of "
            f"{emulated.label} are not emulated; convert an operand to bfloat16"
        )
    if not all(d.is_float8 for d in dtypes):
        return promote(*dtypes)
    if dtypes != (DType.FLOAT8_E5M2,) * 2:  # which cuBLASLt does not multiply
        is_emulated = emulated is not None and tensor_cores_multiply(
            "float8_e4m3fn", emulated.cores
        )
        if capabilities.has_float8 or is_emulated:
            # FP8 operands of two types are multiplied unchanged; one type represents the pair.
            return DType.FLOAT8_E4M3FN
    return DType.BFLOAT16  # represents every FP8 number


def result_dtype(problem: GemmProblem, compute_dtype: DType) -> DType:
    """Return the result's element type; raise DTypeError if the requested one is not supported."""
    legal = compute_dtype.results
    is_narrow = (
        problem.has_blocks
        or problem.is_scaled
        or problem.a.dtype.is_float8
        or problem.b.dtype.is_float8
    )
    if is_narrow and compute_dtype.bits <= 32:
        legal = tuple(dict.fromkeys((*legal, *DType.FLOAT8_E4M3FN.results)))
    default = legal[0]
    given = [x.dtype for x in (problem.a, problem.b) if x.blocks is None]
    if len(given) == 1 and given[0] in (DType.FLOAT16, DType.BFLOAT16):
        default = given[0]
    dtype = problem.out_dtype or (problem.out.dtype if problem.out else default)
    words = f"a product of {problem.a.dtype} and {problem.b.dtype}"
    if dtype not in legal:
        choices = " or ".join(map(str, legal))
        asked = "out_dtype" if problem.out_dtype else "out of dtype"
        raise DTypeError(f"{asked} {dtype} is not supported for {words}; supported: {choices}")
    if problem.out and problem.out.dtype is not dtype:
        raise DTypeError(f"out has dtype {problem.out.dtype}, but the result has dtype {dtype}")
    return dtype


def check_epilogue(problem: GemmProblem, compute_dtype: DType, layout: GemmLayout) -> None:
    """Raise if c, bias, alpha, beta or the activation do not match the product."""
    if compute_dtype is DType.INT8 and not problem.is_scaled:
        refused = {
            "alpha": problem.has_alpha,
            "beta and c": problem.has_beta or problem.c is not None,
            f"activation {problem.activation}": problem.activation not in (None, "relu"),
        }
        for name, present in refused.items():
            if present:
                raise UnsupportedError(
                    f"{name} cannot be used with int8 operands, whose product is exact integers; "
                    "convert the result and apply it there"
                )
    if compute_dtype.is_complex and problem.activation:
        raise UnsupportedError(
            f"activation {problem.activation} is not defined for {compute_dtype} operands"
        )
    if problem.bias and problem.bias.shape != (layout.n,):
        raise ShapeError(
            f"bias has shape {problem.bias.shape}, but must have shape {(layout.n,)}, the columns of b"
        )
    if problem.c and not broadcasts(problem.c.shape, layout.out_shape):
        raise ShapeError(
            f"c has shape {problem.c.shape}, which does not broadcast to the result's shape {layout.out_shape}"
        )
    for name, spec in (("c", problem.c), ("bias", problem.bias)):
        if spec:
            _check_addend(
                name, spec.dtype, DType.FLOAT32 if problem.is_scaled else compute_dtype.accumulator
            )


def _check_addend(name: str, dtype: DType, epilogue: DType) -> None:
    """Raise if an addend would lose digits in the element type of the epilogue."""
    legal = [DType.INT8, DType.INT32]
    if epilogue is not DType.INT32:
        floats = [d for d in OPERAND_DTYPES if d.format is not None and not d.is_float8]
        legal = [d for d in floats if promote(d, epilogue) is epilogue]
    if dtype not in legal:
        choices = ", ".join(map(str, legal))
        raise DTypeError(
            f"{name} has dtype {dtype}, but is added in {epilogue}; it may be {choices}"
        )


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(n in (1, m) for n, m in pairs)
