"""A plan ready to run on a GPU: how operands are packed, the products, and the epilogue.

The plan decided all of it. What only a call knows is the alignment of its pointers: an invocation is made for each
alignment that comes, and kept with the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import reduce
from itertools import chain
from operator import or_
from typing import TypeVar

from lowprec.arrays import ArrayView, Device
from lowprec.backends.cuda import autotune, handles, runtime
from lowprec.backends.cuda.invocation import (
    ALIGNMENT_BYTES,
    Invocation,
    Operands,
    alignment_of,
    byte_offsets,
)
from lowprec.backends.cuda.staging import Staging
from lowprec.backends.execution import Arguments
from lowprec.errors import UnsupportedError
from lowprec.planning import GemmPlan, Product
from lowprec.planning.calls import CublasLtCall
from lowprec.planning.lowering import lower, reads_k_contiguous
from lowprec.planning.rendering import title

_T = TypeVar("_T")

#: Pointers of 8-bit types, and those of a fused bias, must be multiples of this.
_STEP_BYTES = 16


class GemmExecutor:
    """Executes a plan; safe to call from several threads at once.

    Parameters
    ----------
    plan : GemmPlan
        For a GPU; its result has elements.
    """

    def __init__(self, plan: GemmPlan) -> None:
        self.plan = plan
        self._lowered: dict[tuple[bool, bool], _LoweredPlan] = {}
        #: Whether the call itself adds and activates; not where cuBLASLt turned out to have no algorithm that does.
        self.fuses = True
        self._last = threading.local()
        self._plain: _LoweredPlan | None = None

    def __call__(self, arguments: Arguments) -> None:
        """Queue the product on the stream of its arguments."""
        device = arguments.a.device
        if runtime.current_device() == device.index:
            plain = self._plain
            if plain is None or not plain.run_plain(device.index, arguments):
                self._run(device, arguments)
            return
        with runtime.on_device(device.index):
            self._run(device, arguments)

    def _run(self, device: Device, arguments: Arguments) -> None:
        self._last.invocation = self._or_unfused(arguments, lambda x: x.run(device, arguments))
        lowered = self.lowered(arguments)
        if lowered.is_plain:
            self._plain = lowered

    def _or_unfused(self, arguments: Arguments, use: Callable[[_LoweredPlan], _T]) -> _T:
        """Use the plan with a fused epilogue; where cuBLASLt has no algorithm for that, the plan without."""
        lowered = self.lowered(arguments)
        try:
            return use(lowered)
        except UnsupportedError:
            if not (lowered.fuses and lowered.adds_or_activates):
                raise
            self.fuses = False
        return use(self.lowered(arguments))

    @property
    def last(self) -> Invocation | None:
        """What this thread ran last, None if it has run nothing, or nothing of cuBLASLt's."""
        if self._plain is not None:
            return self._plain.last
        return getattr(self._last, "invocation", None)

    def invocation(self, arguments: Arguments) -> Invocation:
        """Return what would run, without running it; the device is current, and the plan has a call."""
        device = arguments.a.device
        return self._or_unfused(arguments, lambda x: x.first_invocation(device, arguments))

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

    def lowered(self, arguments: Arguments) -> _LoweredPlan:
        """Return the plan as it is lowered for pointers such as these."""
        views = [arguments.bias]
        if reads_k_contiguous(self.plan.compute_dtype):
            views += [arguments.a, arguments.b, arguments.out, arguments.c]
        aligned = not any(x is not None and x.address % _STEP_BYTES for x in views)
        key = (aligned, self.fuses)
        found = self._lowered.get(key)
        if found is None:
            found = self._lowered.setdefault(key, _LoweredPlan(self.plan, *key))
        return found


class _LoweredPlan:
    """A plan in cuBLASLt's words, with the invocations for the alignments seen so far."""

    def __init__(self, plan: GemmPlan, aligned: bool, fuses: bool) -> None:
        self._plan = plan
        self.fuses = fuses
        call = plan.call
        if call is not None and not (aligned and fuses):
            call = lower(plan, aligned=aligned, fuse=fuses)
        #: None where the inner dimension is 0.
        self.call = call
        #: By alignment, and length of the inner dimension where that is not the whole.
        self._invocations: dict[int | tuple[int, int], Invocation] = {}
        self.last: Invocation | None = None
        #: Whether operands, result and nothing else are what a call is about, at any alignment.
        self.is_plain = False
        self.adds_or_activates = False
        self._is_staged = True
        if call is None:
            return
        self.adds_or_activates = bool(call.c or call.epilogue != "DEFAULT")
        self._is_staged = bool(call.staged or call.pack_a or call.pack_b)
        #: All byte offsets, or-ed: the alignment that they leave.
        self._offset_bits = reduce(or_, chain(*byte_offsets(call)))
        self._fuses_bias = "BIAS" in call.epilogue
        self._swapped = call.swapped
        self.is_plain = (
            not self._is_staged
            and call.c is None
            and not self._fuses_bias
            and not plan.problem.has_alpha
            and len(call.offsets) == 1
            and not reads_k_contiguous(plan.compute_dtype)
        )

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
        if call is not None and not self._is_staged:
            a, b, out = arguments.a.address, arguments.b.address, arguments.out.address
            return self._multiply(device, arguments, (a, b, out), self._plan.schedule[0])
        # Blocks go back to the pool of their stream once the work is queued: later work there comes later.
        with Staging(self._plan, call, device, arguments) as staged:
            ran = None
            if call is not None:
                for product in self._plan.schedule:
                    ran = self._multiply(device, arguments, staged.addresses(product), product)
            staged.apply_epilogue(_alpha(arguments))
        return ran

    def _multiply(
        self,
        device: Device,
        arguments: Arguments,
        addresses: tuple[int, int, int],
        product: Product,
    ) -> Invocation:
        """Queue one product of the schedule."""
        handle, stream = handles.handle(device.index), arguments.stream
        call, operands = self._operands(arguments, addresses, product)
        invocation = self._invocation(call, handle, stream, operands, product)
        invocation.run(handle, stream, operands)
        self.last = invocation
        return invocation

    def first_invocation(self, device: Device, arguments: Arguments) -> Invocation:
        """Return what would run for the first product of the schedule."""
        assert self.call is not None
        # What will lie in memory of lowprec's own is aligned.
        a = 0 if self.call.pack_a else arguments.a.address
        b = 0 if self.call.pack_b else arguments.b.address
        d = 0 if self.call.staged else arguments.out.address
        product = self._plan.schedule[0]
        call, operands = self._operands(arguments, (a, b, d), product)
        handle = handles.handle(device.index)
        return self._invocation(call, handle, arguments.stream, operands, product)

    def tune(
        self,
        device: Device,
        arguments: Arguments,
        candidates: int,
        progress: Callable[[int, int], None] | None,
    ) -> tuple[autotune.Measured, ...]:
        """Measure the algorithms for the first product of the schedule, without packing and epilogue."""
        assert self.call is not None
        handle, stream = handles.handle(device.index), arguments.stream
        product = self._plan.schedule[0]
        with Staging(self._plan, self.call, device, arguments) as staged:
            call, operands = self._operands(arguments, staged.addresses(product), product)
            invocation = self._invocation(call, handle, stream, operands, product)
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
        self, arguments: Arguments, addresses: tuple[int, int, int], product: Product
    ) -> tuple[CublasLtCall, Operands]:
        """Return the call for one product, and its addresses and factors in cuBLASLt's order.

        The caller's factors are those of a staged product's epilogue.
        """
        whole = self.call
        assert whole is not None
        a, b, d = addresses
        scale_a, scale_b = _scale_pointer(arguments.scale_a), _scale_pointer(arguments.scale_b)
        if whole.swapped:
            a, b, scale_a, scale_b = b, a, scale_b, scale_a
        call, first, second = whole.over(self._plan.layout.k, product.k_start, product.k_stop)
        a += first * call.first.dtype.itemsize
        b += second * call.second.dtype.itemsize
        if call.staged:
            factor, kept = product.factor, float(product.accumulates)
            return call, Operands(a, b, d, d, 0, scale_a, scale_b, factor, kept)
        c = arguments.c.address if call.c and arguments.c is not None else d
        bias = arguments.bias.address if self._fuses_bias and arguments.bias is not None else 0
        beta = arguments.beta if call.c else 0.0
        return call, Operands(a, b, c, d, bias, scale_a, scale_b, _alpha(arguments), beta)

    def _invocation(
        self, call: CublasLtCall, handle: int, stream: int, operands: Operands, product: Product
    ) -> Invocation:
        """Return the prepared call for pointers of this alignment and this length of the inner dimension."""
        alignment = alignment_of(
            operands.first, operands.second, operands.c, operands.d, self._offset_bits
        )
        length, plan = product.k_stop - product.k_start, self._plan
        key = alignment if length == plan.layout.k else (alignment, length)
        found = self._invocations.get(key)
        if found is None:
            # Threads that come at the same moment prepare one each, and use the first.
            made = Invocation(
                call,
                alignment,
                plan.capabilities.workspace_bytes,
                operands,
                lambda x: autotune.choose(x, handle, stream, operands),
                lambda: f"{title(plan)}, {plan.compute_type}",
            )
            found = self._invocations.setdefault(key, made)
        return found


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
