"""Products by the packed kernels, on tile units or on vector units for bfloat16, int8 and float32.

The kernel reads operands of any strides and applies the epilogue as it writes. If an operand in two bfloat16 parts
contains Inf or NaN, the kernel writes nothing and the product runs on FP32 units with the same rounded operands,
because Inf times a zero low part would give NaN. Non-finite sums of split operands are recomputed in FP32.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from lowprec.arrays.prepared_view import PackedOperand, PreparedView
from lowprec.arrays.view import NUMPY_DTYPES, data_pointer
from lowprec.backends.cpu import casting, fp32_units, splitting, team
from lowprec.backends.cpu.buffers import Workspace
from lowprec.backends.cpu.packed import run
from lowprec.backends.cpu.packed.job import ACTIVATIONS, KINDS
from lowprec.backends.cpu.packed.micro_kernels import MicroKernel, is_available
from lowprec.backends.cpu.packed.prepared_panels import Convert, PackedAs, Panels, panels_of, stack_of
from lowprec.backends.cpu.splitting import Split
from lowprec.backends.cpu.stacks import Stacks, stacks_of
from lowprec.backends.execution import Arguments, Executor, imported
from lowprec.formats import BFLOAT16, FLOAT16, TF32, DType
from lowprec.modes import row
from lowprec.planning import GemmPlan
from lowprec.planning.prepared import kept_modes, reads_codes_of_b

#: The kernels' names of the roundings of float32 operands.
_ROUNDINGS = {None: "exact", TF32: "tf32", BFLOAT16: "bf16", FLOAT16: "fp16"}

_last = threading.local()


def _rounding(plan: GemmPlan) -> str:
    if plan.kernel_row.sums_products:
        return str(plan.scheme)
    return _ROUNDINGS[fp32_units.rounding_format(plan)]


def prepare(plan: GemmPlan) -> Executor:
    """Return the executor of a plan whose kernel has a micro-kernel."""
    if _is_one_job(plan):
        # A batch finds while it runs that an operand must be scaled; but then c, if it is the result, has changed.
        is_checked = plan.layout.batch_count > 1 and all(plan.scaled) and not plan.problem.has_beta
        job = run.prepare(
            _micro_kernel(plan), plan.layout, _rounding(plan), plan.problem, _find_panels(plan), checks_range=is_checked
        )
        if job is not None and (plan.fallback or any(plan.scaled) or plan.problem.has_blocks):
            return functools.partial(execute_job, plan, job, is_checked)
        if job is not None:
            return job
    return functools.partial(execute, plan)


def execute_job(plan: GemmPlan, job: Callable[[Arguments], bool], is_checked: bool, arguments: Arguments) -> None:
    """Run the products of a plan as one job; one by one if an operand must be scaled or a result recomputed.

    With ``is_checked`` the job checks the range of operands that are not prepared.
    """
    if plan.problem.has_blocks:
        arguments = arguments.widened(b=not reads_codes_of_b(plan))
    checks = any(plan.scaled) and (not is_checked or type(arguments.b) is PreparedView)
    if checks and any(_apart(plan, arguments, stacks_of(plan, arguments))):
        execute(plan, arguments)
    elif job(arguments):
        _last.fell_back = False
    else:
        execute(plan, arguments)


def _is_one_job(plan: GemmPlan) -> bool:
    """Whether the plan is one job of the kernel, on the operands as stored."""
    problem, dtype = plan.problem, plan.compute_dtype
    operands = zip((problem.a, problem.b), plan.rounded, strict=True)
    return (
        not dtype.is_complex
        and all(x.dtype is dtype or not rounded for x, rounded in operands)
        and plan.out_dtype.label in KINDS
        and not (dtype is DType.INT8 and problem.has_epilogue)
        and problem.activation in ACTIVATIONS
        and not (plan.fallback and problem.has_beta)  # c may be the result, which a fallback reads again
        and is_available(_micro_kernel(plan))  # not a replacement of the micro-kernel
    )


def _find_panels(plan: GemmPlan) -> run.FindPanels | None:
    """Return the function that finds the packed panels of a prepared ``b``; None if they are not kept."""
    modes = kept_modes(plan)
    if not modes:
        return None
    packed_as, convert = _packing_of_b(plan)
    key = packed_as.key(plan.problem.b.shape, plan.problem.b.strides)

    def find(view: PreparedView) -> Panels | None:
        if view.mode not in modes:
            return None
        form = view.packed.get(key)
        return stack_of(view, packed_as, convert) if form is None else form.value

    return find


def execute(plan: GemmPlan, arguments: Arguments) -> None:
    """Execute a plan whose kernel has a micro-kernel."""
    arguments = arguments.widened() if plan.problem.has_blocks else arguments
    one_product = _ONE_PRODUCT.get(plan.compute_dtype, _real_product)
    singles = _singles(stacks_of(plan, arguments))
    fallen: list[Stacks] = []

    def run_one(single: Stacks) -> None:
        of_single, product = arguments, one_product
        if type(arguments.b) is PreparedView and plan.layout.batch_count > 1:
            of_single = arguments._replace(b=arguments.b.matrix(single.b))
        if any(plan.scaled):
            apart = _apart(plan, of_single, single)
            if any(apart):
                product = functools.partial(_scaled_product, apart)
        if not product(plan, of_single, single):
            assert plan.fallback is not None, "only kernels with a fallback decline"
            fallen.append(single)
            fp32_units.execute_stacks(plan, plan.fallback, arguments, single)

    team.share(run_one, singles)
    _last.fell_back = bool(fallen)


def fell_back() -> bool:
    """Whether this thread's last product here, or one of its batch, fell back to FP32 units."""
    return bool(_last.fell_back)


def _singles(stacks: Stacks) -> list[Stacks]:
    batch = stacks.out.shape[:-2]
    if not batch:
        return [stacks]
    a, b = (np.broadcast_to(x, batch + x.shape[-2:]) for x in (stacks.a, stacks.b))
    c, bias = stacks.c, stacks.bias
    return [Stacks(a[i], b[i], stacks.out[i], None if c is None else c[i], bias) for i in np.ndindex(batch)]


def _micro_kernel(plan: GemmPlan) -> MicroKernel:
    found: MicroKernel = imported(plan.kernel_row.micro_kernel)
    return found


def _panels(plan: GemmPlan, arguments: Arguments, component: int = 0) -> Panels | None:
    view = arguments.b
    if type(view) is not PreparedView or view.mode not in kept_modes(plan):
        return None
    if not is_available(_micro_kernel(plan)):
        return None
    return panels_of(view, *_packing_of_b(plan, component))


def _packing_of_b(plan: GemmPlan, component: int = 0) -> tuple[PackedAs, Convert]:
    a, b = (_multiplied_dtype(plan, operand) for operand in (0, 1))

    def convert(x: Any, workspace: Workspace) -> Any:
        is_complex = plan.compute_dtype.is_complex
        return _plane(x, component, workspace) if is_complex else _as_multiplied(plan, x, 1)

    return PackedAs(_micro_kernel(plan), a, b, _rounding(plan), component), convert


def _multiplied_dtype(plan: GemmPlan, operand: int) -> str:
    """Return the element type in which the kernel reads ``a`` (0) or ``b`` (1): the common type of both.

    An operand that is not rounded keeps its own type.
    """
    if plan.compute_dtype.is_complex:
        return "float32"
    own = (plan.problem.a, plan.problem.b)[operand].dtype
    return (plan.compute_dtype if plan.rounded[operand] else own).label


def _as_multiplied(plan: GemmPlan, x: Any, operand: int) -> Any:
    name = _multiplied_dtype(plan, operand)
    return x if casting.name_of(x.dtype) == name else x.astype(name)


def _multiply(plan: GemmPlan, arguments: Arguments, single: Stacks, out: Any, **epilogue: Any) -> bool:
    panels = _panels(plan, arguments)
    a = _as_multiplied(plan, single.a, 0)
    b = single.b if panels else _as_multiplied(plan, single.b, 1)
    return run.gemm(_micro_kernel(plan), a, b, out, rounding=_rounding(plan), panels=panels, **epilogue)


def _real_product(plan: GemmPlan, arguments: Arguments, single: Stacks) -> bool:
    # With split operands, elements may be recomputed before c is added.
    fused = plan.problem.activation in ACTIVATIONS and plan.out_dtype.label in KINDS
    fused = fused and not (plan.kernel_row.sums_products and single.c is not None)
    if fused:
        done = _multiply(
            plan, arguments, single, single.out, alpha=arguments.alpha.real, beta=arguments.beta.real,
            c=single.c, bias=single.bias, activation=plan.problem.activation,
        )  # fmt: skip
        if done or not plan.kernel_row.sums_products:
            return done
    with Workspace() as workspace:
        product = workspace.array(single.out.shape, np.dtype(np.float32))
        done = _multiply(plan, arguments, single, product)
        if not done and plan.kernel_row.sums_products:
            done = _recompute_non_finite(plan, single, product)
        if done:
            fp32_units.apply_epilogue(plan, arguments, product, single)
        return done


def _recompute_non_finite(plan: GemmPlan, single: Stacks, product: Any) -> bool:
    assert plan.fallback is not None, "rows that sum products of parts have one"
    fp32_units.recompute_non_finite(plan.fallback, single.a, single.b, product)
    return True


def _complex_product(plan: GemmPlan, arguments: Arguments, single: Stacks, *, whole: bool = False) -> bool:
    """Compute a complex product as four real ones, or two if one operand is real; with ``whole`` always four.

    Real and imaginary parts are copied first, because packing reads contiguous numbers much faster.
    """
    dtype = NUMPY_DTYPES[plan.compute_dtype.accumulator]
    micro_kernel, rounding = _micro_kernel(plan), _rounding(plan)
    # Products with an imaginary part of zero may be omitted, except those with Inf or NaN.
    a_parts, b_parts = (2 if whole or x.dtype.kind == "c" else 1 for x in (single.a, single.b))
    with Workspace() as workspace:
        a = [_plane(single.a, i, workspace) for i in range(a_parts)]
        packed = [_panels(plan, arguments, i) for i in range(b_parts)]
        b = [single.b if panels else _plane(single.b, i, workspace) for i, panels in enumerate(packed)]
        shape = (single.a.shape[0], single.b.shape[1])
        real, imag = sums = [workspace.array(shape, a[0].dtype) for _ in range(2)]
        begun, finite = [False, False], True
        for i, j in ((0, 0), (1, 1), (0, 1), (1, 0)):
            if i < a_parts and j < b_parts:
                to, sign = i ^ j, -1.0 if i and j else 1.0
                beta, begun[to] = float(begun[to]), True
                finite &= run.gemm(
                    micro_kernel, a[i], b[j], sums[to], rounding=rounding, alpha=sign, beta=beta, c=sums[to],
                    panels=packed[j],
                )  # fmt: skip
                if not (finite or plan.kernel_row.sums_products):
                    return False
        lacks = min(a_parts, b_parts) < 2 and not plan.kernel_row.sums_products
        if lacks and not (np.isfinite(real).all() and np.isfinite(imag).all()):
            return _complex_product(plan, arguments, single, whole=True)
        product = workspace.array(shape, dtype)
        product.real, product.imag = real, imag
        if not finite:
            _recompute_non_finite(plan, single, product)
        fp32_units.apply_epilogue(plan, arguments, product, single)
    return True


def _plane(x: Any, component: int, workspace: Workspace) -> Any:
    plane = workspace.array(x.shape, np.dtype(np.float32))
    plane[...] = ((x.real, x.imag) if x.dtype.kind == "c" else (x, 0.0))[component]
    return plane


def _apart(plan: GemmPlan, arguments: Arguments, single: Stacks) -> tuple[bool, bool]:
    a, b = plan.scaled
    return a and _needs_scaling(single.a), b and _b_needs_scaling(plan, arguments, single.b)


def _needs_scaling(x: Any) -> bool:
    # Both components of a complex number have the same factor.
    return casting.need_scaling((x.real, x.imag) if x.dtype.kind == "c" else (x,))


def _b_needs_scaling(plan: GemmPlan, arguments: Arguments, b: Any) -> bool:
    view = arguments.b
    if type(view) is not PreparedView or view.mode not in kept_modes(plan):
        return _needs_scaling(b)
    key = "apart", data_pointer(b), b.shape, b.strides
    return bool(view.packed_operand(key, lambda: PackedOperand(_needs_scaling(b), 0)))


def _scaled_product(apart: tuple[bool, bool], plan: GemmPlan, arguments: Arguments, single: Stacks) -> bool:
    if plan.compute_dtype.is_complex:
        return False
    dtype, rounding = np.dtype(np.float32), _ROUNDINGS[fp32_units.rounding_format(plan)]
    with Workspace() as workspace:
        operands = [
            splitting.split(x, dtype, row(plan.scheme), FLOAT16, 1, -1 - operand, workspace)
            if is_apart
            else Split([_as_multiplied(plan, x, operand)])
            for operand, (x, is_apart) in enumerate(zip((single.a, single.b), apart, strict=True))
        ]
        a, b = (x.parts[0] for x in operands)
        is_plain = not plan.problem.has_epilogue and single.out.dtype == dtype
        product = single.out if is_plain else workspace.array(single.out.shape, dtype)
        if not run.gemm(_micro_kernel(plan), a, b, product, rounding=rounding):
            return False
        splitting.unscale(product, *operands)
        if not is_plain:
            fp32_units.apply_epilogue(plan, arguments, product, single)
    return True


def _int8_product(plan: GemmPlan, arguments: Arguments, single: Stacks) -> bool:
    _multiply(plan, arguments, single, single.out)
    if plan.problem.has_epilogue:
        fp32_units.apply_epilogue(plan, arguments, single.out, single)
    return True


_ONE_PRODUCT = {DType.COMPLEX64: _complex_product, DType.INT8: _int8_product}
