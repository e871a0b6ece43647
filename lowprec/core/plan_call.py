"""``plan``: the execution plan of a ``matmul`` call."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from lowprec.arrays import CPU, ArrayView
from lowprec.backends import backend_of, predicted
from lowprec.core.arguments import described
from lowprec.core.call import Call, bind
from lowprec.core.executors import plan_of
from lowprec.core.keywords import OF_PRODUCTS, ProductOptions, refuse_unknown, shows
from lowprec.core.tolerance import mode_of, other_choice
from lowprec.errors import ArrayError, DTypeError, ShapeError
from lowprec.planning import Copy, GemmPlan, PlanReport, Reason, ReasonKind
from lowprec.planning.stored import prepared_reason, sparse_reason
from lowprec.util.strides import contiguous_strides
from lowprec.util.tracing import uncompiled

if TYPE_CHECKING:
    from typing_extensions import Unpack


@uncompiled
@shows(ProductOptions)
def plan(
    a: Any, b: Any, /, *, device: str | None = None, **keywords: Unpack[ProductOptions]
) -> PlanReport:
    """Return the execution plan of ``matmul`` with the same arguments, with reasons.

    Parameters
    ----------
    a, b : array, ShapeDtype, pair of shape and dtype, or anything with ``shape`` and ``dtype``
        As for :func:`lowprec.matmul`. A description is planned as a contiguous array in host memory.
    out, c, alpha, beta, bias, activation, out_dtype, math_mode, rtol, bound, k_chunk, scale_a, scale_b, backward_mode
        As for :func:`lowprec.matmul`; descriptions are accepted as arrays. ``backward_mode`` is not planned.
    device : str, optional
        ``"cpu"``, or the model or compute capability of an NVIDIA GPU (``"h200"``, ``"sm_90"``, ``"9.0"``), for which
        the plan is a prediction from published data; it needs neither the GPU, a driver nor a CUDA library.

    Returns
    -------
    PlanReport
        Frozen and hashable; ``print`` shows a table, ``to_dict()`` returns plain values.

    Raises
    ------
    LowprecError
        The errors of ``matmul``; DeviceError for an unknown ``device``.

    Examples
    --------
    >>> import lowprec
    >>> a = lowprec.ShapeDtype((512, 512), "float32")
    >>> planned = lowprec.plan(a, a, math_mode="bf16")
    >>> planned.a_becomes.split(",")[0], planned.resolved.source.value
    ('bfloat16', 'math_mode= argument')
    >>> lowprec.plan(a, a, math_mode="bf16", device="h200").capabilities.name
    'NVIDIA H200 SXM'
    """
    refuse_unknown("plan", keywords, OF_PRODUCTS)
    a = _described("a", a)
    b = _described("b", b)
    given: dict[str, Any] = {**keywords}
    for name in ("out", "c", "bias"):
        if given.get(name) is not None:
            given[name] = _described(name, given[name])
    call = bind(a, b, **given)
    rtol = keywords.get("rtol")
    bound = keywords.get("bound")
    views = call.options.views(call.x, call.y)
    in_memory = [view for view in views.values() if not view.is_description]
    array_device = in_memory[0].device if in_memory else CPU
    if device is None:
        capabilities = backend_of(array_device).capabilities(array_device)
    else:
        capabilities = predicted(device)
    resolved, candidates = mode_of(call, keywords.get("math_mode"), rtol, bound, capabilities)
    options = call.options
    planned = plan_of(capabilities, resolved.mode, call.x, call.y, options)
    copies = _exported_copies(views)
    if options.needs_staging(call.x, call.y):
        options = options._replace(out=None, out_dtype=planned.out_dtype)
        planned = plan_of(capabilities, resolved.mode, call.x, call.y, options)
        nbytes = prod(planned.out_shape) * planned.out_dtype.itemsize
        overlap = Reason.of(ReasonKind.OVERLAP)
        copies.append(Copy("out", (overlap,), nbytes))
    is_there = device is None and len(in_memory) == len(views)
    return PlanReport.of(
        planned,
        resolved=resolved,
        candidates=candidates,
        tolerance=other_choice(rtol, bound, planned) if candidates[1:] else None,
        copies=(*planned.copies, *copies),
        **_use_of_b(planned, call.y),
        algorithm=_algorithm(planned, call) if is_there else (),
    )


def _described(name: str, x: Any) -> Any:
    try:
        return described(x)
    except (ArrayError, DTypeError, ShapeError) as error:
        error.argument = name
        raise


def _exported_copies(views: dict[str, ArrayView]) -> list[Copy]:
    """Return the copies that libraries made of their arrays."""
    copies = []
    for name, view in views.items():
        if view.copied is not None:
            reason = Reason.of(ReasonKind.EXPORTED_COPY, how=view.copied)
            copies.append(Copy(name, (reason,), view.nbytes))
    return copies


def _use_of_b(planned: GemmPlan, y: ArrayView) -> dict[str, Any]:
    if y.mode is None:
        return {}
    reasons = {"prepared": prepared_reason(planned, y.mode)}
    if y.is_sparse:
        reasons["sparsity"] = sparse_reason(planned)
    return reasons


def _algorithm(planned: GemmPlan, call: Call) -> tuple[tuple[str, str], ...]:
    """Return cuBLASLt's description of its algorithm, empty in host memory."""
    x = call.x
    if x.device.is_host:
        return ()
    out = call.options.out
    if out is None or planned.problem.out is None:
        # The address of a new array is aligned for every kernel.
        strides = contiguous_strides(planned.out_shape)
        out = ArrayView(planned.out_dtype, planned.out_shape, strides, x.device, None, False, 0)
    arguments = call.options.arguments(x, call.y, out)
    return backend_of(x.device).describe(planned, arguments)
