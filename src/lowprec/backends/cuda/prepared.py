"""A plan ready to run on a GPU: what is rewritten before, the product, and what is made of it afterwards.

The plan decided all of it. What only a call knows is the alignment of its pointers: an invocation is made for each
alignment that comes, and kept with the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import TypeVar

from lowprec.arrays import ArrayView, Device
from lowprec.backends.cuda import autotune, driver, handles
from lowprec.backends.cuda.bindings import Algorithm
from lowprec.backends.cuda.invocation import ALIGNMENT_BYTES, Invocation, Operands, alignment_of
from lowprec.backends.cuda.staging import Staging
from lowprec.backends.execution import Arguments
from lowprec.errors import UnsupportedError
from lowprec.planning import GemmPlan, Product
from lowprec.planning.calls import CublasLtCall
from lowprec.planning.lowering import lower, reads_k_contiguous
from lowprec.planning.rendering import title

__all__ = ["PreparedProduct"]

_T = TypeVar("_T")

#: Pointers of 8-bit types, and those of a fused bias, must be multiples of this.
_STEP_BYTES = 16


class PreparedProduct:
    """Executes a plan; safe to call from several threads at once.

    Parameters
    ----------
    plan : GemmPlan
        For a GPU; its result has elements.
    """

    def __init__(self, plan: GemmPlan) -> None:
        self.plan = plan
        self._routes: dict[tuple[bool, bool], _Route] = {}
        #: Whether the call itself adds and activates; not where cuBLASLt turned out to have no algorithm that does.
        self.fuses = True
        self._last = threading.local()
        self._plain: _Route | None = None

    def __call__(self, arguments: Arguments) -> None:
        """Queue the product on the stream of its arguments."""
        device = arguments.a.device
        if driver.current_device() == device.index:
            route = self._plain
            if route is None or not route.run_plain(device.index, arguments):
                self._run(device, arguments)
            return
        with driver.on_device(device.index):
            self._run(device, arguments)

    def _run(self, device: Device, arguments: Arguments) -> None:
        self._last.invocation = self._or_unfused(arguments, lambda x: x.run(device, arguments))
        route = self.route(arguments)
        if route.is_plain:
            self._plain = route

    def _or_unfused(self, arguments: Arguments, use: Callable[[_Route], _T]) -> _T:
        """Use a route; where cuBLASLt has no algorithm for what it fuses, use the one without."""
        route = self.route(arguments)
        try:
            return use(route)
        except UnsupportedError:
            if not (route.fuses and route.adds_or_activates):
                raise
            self.fuses = False
        return use(self.route(arguments))

    @property
    def last(self) -> Invocation | None:
        """What this thread ran last, None if it has run nothing, or nothing of cuBLASLt's."""
        if self._plain is not None:
            return self._plain.last
        return getattr(self._last, "invocation", None)

    def prepared(self, arguments: Arguments) -> Invocation:
        """Return what would run, without running it; the device is current, and the plan has a call."""
        device = arguments.a.device
        return self._or_unfused(arguments, lambda x: x.prepared(device, arguments))

    def tune(
        self,
        arguments: Arguments,
        candidates: int,
        progress: Callable[[int, int], None] | None,
    ) -> tuple[autotune.Measured, ...]:
        """Measure the algorithms on these operands and use the fastest from now on; the device is current."""
        device = arguments.a.device
        return self._or_unfused(
            arguments, lambda x: x.tune(device, arguments, candidates, progress)
        )

    def route(self, arguments: Arguments) -> _Route:
        """Return the way for pointers such as these."""
        views = [arguments.bias]
        if reads_k_contiguous(self.plan.compute_dtype):
            views += [arguments.a, arguments.b, arguments.out, arguments.c]
        aligned = not any(x is not None and x.address % _STEP_BYTES for x in views)
        key = (aligned, self.fuses)
        found = self._routes.get(key)
        if found is None:
            found = self._routes.setdefault(key, _Route(self.plan, *key))
        return found


class _Route:
    """One lowering of a plan, with the invocations for the alignments seen so far."""

    def __init__(self, plan: GemmPlan, aligned: bool, fuses: bool) -> None:
        self._plan = plan
        self.fuses = fuses
        self.call = plan.call
        if plan.call is not None and not (aligned and fuses):
            self.call = lower(plan, aligned=aligned, fuse=fuses)
        self.adds_or_activates = self.call is not None and bool(
            self.call.c or self.call.epilogue != "DEFAULT"
        )
        #: By alignment, and length of the inner dimension where that is not the whole.
        self._invocations: dict[int | tuple[int, int], Invocation] = {}
        self._offset_bits = _offset_bits(self.call) if self.call else 0
        self._is_staged = self.call is not None and bool(
            self.call.staged or self.call.pack_a or self.call.pack_b
        )
        self._fuses_bias = self.call is not None and "BIAS" in self.call.epilogue
        #: Whether operands, result and nothing else are what a call is about, at any alignment.
        self.is_plain = (
            self.call is not None
            and not self._is_staged
            and self.call.c is None
            and not self._fuses_bias
            and not plan.problem.has_alpha
            and len(self.call.offsets) == 1
            and not reads_k_contiguous(plan.compute_dtype)
        )
        self._swapped = self.call is not None and self.call.swapped
        self.last: Invocation | None = None

    def run_plain(self, device: int, arguments: Arguments) -> bool:
        """Queue a product with nothing around it; False if it is the first of its alignment, and does not run."""
        a, b, d = arguments.a.address, arguments.b.address, arguments.out.address
        bits = ALIGNMENT_BYTES | a | b | d
        invocation = self._invocations.get(bits & -bits)
        if invocation is None:
            return False
        self.last = invocation
        first, second = (b, a) if self._swapped else (a, b)
        invocation.run_plain(handles.handle(device), arguments.stream, first, second, d)
        return True

    def run(self, device: Device, arguments: Arguments) -> Invocation | None:
        """Queue the work on the stream of the arguments and return what ran; the device is current."""
        call = self.call
        if call is None or self._is_staged:
            # Blocks go back to the pool of their stream once the work is queued: later work there comes later.
            with Staging(self._plan, call, device, arguments) as staged:
                ran = None
                if call is not None:
                    for product in self._plan.schedule:
                        addresses = staged.addresses(product)
                        ran = self._multiply(call, device, arguments, *addresses, product)
                staged.finish(_alpha(arguments))
            return ran
        a, b, out = arguments.a.address, arguments.b.address, arguments.out.address
        return self._multiply(call, device, arguments, a, b, out, self._plan.schedule[0])

    def _multiply(
        self,
        call: CublasLtCall,
        device: Device,
        arguments: Arguments,
        a: int,
        b: int,
        d: int,
        product: Product,
    ) -> Invocation:
        """Queue one product of the schedule on these addresses."""
        operands = self._operands(call, arguments, a, b, d, product)
        handle, stream = handles.handle(device.index), arguments.stream
        k = self._plan.layout.k
        call, first, second = call.over(k, product.k_start, product.k_stop)
        operands = operands._replace(
            first=operands.first + first * call.first.dtype.itemsize,
            second=operands.second + second * call.second.dtype.itemsize,
        )
        length = product.k_stop - product.k_start
        invocation = self._invocation(call, handle, stream, operands, length)
        invocation.run(handle, stream, operands)
        self.last = invocation
        return invocation

    def prepared(self, device: Device, arguments: Arguments) -> Invocation:
        """Return what would run."""
        call = self.call
        assert call is not None
        # What will lie in memory of lowprec's own is aligned.
        a = 0 if call.pack_a else arguments.a.address
        b = 0 if call.pack_b else arguments.b.address
        d = 0 if call.staged else arguments.out.address
        product, k = self._plan.schedule[0], self._plan.layout.k
        operands = self._operands(call, arguments, a, b, d, product)
        call, _, _ = call.over(k, product.k_start, product.k_stop)
        length = product.k_stop - product.k_start
        handle = handles.handle(device.index)
        return self._invocation(call, handle, arguments.stream, operands, length)

    def tune(
        self,
        device: Device,
        arguments: Arguments,
        candidates: int,
        progress: Callable[[int, int], None] | None,
    ) -> tuple[autotune.Measured, ...]:
        """Measure the algorithms of the call, whatever surrounds it."""
        call = self.call
        assert call is not None
        with Staging(self._plan, call, device, arguments) as staged:
            product = self._plan.schedule[0]
            operands = self._operands(call, arguments, *staged.addresses(product), product)
            handle, stream = handles.handle(device.index), arguments.stream
            length = product.k_stop - product.k_start
            call, _, _ = call.over(self._plan.layout.k, product.k_start, product.k_stop)
            invocation = self._invocation(call, handle, stream, operands, length)
            before = invocation.algorithm
            try:
                measured = autotune.tune(
                    invocation, handle, stream, operands, candidates=candidates, progress=progress
                )
            finally:
                invocation.use(before)
        if measured:
            invocation.use(measured[0].algorithm)
        return measured

    def _operands(
        self, call: CublasLtCall, arguments: Arguments, a: int, b: int, d: int, product: Product
    ) -> Operands:
        """Return addresses and factors in cuBLASLt's order; a staged product gets the caller's factors later."""
        scale_a, scale_b = _scale_pointer(arguments.scale_a), _scale_pointer(arguments.scale_b)
        if call.swapped:
            a, b, scale_a, scale_b = b, a, scale_b, scale_a
        c = arguments.c.address if call.c and arguments.c is not None else d
        bias = arguments.bias.address if self._fuses_bias and arguments.bias is not None else 0
        if call.staged:
            factor, kept = 2.0**product.exponent, float(product.accumulates)
            return Operands(a, b, d, d, 0, scale_a, scale_b, factor, kept)
        beta = arguments.beta if call.c else 0.0
        return Operands(a, b, c, d, bias, scale_a, scale_b, _alpha(arguments), beta)

    def _invocation(
        self, call: CublasLtCall, handle: int, stream: int, operands: Operands, k: int
    ) -> Invocation:
        """Return the prepared call for pointers of this alignment and this length of the inner dimension."""
        alignment = alignment_of(
            operands.first, operands.second, operands.c, operands.d, self._offset_bits
        )  # fmt: skip
        key = alignment if k == self._plan.layout.k else (alignment, k)
        found = self._invocations.get(key)
        if found is None:
            # Threads that come at the same moment prepare one each, and use the first.
            made = self._prepare(call, alignment, handle, stream, operands)
            found = self._invocations.setdefault(key, made)
        return found

    def _prepare(
        self, call: CublasLtCall, alignment: int, handle: int, stream: int, operands: Operands
    ) -> Invocation:
        plan = self._plan

        def choose(invocation: Invocation) -> Algorithm | None:
            return autotune.choose(invocation, handle, stream, operands)

        return Invocation(
            call,
            alignment,
            plan.capabilities.workspace_bytes,
            operands,
            choose,
            lambda: f"{title(plan)}, {plan.compute_type}",
        )


def _offset_bits(call: CublasLtCall) -> int:
    """Return all byte offsets of a call's products, or-ed: the alignment that they leave."""
    c = call.c or call.d
    sizes = [matrix.dtype.itemsize for matrix in (call.first, call.second, c, call.d)]
    return reduce(
        or_, (x * size for walk in call.offsets for x, size in zip(walk, sizes, strict=True)), 0
    )


def _scale_pointer(scale: ArrayView | float | None) -> int:
    """Return the address of a scale in the memory of the device; a number goes into alpha."""
    return scale.address if isinstance(scale, ArrayView) else 0


def _alpha(arguments: Arguments) -> complex:
    """Return alpha with the scales that are numbers."""
    alpha = arguments.alpha
    for scale in (arguments.scale_a, arguments.scale_b):
        if isinstance(scale, float):
            alpha *= scale
    return alpha
