"""Execution of a plan on a GPU: packing of operands, the products, and the epilogue.

Two properties are known only in a call: the alignment of its pointers, and whether cuBLASLt supports it. An invocation
is created for each alignment and cached with the plan.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from typing import NamedTuple, TypeAlias, TypeVar

from lowprec.arrays import ArrayView
from lowprec.arrays.prepared_view import PreparedView
from lowprec.backends.cuda import autotune, bindings, handles, memory, quantized_operands, runtime
from lowprec.backends.cuda.compiling import NEEDS_CUDA_12, OLDEST_OF_CUDA_13
from lowprec.backends.cuda.invocation import (
    ALIGNMENT_BYTES,
    NO_WORKSPACE,
    Invocation,
    Number,
    Operands,
    Workspace,
    alignment_of,
    byte_offsets,
    number,
)
from lowprec.backends.cuda.measuring import Measured, Progress
from lowprec.backends.cuda.sparse import SparseCall, SparseInvocation, SparseProducts
from lowprec.backends.cuda.staging import Staging
from lowprec.backends.execution import Arguments
from lowprec.errors import UnsupportedError
from lowprec.planning import GemmPlan, Product
from lowprec.planning.calls import CublasLtCall
from lowprec.planning.lowering import lower, reads_k_contiguous
from lowprec.planning.rendering import title

_T = TypeVar("_T")

#: Addresses of ``a``, ``b`` and the product.
Pointers: TypeAlias = tuple[int, int, int]

#: Pointers of 8-bit types, and those of a fused bias, must be multiples of this.
_STEP_BYTES = 16

#: Options of the lowering with descriptions, tried in this order until cuBLASLt supports the product.
_LOWERINGS: tuple[tuple[dict[str, bool], str], ...] = (
    ({}, ""),
    ({"fuse": False}, "a kernel applies the epilogue to a staged product"),
    ({"fuse": False, "pad_rows": True}, "rows are padded, and a kernel applies the epilogue to a staged product"),
    ({"widen": True}, "block-scaled operands are widened"),
    ({"widen": True, "fuse": False}, "block-scaled operands are widened, and a kernel applies the epilogue"),
)

#: By plan: the index of the supported lowering, and cuBLASLt's error for the first one.
_refused: dict[GemmPlan, tuple[int, str]] = {}
_MOST_REFUSED = 4096

_ITS_ALGORITHM = "an algorithm of cuBLASLt"


class GemmExecutor:
    """Executor of a plan with a non-empty result; safe to call from several threads at once."""

    def __init__(self, plan: GemmPlan) -> None:
        self.plan = plan
        self._lowered: dict[tuple[bool, int], _LoweredPlan] = {}
        self._lowering, self._refusal = _refused.get(plan, (0, ""))
        self._reads_k_contiguous = plan.problem.has_blocks or reads_k_contiguous(plan.compute_dtype)
        self._last = threading.local()
        self._plain: _LoweredPlan | None = None

    def __call__(self, arguments: Arguments) -> None:
        """Queue the product on the stream of its arguments."""
        device, b = arguments.a.device.index, arguments.b
        if runtime.current_device() == device:
            plain, pointers = self._plain, _pointers(arguments)
            if type(b) is PreparedView and b.is_sparse:
                plain = None
            if plain is None or not plain.multiply_alone(device, arguments.stream, pointers):
                self._run(device, arguments)
            return
        with runtime.on_device(device):
            self._run(device, arguments)

    def _run(self, device: int, arguments: Arguments) -> None:
        if type(arguments.b) is PreparedView and arguments.b.is_sparse:
            lowered = self.lowered(arguments, 0)
            sparse = lowered.sparse.call(arguments)
            if not isinstance(sparse, str):
                lowered.run(device, arguments, sparse)
                self._last.invocation, self._plain = sparse.invocation, None
                return

        def run(lowered: _LoweredPlan) -> None:
            self._last.invocation = lowered.run(device, arguments)
            if lowered.is_plain:
                self._plain = lowered

        self.use(arguments, run)

    def use(self, arguments: Arguments, use: Callable[[_LoweredPlan], _T]) -> _T:
        """Call ``use`` with the first lowering that cuBLASLt supports, and remember it; the device must be current."""
        tried: list[CublasLtCall | None] = []
        refusal: UnsupportedError | None = None
        for index in range(self._lowering, len(_LOWERINGS)):
            lowered = self.lowered(arguments, index)
            if lowered.call in tried:
                continue
            tried.append(lowered.call)
            try:
                found = use(lowered)
            except UnsupportedError as error:
                refusal = refusal or error
                continue
            if refusal is not None:
                self._lowering, self._refusal = index, str(refusal)
                if len(_refused) >= _MOST_REFUSED:
                    _refused.clear()
                _refused[self.plan] = (index, str(refusal))
            return found
        assert refusal is not None
        capability = self.plan.capabilities.compute_capability or OLDEST_OF_CUDA_13
        if capability < OLDEST_OF_CUDA_13 and bindings.cublas_version() >= 130000:
            raise UnsupportedError(f"{refusal}; {NEEDS_CUDA_12}") from refusal
        raise refusal

    @property
    def fallback(self) -> str:
        """Description of the lowering, and cuBLASLt's error for the plan's own; empty if that is supported."""
        return f"{_LOWERINGS[self._lowering][1]}: {self._refusal}" if self._lowering else ""

    @property
    def last(self) -> Invocation | SparseInvocation | None:
        """The last invocation by this thread, None if there is none."""
        if self._plain is not None:
            return self._plain.last
        return getattr(self._last, "invocation", None)

    def lowered(self, arguments: Arguments, lowering: int | None = None) -> _LoweredPlan:
        """Return the plan lowered for pointers of this alignment, by the executor's lowering or a given one."""
        bits = arguments.bias.address if arguments.bias is not None else 0
        if self._reads_k_contiguous:
            bits |= arguments.a.address | arguments.b.address | arguments.out.address
            bits |= arguments.c.address if arguments.c is not None else 0
            bits |= self.plan.problem.has_blocks and not quantized_operands.are_contiguous(arguments)
        key = (not bits % _STEP_BYTES, self._lowering if lowering is None else lowering)
        found = self._lowered.get(key)
        if found is None:
            made = _LoweredPlan(self.plan, arguments.a.device.index, *key)
            found = self._lowered.setdefault(key, made)
        return found


class _Term(NamedTuple):
    call: CublasLtCall
    #: Offsets in bytes in the first and the second operand.
    first: int
    second: int
    #: Alpha and beta of a staged product.
    factor: Number
    kept: Number
    #: By alignment of the pointers; shared by terms of the same length.
    invocations: dict[int, Invocation]


class _LoweredPlan:
    """A plan as calls of cuBLASLt, with cached invocations by alignment."""

    def __init__(self, plan: GemmPlan, device: int, aligned: bool, lowering: int) -> None:
        self._plan = plan
        call = plan.call
        if call is not None and not (aligned and not lowering):
            call = lower(plan, aligned=aligned, **_LOWERINGS[lowering][0])
        #: None if the inner dimension is 0.
        self.call = call
        self._terms: list[_Term] = []
        #: None if cuBLASLt reads and writes the caller's arrays directly.
        self._staging: Staging | None = None
        #: Whether a staged product has run before, so that its kernels are loaded.
        self._has_run = False
        self.last: Invocation | None = None
        #: Workspace that is allocated together with the staging buffer.
        self._workspace_bytes = 0
        #: is_alone: only the addresses of operands and result vary. is_plain: these are also the caller's arrays.
        self._is_alone = self.is_plain = False
        #: How operands are read, if one is quantised.
        self._reads = quantized_operands.as_codes if call and call.first.codes else quantized_operands.widened
        self._has_blocks = call is not None and plan.problem.has_blocks
        if call is None or call.staged or call.pack_a or call.pack_b:
            self._staging = Staging(plan, call, device)
        #: The products whose ``b`` is sparse.
        self.sparse = SparseProducts(plan, call, self._staging)
        if call is None:
            return
        by_length: dict[int, dict[int, Invocation]] = {}
        for product in plan.schedule:
            known = by_length.setdefault(_length(call, product), {})
            self._terms.append(_term(call, plan.layout.k, product, known))
        #: Bitwise or of all byte offsets, for alignment.
        self._offset_bits = reduce(or_, chain(*byte_offsets(call)))
        self._fuses_bias = "BIAS" in call.epilogue
        self._swapped = call.swapped
        self._is_alone = (
            call.c is None
            and not self._fuses_bias
            and not (plan.problem.has_alpha and not call.staged)
            and len(call.offsets) == 1
            and not (reads_k_contiguous(plan.compute_dtype) or call.first.codes)
        )
        self.is_plain = self._is_alone and self._staging is None and not self._has_blocks

    def run(self, device: int, arguments: Arguments, sparse: SparseCall | None = None) -> Invocation | None:
        """Queue the work on the stream of the arguments, and return its last invocation; the device is current."""
        if not self._has_blocks:
            return self._run(device, arguments, sparse)
        with self._reads(arguments) as read:
            return self._run(device, read, sparse)

    def _run(self, device: int, arguments: Arguments, sparse: SparseCall | None) -> Invocation | None:
        staging = self._staging
        if staging is None:
            return self._multiply(device, arguments, _pointers(arguments), sparse=sparse)
        if runtime.is_capturing(arguments.stream):
            self._check_warm(device, arguments, () if sparse else self._terms)
        workspace_bytes, ran = self._workspace_bytes, None
        packed_b = staging.packed_b(arguments)
        nbytes = staging.nbytes if packed_b is None else staging.bytes_without_b
        with memory.temporary(nbytes + workspace_bytes, device, arguments.stream) as block:
            pointers = staging.fill(block, arguments, packed_b)
            workspace = (block + nbytes, workspace_bytes)
            for index in range(len(self._terms)):
                ran = self._multiply(device, arguments, pointers, index, workspace, sparse)
                self._workspace_bytes = max(self._workspace_bytes, ran.algorithm.workspace_bytes if ran else 0)
            staging.apply_epilogue(block, arguments, arguments.alpha, packed_b)
        self._has_run = True
        return ran

    def _check_warm(self, device: int, arguments: Arguments, terms: Sequence[_Term]) -> None:
        """Raise during a capture if the product would create objects after its packing is queued."""
        if terms:
            handles.handle(device, arguments.stream)
        is_warm = self._has_run
        for term in terms:
            operands = self._operands(arguments, self._aligned_pointers(arguments), term)
            alignment = alignment_of(*operands[:4], self._offset_bits)
            is_warm = is_warm and alignment in term.invocations
        if not is_warm:
            runtime.refuse_capture(arguments.stream, _ITS_ALGORITHM)

    def _multiply(
        self, device: int, arguments: Arguments, pointers: Pointers, index: int = 0,
        workspace: Workspace = NO_WORKSPACE, sparse: SparseCall | None = None,
    ) -> Invocation | None:  # fmt: skip
        if sparse is not None:  # which has one term
            sparse.run(arguments, pointers, staged=bool(self._terms[0].call.staged))
            return None
        stream = arguments.stream
        found = self._is_alone and self.multiply_alone(device, stream, pointers, index, workspace)
        if found:
            return found
        handle, operands, invocation = self._prepared(arguments, pointers, self._terms[index])
        self.last = invocation
        invocation.run(handle, stream, operands, workspace)
        return invocation

    def multiply_alone(
        self, device: int, stream: int, pointers: Pointers, index: int = 0, workspace: Workspace = NO_WORKSPACE
    ) -> Invocation | None:
        """Queue a product of which only the addresses vary; return None if its alignment has no invocation yet."""
        (a, b, d), term = pointers, self._terms[index]
        first, second = (b, a) if self._swapped else (a, b)
        first += term.first
        second += term.second
        bits = ALIGNMENT_BYTES | first | second | d
        invocation = term.invocations.get(bits & -bits)
        if invocation is None:
            return None
        self.last = invocation
        handle = handles.handle(device, stream)
        addresses = ((first, second, d, d),)
        invocation.queue(handle, stream, term.factor, term.kept, addresses, workspace)
        return invocation

    def first_invocation(self, arguments: Arguments) -> Invocation:
        """Return the invocation for the first product of the schedule."""
        with self._reads(arguments) as read:
            return self._prepared(read, self._aligned_pointers(read), self._terms[0])[-1]

    def _aligned_pointers(self, arguments: Arguments) -> Pointers:
        """Return addresses with the alignment of the product's pointers; temporary memory is fully aligned."""
        call, (a, b, d) = self._terms[0].call, _pointers(arguments)
        return 0 if call.pack_a else a, 0 if call.pack_b else b, 0 if call.staged else d

    def tune(self, arguments: Arguments, candidates: int, progress: Progress | None) -> tuple[Measured, ...]:
        """Measure the algorithms for the first product of the schedule, without packing and epilogue."""
        device, stream = arguments.a.device.index, arguments.stream
        with contextlib.ExitStack() as stack:
            arguments = stack.enter_context(self._reads(arguments))
            pointers = _pointers(arguments)
            if self._staging is not None:
                block = memory.temporary(self._staging.nbytes, device, stream)
                pointers = self._staging.fill(stack.enter_context(block), arguments)
            handle, operands, invocation = self._prepared(arguments, pointers, self._terms[0])
            chosen = invocation.algorithm
            try:
                measured = autotune.tune(invocation, handle, stream, operands, candidates, progress)
                chosen = measured[0].algorithm
            finally:
                invocation.use(chosen)
        return measured

    def _operands(self, arguments: Arguments, pointers: Pointers, term: _Term) -> Operands:
        """Return one product's addresses and factors in cuBLASLt's order; an epilogue applies the caller's factors."""
        call, (a, b, d) = term.call, pointers
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
        return Operands(a, b, c, d, bias, scale_a, scale_b, arguments.alpha, beta)

    def _prepared(self, arguments: Arguments, pointers: Pointers, term: _Term) -> tuple[int, Operands, Invocation]:
        """Return the handle, the operands, and the invocation for their alignment."""
        plan, stream = self._plan, arguments.stream
        handle = handles.handle(arguments.a.device.index, stream)
        operands = self._operands(arguments, pointers, term)
        alignment = alignment_of(*operands[:4], self._offset_bits)
        found = term.invocations.get(alignment)
        if found is None:
            runtime.refuse_capture(stream, _ITS_ALGORITHM)
            # Concurrent threads each prepare one and use the first.
            made = Invocation(
                term.call, alignment, max(plan.capabilities.workspace_bytes, term.call.emulation_bytes), operands,
                lambda x: autotune.choose(x, handle, stream, operands),
                lambda: f"{title(plan)}, {plan.compute_type}",
            )  # fmt: skip
            found = term.invocations.setdefault(alignment, made)
        return handle, operands, found


def _term(whole: CublasLtCall, k: int, product: Product, invocations: dict[int, Invocation]) -> _Term:
    """Return a product of the schedule, for a plan with inner dimension ``k``."""
    pack_a, pack_b = whole.pack_a, whole.pack_b
    # The parts of ``a`` are in descending order.
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
    """Return the length of a product along the inner dimension, including padding between parts."""
    length = product.k_stop - product.k_start
    if product.terms > 1:
        assert whole.pack_a is not None, "operands of several parts are packed"
        length += (product.terms - 1) * whole.pack_a.part_length
    return length


def _pointers(arguments: Arguments) -> Pointers:
    return arguments.a.address, arguments.b.address, arguments.out.address


def _scale_pointer(scale: ArrayView | float | None) -> int:
    """Return the address of a scale in device memory, 0 for none."""
    return scale.address if isinstance(scale, ArrayView) else 0
