"""The plan of how a product runs: frozen, hashable, printable, cached."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from lowprec.errors import ModeError, UnsupportedError
from lowprec.formats import DType, NumberFormat
from lowprec.modes import MathMode, ResolvedMode, mode_names, row
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
from lowprec.planning.calls import CublasLtCall, Pack
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
from lowprec.planning.layout import (
    GemmLayout,
    OperandSpec,
    addend_layout,
    gemm_layout,
    stacked_layout,
)
from lowprec.planning.lowering import lower
from lowprec.planning.problem import (
    EPILOGUE_DTYPE,
    GemmProblem,
    check_epilogue,
    common_dtype,
    result_dtype,
)

__all__ = [
    "Candidate",
    "Copy",
    "GemmPlan",
    "plan_gemm",
]

PLAN_CACHE_SIZE = 1024


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
    call : CublasLtCall or None
        What cuBLASLt is asked for, where it computes.
    algorithm : tuple of (str, str)
        What cuBLASLt tells of the algorithm that it chose, by name; empty until a device was asked.
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
    call: CublasLtCall | None = None
    algorithm: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        from lowprec.planning import rendering  # only who prints a plan needs it

        return rendering.to_text(self)

    def _repr_html_(self) -> str:
        from lowprec.planning import rendering

        return rendering.to_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, ready for JSON."""
        from lowprec.planning import rendering

        return rendering.to_dict(self)


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


def _packs(call: CublasLtCall | None) -> dict[str, Pack]:
    packs = {"a": call.pack_a, "b": call.pack_b} if call else {}
    return {name: pack for name, pack in packs.items() if pack is not None}


def _rewritten(call: CublasLtCall | None, operand: str) -> str:
    """Return what else happens to an operand that is rewritten before the call, in words."""
    pack = _packs(call).get(operand)
    if pack is None:
        return ""
    words = []
    if pack.scaled:
        words.append(f", each {'column' if operand == 'b' else 'row'} scaled by a power of two")
    if pack.complex_as != "no":
        words.append(", as a real matrix of twice the extents")
    return "".join(words)


def _copies_of_call(call: CublasLtCall | None) -> tuple[Copy, ...]:
    """Return the temporary arrays of a product by cuBLASLt: operands rewritten, a product made aside."""
    copies = [Copy(name, pack.reason, pack.nbytes) for name, pack in _packs(call).items()]
    if call is not None and call.aside:
        copies.append(Copy("out", f"computed aside: {call.aside}", call.product_bytes))
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
    compute_dtype = common_dtype(problem, capabilities)
    out_dtype = result_dtype(problem, compute_dtype)
    layout = _layout(problem, capabilities)
    check_epilogue(problem, compute_dtype, layout)
    if compute_dtype is DType.INT8 and layout.k > MAX_K_INT8:
        raise UnsupportedError(
            f"int8 operands with k = {layout.k}: sums of more than {MAX_K_INT8} products may leave int32; "
            "split the inner dimension"
        )
    fmt = operand_format(mode, compute_dtype)
    flops = _flops(layout, compute_dtype)
    kind = _KIND.get(fmt.name if fmt else None, "float32")
    choice = choose_kernel(kind, capabilities, layout, is_complex=compute_dtype.is_complex)
    return _assemble(
        problem, capabilities, mode, layout, compute_dtype, out_dtype, fmt, flops, choice
    )


def _layout(problem: GemmProblem, capabilities: Capabilities) -> GemmLayout:
    layout = gemm_layout(problem.a, problem.b, problem.out)
    c = problem.c if problem.has_beta and capabilities.is_gpu and layout.collapsed else None
    if c and _broadcasts(c, layout) and addend_layout(c, problem.a, problem.b, layout) is None:
        return stacked_layout(problem.a, problem.b, problem.out)
    return layout


def _broadcasts(c: OperandSpec, layout: GemmLayout) -> bool:
    """Whether c fits at all; that it must is checked, with its words, after the layout is known."""
    return len(c.shape) <= len(layout.out_shape)


def _flops(layout: GemmLayout, compute_dtype: DType) -> int:
    return (
        (8 if compute_dtype.is_complex else 2) * layout.batch_count * layout.m * layout.n * layout.k
    )


def _compute_type(compute_dtype: DType, mode: MathMode) -> str:
    if compute_dtype.is_float8:
        return "COMPUTE_32F on float8 data"
    return _COMPUTE_TYPE.get(compute_dtype) or row(mode).compute_type


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
    call = None
    if kernel is Kernel.CUBLASLT and flops:
        call = lower(problem, mode, compute_dtype, out_dtype, layout)
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
        a_becomes=_becomes(problem.a, mode, compute_dtype, fmt, kernel) + _rewritten(call, "a"),
        b_becomes=_becomes(problem.b, mode, compute_dtype, fmt, kernel) + _rewritten(call, "b"),
        products=parts * parts * as_real,
        parts=parts,
        kernel=kernel,
        kernel_reason=choice.reason + ("; four real products" if as_real == 4 else ""),
        compute_type=_compute_type(compute_dtype, mode),
        fallbacks=FALLBACKS.get(kernel, ()),
        copies=_copies_of_call(call)
        if kernel is Kernel.CUBLASLT
        else _copies(problem, layout, kernel, EPILOGUE_DTYPE[compute_dtype], rounded),
        flops=flops,
        bytes_moved=bytes_moved,
        arithmetic_intensity=intensity,
        advice=advise(
            layout.m, layout.n, layout.k, fmt, intensity, capabilities.flops_per_byte,
            flops_per_conversion(kernel) if rounds and (call is None or _packs(call)) else None,
            tensor_cores=capabilities.is_gpu,
        ),
        bound=error_bound(
            mode, compute_dtype, out_dtype, layout.k, kernel, a_exact=exact[0], b_exact=exact[1],
            capability=capabilities.compute_capability,
        ),
        call=call,
    )  # fmt: skip
