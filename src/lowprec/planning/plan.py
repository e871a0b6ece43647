"""A product as a value, and the plan of how it runs: frozen, hashable, printable, cached."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from functools import lru_cache
from math import prod
from typing import Any

from lowprec.errors import DTypeError, ModeError, ShapeError, UnsupportedError
from lowprec.formats import DType, NumberFormat, promote
from lowprec.modes import MathMode, ResolvedMode, mode_names, row
from lowprec.planning import rendering
from lowprec.planning.advice import advise
from lowprec.planning.bounds import (
    ACCUMULATOR,
    MAX_K_INT8,
    SINGLE_PRECISION,
    ErrorBound,
    error_bound,
    holds,
    operand_format,
)
from lowprec.planning.kernels import (
    FALLBACKS,
    PARTS,
    READS_ANY_STRIDES,
    Capabilities,
    Kernel,
    KernelChoice,
    NumberKind,
    choose_kernel,
    flops_per_conversion,
)
from lowprec.planning.layout import GemmLayout, OperandSpec, gemm_layout

__all__ = [
    "OUT_DTYPES",
    "Activation",
    "Candidate",
    "Copy",
    "GemmPlan",
    "GemmProblem",
    "parse_activation",
    "plan_gemm",
]

PLAN_CACHE_SIZE = 1024

#: Element types that a result may have, per common element type of the operands; the first is the default.
OUT_DTYPES: dict[DType, tuple[DType, ...]] = {
    DType.FLOAT64: (DType.FLOAT64,),
    DType.FLOAT32: (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16),
    DType.FLOAT16: (DType.FLOAT16, DType.FLOAT32),
    DType.BFLOAT16: (DType.BFLOAT16, DType.FLOAT32),
    DType.COMPLEX64: (DType.COMPLEX64,),
    DType.COMPLEX128: (DType.COMPLEX128,),
    DType.INT8: (DType.INT32,),
}

#: Element type in which products are summed and the epilogue is computed.
EPILOGUE_DTYPE: dict[DType, DType] = {
    DType.FLOAT64: DType.FLOAT64,
    DType.FLOAT32: DType.FLOAT32,
    DType.FLOAT16: DType.FLOAT32,
    DType.BFLOAT16: DType.FLOAT32,
    DType.COMPLEX64: DType.COMPLEX64,
    DType.COMPLEX128: DType.COMPLEX128,
    DType.INT8: DType.INT32,
}

_COMPUTE_TYPE: dict[DType, str] = {
    DType.FLOAT64: "COMPUTE_64F",
    DType.COMPLEX128: "COMPUTE_64F",
    DType.FLOAT16: "COMPUTE_32F on float16 data",
    DType.BFLOAT16: "COMPUTE_32F on bfloat16 data",
    DType.INT8: "COMPUTE_32I",
}

_KIND: dict[str | None, NumberKind] = {
    "float64": "float64",
    "float32": "float32",
    "tf32": "tf32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    None: "int8",
}

# Element types whose numbers are held in a wider one until a kernel reads them.
_HELD_IN: dict[Kernel, str] = {Kernel.MKL: "float32", Kernel.NUMPY: "float32"}


@unique
class Activation(str, Enum):
    """Functions that the epilogue may apply; ``gelu`` is the tanh form, as cuBLASLt's."""

    RELU = "relu"
    GELU = "gelu"

    def __str__(self) -> str:
        return self.value

    __hash__ = str.__hash__


def parse_activation(name: str | Activation | None) -> Activation | None:
    """Return the activation of this name, None for None.

    Raises
    ------
    UnsupportedError
        If there is no such activation; the message lists those that there are.

    Examples
    --------
    >>> parse_activation("relu")
    <Activation.RELU: 'relu'>
    """
    if name is None:
        return None
    try:
        return Activation(name)
    except ValueError:
        legal = ", ".join([*Activation, "None"])
        raise UnsupportedError(
            f"activation {name!r} is not supported; choose one of: {legal}"
        ) from None


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """``out = activation(alpha * a @ b + beta * c + bias)``, everything but the addresses and the two scalars.

    Parameters
    ----------
    a, b : OperandSpec
        Shapes (..., m, k) or (k,), and (..., k, n) or (k,).
    out_dtype : DType or None
        Of the result; the operands' common type by default, int32 for int8.
    out : OperandSpec or None
        The caller's array for the result, exactly of its shape and element type.
    c : OperandSpec or None
        Broadcasts to the result's shape.
    bias : OperandSpec or None
        Shape (n,).
    has_alpha, has_beta : bool
        Whether alpha is other than 1, beta other than 0.
    activation : Activation or None
    """

    a: OperandSpec
    b: OperandSpec
    out_dtype: DType | None = None
    out: OperandSpec | None = None
    c: OperandSpec | None = None
    bias: OperandSpec | None = None
    has_alpha: bool = False
    has_beta: bool = False
    activation: Activation | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that is made because the strides of an array cannot be used where it lies.

    Parameters
    ----------
    operand : str
        ``"a"``, ``"b"`` or ``"out"``.
    reason : str
    nbytes : int
    """

    operand: str
    reason: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mode that ``rtol`` considered.

    Parameters
    ----------
    mode : MathMode
    bound : float
        Guaranteed relative error in the Frobenius norm.
    cost : float
        Expected time; 1 is numpy.matmul on float32.
    accepted : bool
        Whether this is the mode that runs.
    why : str
    """

    mode: MathMode
    bound: float
    cost: float
    accepted: bool
    why: str


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """What runs, and why. ``print(plan)`` shows it as a table, ``plan.to_dict()`` is ready for JSON.

    Parameters
    ----------
    problem : GemmProblem
    capabilities : Capabilities
        Of the device.
    mode : MathMode
        In force.
    mode_has_effect : bool
        Whether the mode changes anything for these element types.
    note : str
        Why it does not, empty if it does.
    layout : GemmLayout
    compute_dtype : DType
        Common element type of the operands.
    out_dtype : DType
    out_shape : tuple of int
    a_becomes, b_becomes : str
        What is multiplied in place of each operand.
    products : int
        Matrix products that the kernel runs: one per pair of parts, and on tile units four real ones per complex one.
    parts : int
        How many parts of each operand those products multiply.
    kernel : Kernel
    kernel_reason : str
    compute_type : str
        cuBLASLt's name of what the mode allows.
    fallbacks : tuple of str
        What operands the kernel cannot treat get instead.
    copies : tuple of Copy
        Made because of strides.
    flops : int
        Of the product as the caller wrote it: 2 m n k per real product, 8 m n k per complex one.
    bytes_moved : int
        Operands and result, each read or written once.
    arithmetic_intensity : float
        Flops per byte.
    advice : tuple of str
    bound : ErrorBound
        Of the product, before alpha, c, bias and activation.
    resolved : ResolvedMode or None
        Who chose the mode.
    candidates : tuple of Candidate
        What ``rtol`` considered.
    """

    problem: GemmProblem
    capabilities: Capabilities
    mode: MathMode
    mode_has_effect: bool
    note: str
    layout: GemmLayout
    compute_dtype: DType
    out_dtype: DType
    out_shape: tuple[int, ...]
    a_becomes: str
    b_becomes: str
    products: int
    parts: int
    kernel: Kernel
    kernel_reason: str
    compute_type: str
    fallbacks: tuple[str, ...]
    copies: tuple[Copy, ...]
    flops: int
    bytes_moved: int
    arithmetic_intensity: float
    advice: tuple[str, ...]
    bound: ErrorBound
    resolved: ResolvedMode | None = None
    candidates: tuple[Candidate, ...] = ()

    def __str__(self) -> str:
        return rendering.to_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, ready for JSON."""
        return rendering.to_dict(self)


def _compute_dtype(problem: GemmProblem, capabilities: Capabilities) -> DType:
    """Return the operands' common element type; raise if there is none or the device has no use for it."""
    for name, spec in (("a", problem.a), ("b", problem.b)):
        if spec.dtype.is_float8:
            raise UnsupportedError(
                f"{name} has dtype {spec.dtype}, which needs a GPU of compute capability 8.9 or later; "
                f"on {capabilities.device} convert it to bfloat16 or float16"
            )
        if spec.dtype not in OUT_DTYPES:
            legal = ", ".join(map(str, OUT_DTYPES))
            raise DTypeError(f"{name} has dtype {spec.dtype}; supported: {legal}")
    return promote(problem.a.dtype, problem.b.dtype)


def _out_dtype(problem: GemmProblem, compute_dtype: DType) -> DType:
    legal = OUT_DTYPES[compute_dtype]
    dtype = problem.out_dtype or (problem.out.dtype if problem.out else legal[0])
    words = f"a product of {problem.a.dtype} and {problem.b.dtype}"
    if dtype not in legal:
        choices = " or ".join(map(str, legal))
        raise DTypeError(f"out_dtype {dtype} is not possible for {words}; it gives {choices}")
    if problem.out and problem.out.dtype is not dtype:
        raise DTypeError(f"out has dtype {problem.out.dtype}, but the result has dtype {dtype}")
    return dtype


def _check_epilogue(problem: GemmProblem, compute_dtype: DType, layout: GemmLayout) -> None:
    """Raise where c, bias, alpha, beta or the activation do not go with the product."""
    if compute_dtype is DType.INT8:
        refused = {
            "alpha": problem.has_alpha,
            "beta and c": problem.has_beta or problem.c is not None,
            f"activation {Activation.GELU}": problem.activation is Activation.GELU,
        }
        for name, present in refused.items():
            if present:
                raise UnsupportedError(
                    f"{name} cannot be used with int8 operands, whose product is exact integers; "
                    "apply it to the result after converting that"
                )
    if compute_dtype.is_complex and problem.activation:
        raise UnsupportedError(
            f"activation {problem.activation} is not defined for {compute_dtype} operands"
        )
    bias_shape = (layout.n,)
    if problem.bias and problem.bias.shape != bias_shape:
        raise ShapeError(
            f"bias has shape {problem.bias.shape}, but must have shape {bias_shape}, the columns of b"
        )
    if problem.c and not _broadcasts(problem.c.shape, layout.out_shape):
        raise ShapeError(
            f"c has shape {problem.c.shape}, which does not broadcast to the result's shape {layout.out_shape}"
        )
    for name, spec in (("c", problem.c), ("bias", problem.bias)):
        if spec:
            _check_addend(name, spec.dtype, EPILOGUE_DTYPE[compute_dtype])


def _check_addend(name: str, dtype: DType, epilogue: DType) -> None:
    """Raise if an addend would lose digits in the type in which the epilogue is computed."""
    legal = (
        (DType.INT8, DType.INT32)
        if epilogue is DType.INT32
        else tuple(
            d for d in OUT_DTYPES if d is not DType.INT8 and promote(d, epilogue) is epilogue
        )
    )
    if dtype not in legal:
        choices = ", ".join(map(str, legal))
        raise DTypeError(
            f"{name} has dtype {dtype}, but is added in {epilogue}; it may be {choices}"
        )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether an array of one shape can be read as one of another.

    Examples
    --------
    >>> _broadcasts((3, 1), (2, 3, 4)), _broadcasts((2, 1, 1), (3, 4))
    (True, False)
    """
    if len(shape) > len(to):
        return False
    tail = to[len(to) - len(shape) :]
    return all(n in (1, m) for n, m in zip(shape, tail, strict=True))


def _is_exact(spec: OperandSpec, fmt: NumberFormat | None) -> bool:
    """Whether an operand holds only numbers of the format that is multiplied."""
    return fmt is None or (spec.dtype.format is not None and holds(fmt, spec.dtype.format))


def _becomes(
    spec: OperandSpec,
    mode: MathMode,
    compute_dtype: DType,
    fmt: NumberFormat | None,
    kernel: Kernel,
) -> str:
    """Return in words what is multiplied in place of an operand."""
    kept = _is_exact(spec, fmt)
    if kept and spec.dtype is compute_dtype:
        text = f"{spec.dtype}, as it is"
    elif kept:
        text = f"{spec.dtype} values, unchanged"
    else:
        text = row(mode).inputs
    if kernel in PARTS:
        return f"{text}, as the exact sum of {PARTS[kernel]} bfloat16 parts"
    held = fmt is not None and fmt.name in ("tf32", "bfloat16", "float16") and _HELD_IN.get(kernel)
    return f"{text}, held in {held}" if held else text


def _copies(
    problem: GemmProblem,
    layout: GemmLayout,
    kernel: Kernel,
    epilogue: DType,
    rounded: tuple[bool, bool],
) -> tuple[Copy, ...]:
    """Return the copies that strides alone force upon this kernel; a conversion fills a new buffer anyway."""
    if kernel in READS_ANY_STRIDES:
        return ()
    copies = []
    reason = "BLAS cannot express its strides"
    operands = (("a", problem.a, layout.a), ("b", problem.b, layout.b))
    for (name, spec, operand), converted in zip(operands, rounded, strict=True):
        if not operand.blas_expressible and not converted and spec.dtype is epilogue:
            copies.append(Copy(name, reason, spec.stored_bytes))
    out = problem.out
    if out and not layout.out.blas_expressible and out.dtype is epilogue:
        copies.append(Copy("out", f"{reason}: computed aside, then written", out.stored_bytes))
    return tuple(copies)


def _note(mode: MathMode, compute_dtype: DType) -> tuple[bool, str]:
    """Return whether the mode has an effect, and why not."""
    if compute_dtype in SINGLE_PRECISION:
        return True, ""
    accumulator = ACCUMULATOR[compute_dtype]
    summed_in = accumulator.name if accumulator else "int32"
    return False, (
        f"the mode {mode} has no effect: it acts on float32 and complex64 only; "
        f"{compute_dtype} operands stay as they are and are summed in {summed_in}"
    )


def _bytes_moved(problem: GemmProblem, out_dtype: DType, layout: GemmLayout) -> int:
    addends = (problem.c if problem.has_beta else None, problem.bias)
    read = [problem.a, problem.b, *filter(None, addends)]
    return sum(spec.stored_bytes for spec in read) + out_dtype.itemsize * prod(layout.out_shape)


@lru_cache(maxsize=PLAN_CACHE_SIZE)
def plan_gemm(problem: GemmProblem, capabilities: Capabilities, mode: MathMode) -> GemmPlan:
    """Return how a product runs on a device in a mode. Cached: the same arguments give the same object.

    Parameters
    ----------
    problem : GemmProblem
    capabilities : Capabilities
    mode : MathMode
        In force.

    Raises
    ------
    DTypeError, ShapeError, ModeError, UnsupportedError
        Before any work, if the product cannot run.

    Examples
    --------
    >>> square = OperandSpec.contiguous(DType.FLOAT32, (256, 256))
    >>> plan = plan_gemm(GemmProblem(square, square), Capabilities("cpu", "any"), MathMode.BF16)
    >>> plan.kernel, plan.a_becomes
    (<Kernel.NUMPY: 'numpy'>, 'bfloat16, held in float32')
    """
    if not row(mode).available:
        raise ModeError(
            f"the mode {mode} is not available in this version; choose one of: {mode_names()}"
        )
    compute_dtype = _compute_dtype(problem, capabilities)
    out_dtype = _out_dtype(problem, compute_dtype)
    layout = gemm_layout(problem.a, problem.b, problem.out)
    _check_epilogue(problem, compute_dtype, layout)
    if compute_dtype is DType.INT8 and layout.k > MAX_K_INT8:
        raise UnsupportedError(
            f"int8 operands with k = {layout.k}: sums of more than {MAX_K_INT8} products may leave int32; "
            "split the inner dimension"
        )
    fmt = operand_format(mode, compute_dtype)
    flops = _flops(layout, compute_dtype)
    choice = choose_kernel(_KIND[fmt.name if fmt else None], capabilities, layout, flops)
    return _assemble(
        problem, capabilities, mode, layout, compute_dtype, out_dtype, fmt, flops, choice
    )


def _flops(layout: GemmLayout, compute_dtype: DType) -> int:
    return (
        (8 if compute_dtype.is_complex else 2) * layout.batch_count * layout.m * layout.n * layout.k
    )


def _assemble(
    problem: GemmProblem,
    capabilities: Capabilities,
    mode: MathMode,
    layout: GemmLayout,
    compute_dtype: DType,
    out_dtype: DType,
    fmt: NumberFormat | None,
    flops: int,
    choice: KernelChoice,
) -> GemmPlan:
    """Put the plan together from its decided parts."""
    kernel = choice.kernel
    has_effect, note = _note(mode, compute_dtype)
    bytes_moved = _bytes_moved(problem, out_dtype, layout)
    intensity = flops / bytes_moved if bytes_moved else 0.0
    exact = (_is_exact(problem.a, fmt), _is_exact(problem.b, fmt))
    rounded = (has_effect and not exact[0], has_effect and not exact[1])
    rounds = any(rounded)
    parts = PARTS.get(kernel, 1)
    as_real = 4 if compute_dtype.is_complex and kernel in READS_ANY_STRIDES else 1
    return GemmPlan(
        problem=problem,
        capabilities=capabilities,
        mode=mode,
        mode_has_effect=has_effect,
        note=note,
        layout=layout,
        compute_dtype=compute_dtype,
        out_dtype=out_dtype,
        out_shape=layout.out_shape,
        a_becomes=_becomes(problem.a, mode, compute_dtype, fmt, kernel),
        b_becomes=_becomes(problem.b, mode, compute_dtype, fmt, kernel),
        products=parts * parts * as_real,
        parts=parts,
        kernel=kernel,
        kernel_reason=choice.reason + ("; four real products" if as_real == 4 else ""),
        compute_type=_COMPUTE_TYPE.get(compute_dtype) or row(mode).compute_type,
        fallbacks=FALLBACKS.get(kernel, ()),
        copies=_copies(problem, layout, kernel, EPILOGUE_DTYPE[compute_dtype], rounded),
        flops=flops,
        bytes_moved=bytes_moved,
        arithmetic_intensity=intensity,
        advice=advise(
            layout.m, layout.n, layout.k, fmt, intensity, capabilities.flops_per_byte,
            flops_per_conversion(capabilities) if rounds else None,
        ),
        bound=error_bound(
            mode, compute_dtype, out_dtype, layout.k, kernel, a_exact=exact[0], b_exact=exact[1]
        ),
    )  # fmt: skip
