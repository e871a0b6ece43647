"""``plan``: the execution plan of a ``matmul`` call."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from math import prod
from typing import Any

from lowprec import policy
from lowprec.arrays import CPU, ArrayView
from lowprec.arrays.libraries import promoted
from lowprec.arrays.prepared_view import Prepared, PreparedView, refuse_prepared
from lowprec.backends import backend_of, predicted
from lowprec.core.arguments import Options, bind, check_devices, check_scalars, name_argument, spec_of, view_of
from lowprec.errors import ArrayError, DTypeError, ModeError, ShapeError
from lowprec.modes import TABLE, ActivationName, BoundName, MathMode, ModeName, ModeSource, ResolvedMode, parse_mode
from lowprec.planning import Bound, Candidate, Capabilities, Copy, GemmPlan, GemmProblem, Reason, ReasonKind, plan_gemm
from lowprec.planning.prepared import prepared_reason, sparse_reason
from lowprec.planning.selection import check_bound, check_rtol, select_mode
from lowprec.util.strides import contiguous_strides
from lowprec.util.tracing import uncompiled

_TF32_MODES = frozenset(row.mode for row in TABLE if row.uses_tf32)


def mode_within(
    rtol: float | None,
    math_mode: ModeName | MathMode | None,
    problem: GemmProblem,
    capabilities: Capabilities,
    bound: BoundName | None = None,
) -> tuple[ResolvedMode, tuple[Candidate, ...]]:
    """Return the mode that ``rtol`` selects for a product on a device, and all candidates (none if it is imposed)."""
    measure = Bound.GUARANTEED if bound is None else check_bound(bound)
    if rtol is None:
        raise ModeError(f"bound={str(measure)!r} needs rtol=; pass both")
    rtol = check_rtol(rtol)
    if math_mode is not None:
        raise ModeError(
            f"rtol={rtol} and math_mode={str(parse_mode(math_mode))!r} exclude each other; pass one of them"
        )
    imposed = policy.overriding_mode()
    if imposed is not None:
        return imposed, ()
    selection = select_mode(problem, capabilities, rtol, _excluded(), measure)
    return policy.restrict(selection.mode, ModeSource.RTOL), selection.candidates


def _excluded() -> frozenset[MathMode]:
    return _TF32_MODES if policy.environment.snapshot().tf32_off else frozenset()


def _tolerance(rtol: float, bound: str | None, problem: GemmProblem, capabilities: Capabilities) -> Reason:
    """Return which bound ``rtol`` limits, and the mode that the other bound would choose."""
    used, choice = Bound(bound or Bound.GUARANTEED), "no mode"
    (other,) = set(Bound) - {used}
    with suppress(ModeError):
        candidates = select_mode(problem, capabilities, float(rtol), _excluded(), other).candidates
        choice = next(f"{x.mode}, whose bound is {x.bound:.2g}" for x in candidates if x.accepted)
    return Reason.of(ReasonKind.TOLERANCE, bound=str(used), rtol=float(rtol), other=str(other), choice=choice)


@uncompiled
def plan(
    a: Any,
    b: Any,
    /,
    *,
    out: Any = None,
    c: Any = None,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    bias: Any = None,
    activation: ActivationName | None = None,
    out_dtype: Any = None,
    math_mode: ModeName | MathMode | None = None,
    rtol: float | None = None,
    bound: BoundName | None = None,
    k_chunk: int | None = None,
    scale_a: Any = None,
    scale_b: Any = None,
    device: str | None = None,
) -> GemmPlan:
    """Return the execution plan of ``matmul`` with the same arguments, with reasons.

    Parameters
    ----------
    a, b : array, ShapeDtype, pair of shape and dtype, or anything with ``shape`` and ``dtype``
        As for :func:`lowprec.matmul`. A description is planned as a contiguous array in host memory.
    out, c, alpha, beta, bias, activation, out_dtype, math_mode, rtol, bound, k_chunk, scale_a, scale_b
        As for :func:`lowprec.matmul`; descriptions are accepted as arrays.
    device : str, optional
        ``"cpu"``, or the model or compute capability of an NVIDIA GPU (``"h200"``, ``"sm_90"``, ``"9.0"``), for which
        the plan is a prediction from published data; it needs neither the GPU, a driver nor a CUDA library.

    Returns
    -------
    GemmPlan
        Frozen and hashable; ``print`` shows a table, ``to_dict()`` returns plain values.

    Raises
    ------
    LowprecError
        The errors of ``matmul``; DeviceError for an unknown ``device``.

    Examples
    --------
    >>> import lowprec
    >>> a = lowprec.ShapeDtype((512, 512), "float32")
    >>> made = lowprec.plan(a, a, math_mode="bf16")
    >>> made.a_becomes.split(",")[0], made.resolved.source.value
    ('bfloat16', 'math_mode= argument')
    >>> lowprec.plan(a, a, math_mode="bf16", device="h200").capabilities.name
    'NVIDIA H200 SXM'
    """
    refuse_prepared(a=None if isinstance(a, Prepared) and a._library else a, out=out, c=c, bias=bias)
    try:
        a, b, c, bias = promoted((a, b), c, bias)
        x, y = _described(a), _described(b)
        options = bind(x, y, out, c, alpha, beta, bias, activation, out_dtype, scale_a, scale_b, k_chunk,
                       describing=True)  # fmt: skip
    except (ArrayError, DTypeError, ShapeError) as error:
        name_argument(error, {"a": a, "b": b, "out": out, "c": c, "bias": bias}, _described)
        raise
    check_devices(views := options.views(x, y))
    array_device = next((view.device for view in views.values() if not view.is_description), CPU)
    capabilities = backend_of(array_device).capabilities(array_device) if device is None else predicted(device)
    if staged := options.needs_staging(x, y):
        options = options._replace(out=None)
    problem = options.problem(spec_of(x), spec_of(y))
    candidates: tuple[Candidate, ...] = ()
    if rtol is None and bound is None:
        resolved = policy.resolve(math_mode)
    else:
        resolved, candidates = mode_within(rtol, math_mode, problem, capabilities, bound)
    made = plan_gemm(problem, capabilities, resolved.mode)
    check_scalars(options, made.compute_dtype)
    copies = [
        Copy(name, (Reason.of(ReasonKind.EXPORTED_COPY, how=view.copied),), view.nbytes)
        for name, view in views.items()
        if view.copied is not None
    ]
    if staged:
        nbytes = prod(made.out_shape) * made.out_dtype.itemsize
        copies.append(Copy("out", (Reason.of(ReasonKind.OVERLAP),), nbytes))
    is_there = device is None and not any(view.is_description for view in views.values())
    return dataclasses.replace(
        made,
        resolved=resolved,
        candidates=candidates,
        tolerance=_tolerance(rtol, bound, problem, capabilities) if rtol is not None and candidates[1:] else None,
        copies=(*made.copies, *copies),
        **_use_of_b(made, y),
        algorithm=_algorithm(made, x, y, options) if is_there and not array_device.is_host else (),
    )


def _use_of_b(made: GemmPlan, y: ArrayView) -> dict[str, Any]:
    """Return the fields on a prepared ``b``."""
    if not isinstance(y, PreparedView):
        return {}
    return {"prepared": prepared_reason(made, y.mode), "sparsity": sparse_reason(made) if y.is_sparse else None}


def _described(x: Any) -> ArrayView:
    return x._view if isinstance(x, Prepared) else view_of(x, describing=True)


def _algorithm(made: GemmPlan, x: ArrayView, y: ArrayView, options: Options) -> tuple[tuple[str, str], ...]:
    out = options.out
    if out is None:
        # The address of a new array is aligned for every kernel.
        strides = contiguous_strides(made.out_shape)
        out = ArrayView(made.out_dtype, made.out_shape, strides, x.device, None, False, 0)
    return backend_of(x.device).describe(made, options.arguments(x, y, out))
