"""``plan``: what ``matmul`` would run, without running it."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any, NamedTuple

from lowprec import policy
from lowprec.arrays import CPU, ArrayView, Device, library_of
from lowprec.backends import backend_of
from lowprec.modes import MathMode
from lowprec.planning import (
    Candidate,
    Copy,
    GemmPlan,
    GemmProblem,
    OperandSpec,
    Reason,
    Why,
    plan_gemm,
)
from lowprec.request import (
    Request,
    check_devices,
    check_scalars,
    is_description,
    make_request,
    scale_view,
    spec_of,
)
from lowprec.selection import mode_within
from lowprec.strides import contiguous_strides

__all__ = ["plan"]


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
    activation: str | None = None,
    out_dtype: Any = None,
    math_mode: str | MathMode | None = None,
    rtol: float | None = None,
    scale_a: Any = None,
    scale_b: Any = None,
) -> GemmPlan:
    """Return what ``matmul`` with the same arguments would run, and why; nothing is computed.

    Parameters
    ----------
    a, b : array, ShapeDtype, or anything with ``shape`` and ``dtype``
        As for :func:`lowprec.matmul`. What only describes an array is taken as a contiguous one in host memory.
    out, c, alpha, beta, bias, activation, out_dtype, math_mode, rtol, scale_a, scale_b
        As for :func:`lowprec.matmul`; arrays may be described here too.

    Returns
    -------
    GemmPlan
        Frozen and hashable; ``print`` shows it as a table, ``to_dict()`` gives plain values.

    Raises
    ------
    LowprecError
        The same errors as ``matmul``.

    Examples
    --------
    >>> import lowprec
    >>> a = lowprec.ShapeDtype((512, 512), "float32")
    >>> made = lowprec.plan(a, a, math_mode="bf16")
    >>> made.a_becomes.split(",")[0], made.resolved.source.value
    ('bfloat16', 'math_mode= argument')
    """
    arrays = {"a": a, "b": b, "out": out, "c": c, "bias": bias}
    call = _Call.of(arrays, alpha, beta, activation, out_dtype, scale_a, scale_b)
    problem = call.problem()
    candidates: tuple[Candidate, ...] = ()
    if rtol is None:
        resolved = policy.resolve(math_mode)
    else:
        resolved, candidates = mode_within(rtol, math_mode, problem, call.device)
    made = plan_gemm(problem, backend_of(call.device).capabilities(call.device), resolved.mode)
    check_scalars(call.request, made.compute_dtype)
    return dataclasses.replace(
        made,
        resolved=resolved,
        candidates=candidates,
        copies=made.copies + call.copies(made),
        algorithm=call.algorithm(made),
    )


class _Call(NamedTuple):
    """The arrays of a call, some of them real and some only described."""

    request: Request
    views: dict[str, ArrayView]
    described: dict[str, OperandSpec]

    @classmethod
    def of(
        cls,
        arrays: dict[str, Any],
        alpha: Any,
        beta: Any,
        activation: Any,
        out_dtype: Any,
        scale_a: Any,
        scale_b: Any,
    ) -> _Call:
        given = {name: x for name, x in arrays.items() if x is not None or name in ("a", "b")}
        described = {name: spec_of(x) for name, x in given.items() if is_description(x)}
        views = {
            name: library_of(x).writable_view(x) if name == "out" else library_of(x).view(x)
            for name, x in given.items()
            if name not in described
        }
        addends = {name: views.get(name) for name in ("out", "c", "bias")}
        request = make_request(
            alpha,
            beta,
            activation,
            out_dtype,
            has_c="c" in given,
            scale_a=scale_view(scale_a),
            scale_b=scale_view(scale_b),
            **addends,
        )
        check_devices(views)
        return cls(request, views, described)

    @property
    def device(self) -> Device:
        """Where the real arrays lie; the host if there are none."""
        return next((view.device for view in self.views.values()), CPU)

    @property
    def aside(self) -> bool:
        views = self.views
        return "a" in views and "b" in views and self.request.must_go_aside(views["a"], views["b"])

    def problem(self) -> GemmProblem:
        specs = {name: spec_of(view) for name, view in self.views.items()} | self.described
        request = self.request._replace(out=None) if self.aside else self.request
        problem = request.problem(specs["a"], specs["b"])
        described = self.described
        return dataclasses.replace(
            problem,
            out=described.get("out", problem.out),
            c=described.get("c", problem.c),
            bias=described.get("bias", problem.bias),
        )

    def algorithm(self, made: GemmPlan) -> tuple[tuple[str, str], ...]:
        """Return what the library on the device tells of its choice; nothing where arrays are only described."""
        views = self.views
        if self.device.is_host or self.described:
            return ()
        out = None if self.aside else views.get("out")
        if out is None:
            # A new array will lie at an address that every kernel likes.
            strides = contiguous_strides(made.out_shape)
            out = ArrayView(made.out_dtype, made.out_shape, strides, self.device, None, False, 0)
        arguments = self.request.arguments(views["a"], views["b"], out)
        return backend_of(self.device).describe(made, arguments)

    def copies(self, made: GemmPlan) -> tuple[Copy, ...]:
        """Return the copies that the arrays themselves cause, before and after the planned product."""
        copies = [
            Copy(name, (Reason.of(Why.EXPORTED_COPY, how=view.copied),), view.nbytes)
            for name, view in self.views.items()
            if view.copied is not None
        ]
        if self.aside:
            nbytes = prod(made.out_shape) * made.out_dtype.itemsize
            copies.append(Copy("out", (Reason.of(Why.OVERLAP),), nbytes))
        return tuple(copies)
