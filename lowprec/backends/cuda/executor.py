"""A plan ready to run on a GPU: how operands are packed, the products, and the epilogue.

The plan decided all of it. What only a call knows is the alignment of its pointers, and whether cuBLASLt takes the call
at all: an invocation is made for each alignment that comes, and kept with the plan.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import reduce
from itertools import chain
from operator import or_
from typing import NamedTuple, TypeAlias, TypeVar

from lowprec.arrays import ArrayView
from lowprec.backends.cuda import autotune, bindings, handles, memory, runtime
from lowprec.backends.cuda.compiling import NEEDS_CUDA_12, OLDEST_OF_CUDA_13
from lowprec.backends.cuda.invocation import (
    ALIGNMENT_BYTES,
    NO_ROOM,
    Invocation,
    Number,
    Operands,
    Room,
    alignment_of,
    byte_offsets,
    number,
)
from lowprec.backends.cuda.measuring import Measured, Progress
from lowprec.backends.cuda.staging import Staging
from lowprec.backends.execution import Arguments
from lowprec.errors import UnsupportedError
from lowprec.planning import GemmPlan, Product
from lowprec.planning.calls import CublasLtCall
from lowprec.planning.lowering import lower, reads_k_contiguous
from lowprec.planning.rendering import title

_T = TypeVar("_T")

#: Where ``a``, ``b`` and the product lie.
Places: TypeAlias = tuple[int, int, int]

#: Pointers of 8-bit types, and those of a fused bias, must be multiples of this.
_STEP_BYTES = 16

#: Ways to lower a plan, in the order in which they are tried where cuBLASLt refuses, with what is done then.
_WAYS: tuple[tuple[dict[str, bool], str], ...] = (
    ({}, ""),
    ({"fuse": False}, "a kernel adds and activates, on a staged product"),
    ({"fuse": False, "pad_rows": True}, "rows are padded, on a staged product"),
)

#: By plan, the way that cuBLASLt took, and its refusal of the ways before; for every executor of the plan.
_refused: dict[GemmPlan, tuple[int, str]] = {}
_MOST_REFUSED = 4096

_ITS_ALGORITHM = "an algorithm of cuBLASLt's"


class GemmExecutor:
    """Executes a plan for a GPU whose result has elements; safe to call from several threads at once."""

    def __init__(self, plan: GemmPlan) -> None:
        self.plan = plan
        self._lowered: dict[tuple[bool, int], _LoweredPlan] = {}
        self._way, self._refusal = _refused.get(plan, (0, ""))
        self._reads_8_bits = reads_k_contiguous(plan.compute_dtype)
        self._last = threading.local()
        self._plain: _LoweredPlan | None = None

    def __call__(self, arguments: Arguments) -> None:
        """Queue the product on the stream of its arguments."""
        device = arguments.a.device.index
        if runtime.current_device() == device:
            plain, places = self._plain, _places(arguments)
            if plain is None or not plain.multiply_alone(device, arguments.stream, places):
                self._run(device, arguments)
            return
        with runtime.on_device(device):
            self._run(device, arguments)

    def _run(self, device: int, arguments: Arguments) -> None:
        def run(lowered: _LoweredPlan) -> None:
            self._last.invocation = lowered.run(device, arguments)
            if lowered.is_plain:
                self._plain = lowered

        self.use(arguments, run)

    def use(self, arguments: Arguments, use: Callable[[_LoweredPlan], _T]) -> _T:
        """Use the plan in the way in force, or in the first one after it that cuBLASLt takes, which is in force then.

        The device is the current one.
        """
        tried: list[CublasLtCall | None] = []
        refusal: UnsupportedError | None = None
        for way in range(self._way, len(_WAYS)):
            lowered = self.lowered(arguments, way)
            if lowered.call in tried:
                continue
            tried.append(lowered.call)
            try:
                found = use(lowered)
            except UnsupportedError as error:
                refusal = refusal or error
                continue
            if refusal is not None:
                self._way, self._refusal = way, str(refusal)
                if len(_refused) >= _MOST_REFUSED:
                    _refused.clear()
                _refused[self.plan] = (way, str(refusal))
            return found
        assert refusal is not None
        capability = self.plan.capabilities.compute_capability or OLDEST_OF_CUDA_13
        if capability < OLDEST_OF_CUDA_13 and bindings.cublas_version() >= 130000:
            raise UnsupportedError(f"{refusal}; {NEEDS_CUDA_12}") from refusal
        raise refusal

    @property
    def fallback(self) -> str:
        """What is done since cuBLASLt refused the plan as it is, and its words; empty if it did not."""
        return f"{_WAYS[self._way][1]}: {self._refusal}" if self._way else ""

    @property
    def last(self) -> Invocation | None:
        """What this thread ran last, None if it has run nothing, or nothing of cuBLASLt's."""
        if self._plain is not None:
            return self._plain.last
        return getattr(self._last, "invocation", None)

    def lowered(self, arguments: Arguments, way: int | None = None) -> _LoweredPlan:
        """Return the plan as it is lowered for pointers such as these; in the way in force, or another."""
        bits = arguments.bias.address if arguments.bias is not None else 0
        if self._reads_8_bits:
            bits |= arguments.a.address | arguments.b.address | arguments.out.address
            bits |= arguments.c.address if arguments.c is not None else 0
        key = (not bits % _STEP_BYTES, self._way if way is None else way)
        found = self._lowered.get(key)
        if found is None:
            made = _LoweredPlan(self.plan, arguments.a.device.index, *key)
            found = self._lowered.setdefault(key, made)
        return found


class _Term(NamedTuple):
    """One product of the schedule: the call, and what each of them adds to addresses and has as factors."""

    call: CublasLtCall
    first: int
    second: int
    factor: Number
    kept: Number
    #: By the alignment of the pointers; terms of one length share them.
    invocations: dict[int, Invocation]


class _LoweredPlan:
    """A plan in cuBLASLt's words, with the invocations for the alignments seen so far."""

    def __init__(self, plan: GemmPlan, device: int, aligned: bool, way: int) -> None:
        self._plan = plan
        call = plan.call
        if call is not None and not (aligned and not way):
            call = lower(plan, aligned=aligned, **_WAYS[way][0])
        #: None where the inner dimension is 0.
        self.call = call
        self._terms: list[_Term] = []
        #: None where cuBLASLt reads and writes the caller's arrays.
        self._staging: Staging | None = None
        #: Whether a staged product has run, which loads its kernels.
        self._has_run = False
        self.last: Invocation | None = None
        #: Beside the staging, for a workspace.
        self._room = 0
        #: Whether the addresses of two operands and a result are all that varies, and whether they are the caller's.
        self._is_alone = self.is_plain = False
        if call is None or call.staged or call.pack_a or call.pack_b:
            self._staging = Staging(plan, call, device)
        if call is None:
            return
        by_length: dict[int, dict[int, Invocation]] = {}
        for product in plan.schedule:
            known = by_length.setdefault(_length(call, product), {})
            self._terms.append(_term(call, plan.layout.k, product, known))
        #: All byte offsets, or-ed: the alignment that they leave.
        self._offset_bits = reduce(or_, chain(*byte_offsets(call)))
        self._fuses_bias = "BIAS" in call.epilogue
        self._swapped = call.swapped
        self._is_alone = (
            call.c is None
            and not self._fuses_bias
            and not (plan.problem.has_alpha and not call.staged)
            and len(call.offsets) == 1
            and not reads_k_contiguous(plan.compute_dtype)
        )
        self.is_plain = self._is_alone and self._staging is None

    def run(self, device: int, arguments: Arguments) -> Invocation | None:
        """Queue the work on the stream of the arguments and return what ran; the device is current."""
        staging = self._staging
        if staging is None:
            return self._multiply(device, arguments, _places(arguments))
        if runtime.is_capturing(arguments.stream):
            self._check_warm(device, arguments)
        room, ran = self._room, None
        kept = staging.kept(arguments)
        nbytes = staging.nbytes if kept is None else staging.bytes_beside_b
        with memory.temporary(nbytes + room, device, arguments.stream) as block:
            places, after = staging.fill(block, arguments, kept), block + nbytes
            for index in range(len(self._terms)):
                ran = self._multiply(device, arguments, places, index, (after, room))
                self._room = max(self._room, ran.algorithm.workspace_bytes)
            staging.apply_epilogue(block, arguments, _alpha(arguments), kept)
        self._has_run = True
        return ran

    def _check_warm(self, device: int, arguments: Arguments) -> None:
        """Refuse a product that would make something after its packing was queued on a stream that is captured."""
        if self._terms:
            handles.handle(device, arguments.stream)
        is_warm = self._has_run
        for term in self._terms:
            operands = self._operands(arguments, self._outside_places(arguments), term)
            alignment = alignment_of(*operands[:4], self._offset_bits)
            is_warm = is_warm and alignment in term.invocations
        if not is_warm:
            runtime.refuse_capture(arguments.stream, _ITS_ALGORITHM)

    def _multiply(
        self,
        device: int,
        arguments: Arguments,
        places: Places,
        index: int = 0,
        room: Room = NO_ROOM,
    ) -> Invocation:
        """Queue one product of the schedule."""
        stream, term = arguments.stream, self._terms[index]
        found = self._is_alone and self.multiply_alone(device, stream, places, index, room)
        if found:
            return found
        handle, operands, invocation = self._prepared(arguments, places, term)
        self.last = invocation
        invocation.run(handle, stream, operands, room)
        return invocation

    def multiply_alone(
        self, device: int, stream: int, places: Places, index: int = 0, room: Room = NO_ROOM
    ) -> Invocation | None:
        """Queue a product of which nothing but its three addresses varies; None if it is the first of its alignment."""
        (a, b, d), term = places, self._terms[index]
        first, second = (b, a) if self._swapped else (a, b)
        first += term.first
        second += term.second
        bits = ALIGNMENT_BYTES | first | second | d
        invocation = term.invocations.get(bits & -bits)
        if invocation is None:
            return None
        self.last = invocation
        handle = handles.handle(device, stream)
        invocation.queue(handle, stream, term.factor, term.kept, ((first, second, d, d),), room)
        return invocation

    def first_invocation(self, arguments: Arguments) -> Invocation:
        """Return what would run for the first product of the schedule."""
        return self._prepared(arguments, self._outside_places(arguments), self._terms[0])[-1]

    def _outside_places(self, arguments: Arguments) -> Places:
        """Return addresses of the alignment that the product will see: memory of lowprec's own is aligned."""
        call, (a, b, d) = self._terms[0].call, _places(arguments)
        return 0 if call.pack_a else a, 0 if call.pack_b else b, 0 if call.staged else d

    def tune(
        self, arguments: Arguments, candidates: int, progress: Progress | None
    ) -> tuple[Measured, ...]:
        """Measure the algorithms for the first product of the schedule, without packing and epilogue."""
        device, stream, places = arguments.a.device.index, arguments.stream, _places(arguments)
        with contextlib.ExitStack() as stack:
            if self._staging is not None:
                block = memory.temporary(self._staging.nbytes, device, stream)
                places = self._staging.fill(stack.enter_context(block), arguments)
            handle, operands, invocation = self._prepared(arguments, places, self._terms[0])
            chosen = invocation.algorithm
            try:
                measured = autotune.tune(invocation, handle, stream, operands, candidates, progress)
                chosen = measured[0].algorithm
            finally:
                invocation.use(chosen)
        return measured

    def _operands(self, arguments: Arguments, places: Places, term: _Term) -> Operands:
        """Return the addresses and factors of one product in cuBLASLt's order.

        The caller's factors are those of a staged product's epilogue.
        """
        call, (a, b, d) = term.call, places
        scale_a, scale_b = _scale_pointer(arguments.scale_a), _scale_pointer(arguments.scale_b)
        if self._swapped:
            a, b, scale_a, scale_b = b, a, scale_b, scale_a
        a += term.first
        b += term.second
        if call.staged:
            factor, kept = term.factor.value, term.kept.value
            return Operands(a, b, d, d, 0, scale_a, scale_b, factor, kept)
        c = arguments.c.address if call.c and arguments.c is not None else d
        bias = arguments.bias.address if self._fuses_bias and arguments.bias is not None else 0
        beta = arguments.beta if call.c else 0.0
        return Operands(a, b, c, d, bias, scale_a, scale_b, _alpha(arguments), beta)

    def _prepared(
        self, arguments: Arguments, places: Places, term: _Term
    ) -> tuple[int, Operands, Invocation]:
        """Return the handle, the operands, and the prepared call for pointers of their alignment."""
        plan, stream = self._plan, arguments.stream
        handle = handles.handle(arguments.a.device.index, stream)
        operands = self._operands(arguments, places, term)
        alignment = alignment_of(*operands[:4], self._offset_bits)
        found = term.invocations.get(alignment)
        if found is None:
            runtime.refuse_capture(stream, _ITS_ALGORITHM)
            # Threads that come at the same moment prepare one each, and use the first.
            made = Invocation(
                term.call, alignment, plan.capabilities.workspace_bytes, operands,
                lambda x: autotune.choose(x, handle, stream, operands),
                lambda: f"{title(plan)}, {plan.compute_type}",
            )  # fmt: skip
            found = term.invocations.setdefault(alignment, made)
        return handle, operands, found


def _term(
    whole: CublasLtCall, k: int, product: Product, invocations: dict[int, Invocation]
) -> _Term:
    """Return a product of the schedule of a plan whose inner dimension is ``k``."""
    pack_a, pack_b = whole.pack_a, whole.pack_b
    # The parts of ``a`` lie in descending order.
    parts = [
        (pack_a.parts - 1 - product.a_part) * pack_a.part_bytes if pack_a else 0,
        product.b_part * pack_b.part_bytes if pack_b else 0,
    ]
    first, second = reversed(parts) if whole.swapped else parts
    start = product.k_start
    call, before_first, before_second = whole.over(k, start, start + _length(whole, product))
    return _Term(
        call,
        first + before_first * call.first.dtype.itemsize,
        second + before_second * call.second.dtype.itemsize,
        number(product.factor, call.scale_dtype),
        number(float(product.accumulates), call.scale_dtype),
        invocations,
    )


def _length(whole: CublasLtCall, product: Product) -> int:
    """Return how far along the inner dimension a product goes: over its parts, and what pads those between."""
    length = product.k_stop - product.k_start
    if product.terms > 1:
        assert whole.pack_a is not None, "what has several parts is packed"
        length += (product.terms - 1) * whole.pack_a.part_length
    return length


def _places(arguments: Arguments) -> Places:
    return arguments.a.address, arguments.b.address, arguments.out.address


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
