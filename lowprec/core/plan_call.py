"""``plan``: the execution plan of a ``matmul`` call."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

from lowprec import policy
from lowprec.arrays import CPU, ArrayView
from lowprec.backends import backend_of, predicted
from lowprec.core.arguments import described
from lowprec.core.call import Call, bind
from lowprec.core.executors import plan_of
from lowprec.core.tolerance import mode_within, other_choice
from lowprec.errors import ArrayError, DTypeError, ShapeError
from lowprec.modes import ActivationName, BoundName, MathMode, ModeName, Recipe
from lowprec.planning import Candidate, Copy, GemmPlan, Reason, ReasonKind
from lowprec.planning.stored import prepared_reason, sparse_reason
from lowprec.util.strides import contiguous_strides
from lowprec.util.tracing import uncompiled


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
    math_mode: ModeName | MathMode | Recipe | None = None,
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
    >>> planned = lowprec.plan(a, a, math_mode="bf16")
    >>> planned.a_becomes.split(",")[0], planned.resolved.source.value
    ('bfloat16', 'math_mode= argument')
    >>> lowprec.plan(a, a, math_mode="bf16", device="h200").capabilities.name
    'NVIDIA H200 SXM'
    """
    arrays = {"a": a, "b": b, "out": out, "c": c, "bias": bias}
    for name, x in arrays.items():
        try:
            arrays[name] = described(x)
        except (ArrayError, DTypeError, ShapeError) as error:
            error.argument = name
            raise
    a, b, out, c, bias = arrays.values()
    call = bind(
        a, b, out=out, c=c, alpha=alpha, beta=beta, bias=bias, activation=activation, out_dtype=out_dtype,
        k_chunk=k_chunk, scale_a=scale_a, scale_b=scale_b,
    )  # fmt: skip
    views = call.options.views(call.x, call.y)
    array_device = next((view.device for view in views.values() if not view.is_description), CPU)
    capabilities = backend_of(array_device).capabilities(array_device) if device is None else predicted(device)
    candidates: tuple[Candidate, ...] = ()
    if rtol is None and bound is None:
        resolved = policy.resolve(math_mode)
    else:
        resolved, candidates = mode_within(call, rtol, math_mode, bound, capabilities)
    options = call.options
    planned = plan_of(capabilities, resolved.mode, call.x, call.y, options)
    copies = _exported_copies(views)
    if options.needs_staging(call.x, call.y):
        options = options._replace(out=None, out_dtype=planned.out_dtype)
        planned = plan_of(capabilities, resolved.mode, call.x, call.y, options)
        nbytes = prod(planned.out_shape) * planned.out_dtype.itemsize
        copies.append(Copy("out", (Reason.of(ReasonKind.OVERLAP),), nbytes))
    is_there = device is None and not any(view.is_description for view in views.values())
    return dataclasses.replace(
        planned,
        resolved=resolved,
        candidates=candidates,
        tolerance=other_choice(rtol, bound, planned) if rtol is not None and candidates[1:] else None,
        copies=(*planned.copies, *copies),
        **_use_of_b(planned, call.y),
        algorithm=_algorithm(planned, call) if is_there and not array_device.is_host else (),
    )


def _exported_copies(views: dict[str, ArrayView]) -> list[Copy]:
    """Return the copies that libraries made of their arrays."""
    copied = [(name, view) for name, view in views.items() if view.copied is not None]
    return [Copy(name, (Reason.of(ReasonKind.EXPORTED_COPY, how=x.copied),), x.nbytes) for name, x in copied]


def _use_of_b(planned: GemmPlan, y: ArrayView) -> dict[str, Any]:
    if y.mode is None:
        return {}
    return {"prepared": prepared_reason(planned, y.mode), "sparsity": sparse_reason(planned) if y.is_sparse else None}


def _algorithm(planned: GemmPlan, call: Call) -> tuple[tuple[str, str], ...]:
    x, y, out = call.x, call.y, call.options.out if planned.problem.out else None
    if out is None:
        # The address of a new array is aligned for every kernel.
        strides = contiguous_strides(planned.out_shape)
        out = ArrayView(planned.out_dtype, planned.out_shape, strides, x.device, None, False, 0)
    return backend_of(x.device).describe(planned, call.options.arguments(x, y, out))
