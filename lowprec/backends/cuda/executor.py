"""Execution of a plan on a GPU: packing of operands, the products, and the epilogue.

Two properties are known only in a call: the alignment of its pointers, and whether cuBLASLt supports it. An invocation
is created for each alignment and cached with the plan.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import chain
from operator import or_
from typing import NamedTuple, TypeAlias, TypeVar

from lowprec.arrays import ArrayView
from lowprec.backends.cuda import autotune, bindings, handles, memory, quantized_operands, runtime
from lowprec.backends.cuda.autotune import Measured, Progress
from lowprec.backends.cuda.compiling import NEEDS_CUDA_12, OLDEST_OF_CUDA_13
from lowprec.backends.cuda.invocation import (
    ALIGNMENT_BYTES,
    NO_WORKSPACE,
    GemmEx,
    Invocation,
    Number,
    Operands,
    Workspace,
    alignment_of,
    byte_offsets,
    number,
)
from lowprec.backends.cuda.libraries import cached
from lowprec.backends.cuda.sparse import SparseCall, SparseInvocation, SparseProducts
from lowprec.backends.cuda.staging import Staging
from lowprec.backends.interface import Arguments
from lowprec.errors import BackendError, UnsupportedError
from lowprec.planning import GemmPlan, Product
from lowprec.planning.cublaslt.calls import CublasLtCall
from lowprec.planning.cublaslt.lowering import lower, reads_k_contiguous
from lowprec.planning.rendering import title

_T = TypeVar("_T")

#: A product of cuBLASLt, or of cuBLAS.
AnyInvocation: TypeAlias = Invocation | GemmEx

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
    ({"gemm_ex": True}, "cublasGemmEx multiplies packed operands"),
)


@cached
def _refusal(plan: GemmPlan) -> list[tuple[int, str]]:
    """Return the index of the supported lowering and the error of the first one, for all executors of a plan."""
    return [(0, "")]


class GemmExecutor:
    """Executor of a plan with a non-empty result; safe to call from several threads at once."""

    def __init__(self, plan: GemmPlan) -> None:
        self.plan = plan
        self._lowered: dict[tuple[bool, int], _LoweredPlan] = {}
        self._refusal = _refusal(plan)
        self._reads_k_contiguous = plan.problem.has_blocks or reads_k_contiguous(plan.multiplied_dtype)
        self._is_float8 = plan.multiplied_dtype.is_float8
        capability = plan.capabilities.compute_capability or OLDEST_OF_CUDA_13
        self._needs_cuda_12 = capability < OLDEST_OF_CUDA_13 and bindings.cublas_version() >= 130000
        self._last = threading.local()
        self._plain: _LoweredPlan | None = None

    def __call__(self, arguments: Arguments) -> None:
        device, b = arguments.a.device.index, arguments.b
        plain, pointers = self._plain, _pointers(arguments)
        if b.is_prepared:
            b.owner.used_on(arguments.stream)
            plain = None if b.is_sparse else plain
        if runtime.current_device() == device:
            if plain is None or not plain.multiply_alone(device, arguments.stream, pointers):
                self._run(device, arguments)
            return
        with runtime.on_device(device):
            self._run(device, arguments)

    def _run(self, device: int, arguments: Arguments) -> None:
        if arguments.b.is_sparse:
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
        for index in range(self._refusal[0][0], len(_LOWERINGS) - (self._needs_cuda_12 or self._is_float8)):
            lowered = self.lowered(arguments, index)
            if lowered.call in tried:
                continue
            tried.append(lowered.call)
            try:
                result = use(lowered)
            except UnsupportedError as error:
                refusal = refusal or error
                continue
            if refusal is not None:
                self._refusal[0] = (index, str(refusal))
            return result
        assert refusal is not None
        if self._needs_cuda_12:
            raise UnsupportedError(f"{refusal}; {NEEDS_CUDA_12}") from refusal
        raise refusal

    @property
    def fallback(self) -> str:
        """Description of the lowering, and cuBLASLt's error for the plan's own; empty if that is supported."""
        index, error = self._refusal[0]
        return f"{_LOWERINGS[index][1]}: {error}" if index else ""

    @property
    def last(self) -> AnyInvocation | SparseInvocation | None:
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
        key = (not bits % _STEP_BYTES, self._refusal[0][0] if lowering is None else lowering)
        lowered = self._lowered.get(key)
        if lowered is None:
            lowered = self._lowered.setdefault(key, _LoweredPlan(self.plan, arguments.a.device.index, *key))
        return lowered


class _Term(NamedTuple):
    call: CublasLtCall
    #: Offsets in bytes in the first and the second operand.
    first: int
    second: int
    #: Alpha and beta of a staged product.
    factor: Number
    sum_factor: Number
    #: By alignment of the pointers; shared by terms of the same length.
    invocations: dict[int, AnyInvocation]


class _LoweredPlan:
    """A plan as calls of cuBLASLt, with cached invocations by alignment."""

    def __init__(self, plan: GemmPlan, device: int, aligned: bool, lowering: int) -> None:
        self._plan = plan
        call = plan.call
        if call is not None and (lowering or not aligned):
            call = lower(plan, aligned=aligned, **_LOWERINGS[lowering][0])
        #: None if the inner dimension is 0.
        self.call = call
        #: The products of the schedule, each in as many calls as its batch needs.
        self._terms: list[_Term] = []
        #: None if cuBLASLt reads and writes the caller's arrays directly.
        self._staging: Staging | None = None
        #: Whether it has run before, so that the kernels of a staged product are loaded.
        self._has_run = False
        self.last: AnyInvocation | None = None
        #: Workspace that is allocated together with the staging buffer.
        self._workspace_bytes = 0
        #: is_alone: only the addresses of operands and result vary. is_plain: these are also the caller's arrays.
        self._is_alone = self.is_plain = False
        #: How operands are read, if one is quantised.
        self._has_blocks = call is not None and plan.problem.has_blocks
        on_codes = self._has_blocks and call is not None and call.first.codes
        self._reads = quantized_operands.as_codes if on_codes else quantized_operands.widened
        if call is None or call.staged or call.pack_a or call.pack_b:
            self._staging = Staging(plan, call, device)
        #: The products whose ``b`` is sparse.
        self.sparse = SparseProducts(plan, call, self._staging)
        if call is None:
            return
        known: dict[tuple[int, int], dict[int, AnyInvocation]] = {}
        for product in plan.schedule:
            for part in call.parts:
                invocations = known.setdefault((_length(part, product), part.batch_count), {})
                self._terms.append(_term(part, plan.layout.k, product, invocations))
        #: Bitwise or of all byte offsets, for alignment.
        self._offset_bits = reduce(or_, chain(*(at for part in call.parts for at in byte_offsets(part))))
        self._fuses_bias = "BIAS" in call.epilogue
        self._swapped = call.swapped
        self._is_alone = (
            call.c is None
            and not self._fuses_bias
            and not (plan.problem.has_alpha and not call.staged)
            and len(call.offsets) == len(call.parts) == 1
            and not (reads_k_contiguous(plan.multiplied_dtype) or call.first.codes)
        )
        self.is_plain = self._is_alone and self._staging is None and not self._has_blocks

    def run(self, device: int, arguments: Arguments, sparse: SparseCall | None = None) -> AnyInvocation | None:
        """Queue the work on the stream of the arguments, and return its last invocation; the device is current."""
        if not self._has_blocks:
            return self._run(device, arguments, sparse)
        with self._reads(arguments) as numbers:
            return self._run(device, numbers, sparse)

    def _run(self, device: int, arguments: Arguments, sparse: SparseCall | None) -> AnyInvocation | None:
        staging, several, last = self._staging, len(self._terms) > 1, None
        if (staging is not None or several) and runtime.is_capturing(arguments.stream):
            self._check_warm(device, arguments, () if sparse else self._terms)
        if staging is None:
            for index in range(len(self._terms)):
                try:
                    last = self._multiply(device, arguments, _pointers(arguments), index, sparse=sparse)
                except UnsupportedError as error:
                    if not index:
                        raise
                    raise BackendError(str(error)) from error  # c may be the result, a part of which is written
            self._has_run = True
            return last
        workspace_bytes, packed_b = self._workspace_bytes, staging.packed_b(arguments)
        nbytes = staging.nbytes if packed_b is None else staging.bytes_without_b
        with memory.temporary(nbytes + workspace_bytes, device, arguments.stream) as block:
            pointers = staging.fill(block, arguments, packed_b)
            arguments = staging.with_scales(block, arguments, packed_b)
            workspace = (block + nbytes, workspace_bytes)
            for index in range(len(self._terms)):
                last = self._multiply(device, arguments, pointers, index, workspace, sparse)
                self._workspace_bytes = max(self._workspace_bytes, last.algorithm.workspace_bytes if last else 0)
            staging.apply_epilogue(block, arguments, packed_b)
        self._has_run = True
        return last

    def _check_warm(self, device: int, arguments: Arguments, terms: Sequence[_Term]) -> None:
        """Raise during a capture if the product would create objects after its packing is queued."""
        if terms:
            handles.handle(device, arguments.stream)
        pointers = self._aligned_pointers(arguments) if terms else (0, 0, 0)
        operands = [self._operands(arguments, pointers, term) for term in terms]
        alignments = [alignment_of(*x[:4], self._offset_bits) for x in operands]
        known = all(x in term.invocations for x, term in zip(alignments, terms, strict=True))
        if not (self._has_run and known):
            runtime.refuse_capture(arguments.stream, "an algorithm of cuBLASLt")

    def _multiply(
        self, device: int, arguments: Arguments, pointers: Pointers, index: int = 0,
        workspace: Workspace = NO_WORKSPACE, sparse: SparseCall | None = None,
    ) -> AnyInvocation | None:  # fmt: skip
        if sparse is not None:  # which has one term
            sparse.run(arguments, pointers, staged=bool(self._terms[0].call.staged))
            return None
        stream = arguments.stream
        if self._is_alone and (invocation := self.multiply_alone(device, stream, pointers, index, workspace)):
            return invocation
        handle, operands, self.last = self._prepared(arguments, pointers, self._terms[index])
        self.last.run(handle, stream, operands, workspace)
        return self.last

    def multiply_alone(
        self, device: int, stream: int, pointers: Pointers, index: int = 0, workspace: Workspace = NO_WORKSPACE
    ) -> AnyInvocation | None:
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
        invocation.queue(handle, stream, term.factor, term.sum_factor, addresses, workspace)
        return invocation

    def first_invocation(self, arguments: Arguments) -> AnyInvocation:
        with self._reads(arguments) as numbers:
            return self._prepared(numbers, self._aligned_pointers(numbers), self._terms[0])[-1]

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
                block = stack.enter_context(memory.temporary(self._staging.nbytes, device, stream))
                pointers = self._staging.fill(block, arguments)
                arguments = self._staging.with_scales(block, arguments)
            handle, operands, invocation = self._prepared(arguments, pointers, self._terms[0])
            if isinstance(invocation, GemmEx):
                return ()
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
        # FP8 products without scales are legal, but PyTorch and XLA always pass them; those of FP4 are not.
        scale = memory.one(arguments.a.device) if call.first.dtype.is_float8 or call.first.codes else 0
        scales = arguments.scale_a, arguments.scale_b
        scale_a, scale_b = (x.address if isinstance(x, ArrayView) else scale for x in scales)
        if self._swapped:
            a, b, scale_a, scale_b = b, a, scale_b, scale_a
        a += term.first
        b += term.second
        if call.staged:
            return Operands(a, b, d, d, 0, scale_a, scale_b, term.factor.value, term.sum_factor.value)
        c = arguments.c.address if call.c and arguments.c is not None else d
        bias = arguments.bias.address if self._fuses_bias and arguments.bias is not None else 0
        beta = arguments.beta if call.c else 0.0
        return Operands(a, b, c, d, bias, scale_a, scale_b, arguments.alpha, beta)

    def _prepared(self, arguments: Arguments, pointers: Pointers, term: _Term) -> tuple[int, Operands, AnyInvocation]:
        plan, stream = self._plan, arguments.stream
        handle = handles.handle(arguments.a.device.index, stream)
        operands = self._operands(arguments, pointers, term)
        alignment = alignment_of(*operands[:4], self._offset_bits)
        invocation = term.invocations.get(alignment)
        if invocation is None:
            runtime.refuse_capture(stream, "an algorithm of cuBLASLt")
            call, product = term.call, f"{title(plan)}, {plan.compute_type}"
            workspace_bytes = max(plan.capabilities.workspace_bytes, call.emulation_bytes)
            if call.gemm_ex:
                invocation = GemmEx(call, workspace_bytes, product)
            else:
                choose = partial(autotune.choose, handle=handle)
                invocation = Invocation(call, alignment, workspace_bytes, operands, choose, product)
            # Concurrent threads each prepare one and use the first.
            invocation = term.invocations.setdefault(alignment, invocation)
        return handle, operands, invocation


def _term(whole: CublasLtCall, k: int, product: Product, invocations: dict[int, AnyInvocation]) -> _Term:
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
