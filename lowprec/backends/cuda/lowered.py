"""A plan lowered to steps on a GPU: packing of operands, the products by calls of cuBLASLt, and the epilogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

from lowprec.backends.cuda import autotune, handles, memory, runtime
from lowprec.backends.cuda.autotune import Measured, Progress
from lowprec.backends.cuda.invocation import (
    ALIGNMENT_BYTES,
    NO_WORKSPACE,
    Invocation,
    LtOperands,
    Workspace,
    alignment_of,
    byte_offsets,
    number,
)
from lowprec.backends.cuda.sparse import SparseProduct, prepared_product
from lowprec.backends.cuda.staging import Staging, as_codes, widened
from lowprec.backends.cuda.steps import Addresses, Step, queue_all
from lowprec.backends.interface import Arguments
from lowprec.errors import BackendError, UnsupportedError
from lowprec.planning import GemmPlan, PartProduct, ReasonKind
from lowprec.planning.cublaslt.calls import CublasLtCall
from lowprec.planning.lowering.call import lower
from lowprec.planning.lowering.inputs import reads_k_contiguous
from lowprec.planning.rendering import title
from lowprec.planning.stored import sparse_reason


class Multiply:
    """A product of the schedule, or the part of its batch that cuBLASLt multiplies in equal calls."""

    def __init__(
        self, plan: GemmPlan, device: int, whole: CublasLtCall, product: PartProduct, is_alone: bool
    ) -> None:
        self._plan = plan
        self._device = device
        #: Whether only the addresses of operands and result vary.
        self.is_alone = is_alone
        start = product.k_start
        stop = start + _length(whole, product)
        call, before_first, before_second = whole.over(plan.layout.k, start, stop)
        self._call = call
        before_first *= call.first.dtype.itemsize
        before_second *= call.second.dtype.itemsize
        #: Offsets in bytes in the packed operands.
        self._before_a, self._before_b = _ordered(call, before_first, before_second)
        if whole.pack_a:  # with its parts in descending order
            last = whole.pack_a.parts - 1
            self._before_a += (last - product.a_part) * whole.pack_a.part_bytes
        if whole.pack_b:
            self._before_b += product.b_part * whole.pack_b.part_bytes
        #: Alpha and beta of a staged product.
        self._factor = number(product.factor, whole.scale_dtype)
        self._sum_factor = number(float(product.accumulates), whole.scale_dtype)
        offsets: list[int] = []
        for part in whole.runs:
            offsets += chain.from_iterable(byte_offsets(part))
        self._alignment = alignment_of(*offsets)
        #: By alignment of the pointers, of which that of the offsets is a part; equal products share them.
        self.invocations: dict[int, Invocation] = {}

    def __call__(self, addresses: Addresses, stream: int) -> Invocation:
        """Queue the product, and return its invocation."""
        if self.is_alone:
            pointers = (addresses.packed_a, addresses.packed_b, addresses.product)
            if invocation := self.queue_alone(pointers, stream, addresses.workspace):
                return invocation
        handle, operands, invocation = self.prepared(addresses, stream)
        invocation.run(handle, stream, operands, addresses.workspace)
        return invocation

    def queue_alone(
        self, pointers: tuple[int, int, int], stream: int, workspace: Workspace = NO_WORKSPACE
    ) -> Invocation | None:
        """Queue a product of which only the addresses vary; return None if its alignment has no invocation yet."""
        a, b, d = pointers
        a += self._before_a
        b += self._before_b
        bits = ALIGNMENT_BYTES | a | b | d
        invocation = self.invocations.get(bits & -bits)
        if invocation is not None:
            handle = handles.handle(self._device, stream)
            first, second = _ordered(self._call, a, b)
            calls = ((first, second, d, d),)
            invocation.queue(handle, stream, self._factor, self._sum_factor, calls, workspace)
        return invocation

    def _operands(self, at: Addresses) -> LtOperands:
        """Return addresses and factors in cuBLASLt's order; an epilogue applies the caller's factors."""
        call = self._call
        a = at.packed_a + self._before_a
        b = at.packed_b + self._before_b
        first, second = _ordered(call, a, b)
        scales = _ordered(call, at.lt_scales_a, at.lt_scales_b)
        c = at.product
        bias = 0
        alpha = at.alpha
        beta: complex = 0.0
        if call.staged:
            alpha = self._factor.value
            beta = self._sum_factor.value
        if call.c:
            c = at.c
            beta = at.beta
        if "BIAS" in call.epilogue:
            bias = at.bias
        return LtOperands(first, second, c, at.product, bias, *scales, alpha, beta)

    def first_invocation(self, addresses: Addresses, stream: int) -> Invocation:
        """Return the invocation for these addresses of the caller's arrays; none is created during a capture."""
        # Temporary memory is fully aligned.
        if self._call.pack_a:
            addresses = addresses._replace(packed_a=0)
        if self._call.pack_b:
            addresses = addresses._replace(packed_b=0)
        if self._call.staged:
            addresses = addresses._replace(product=0)
        return self.prepared(addresses, stream)[-1]

    def prepared(self, addresses: Addresses, stream: int) -> tuple[int, LtOperands, Invocation]:
        """Return a handle, the operands, and the invocation for their alignment."""
        handle = handles.handle(self._device, stream)
        operands = self._operands(addresses)
        alignment = alignment_of(*operands[:4], self._alignment)
        invocation = self.invocations.get(alignment)
        if invocation is None:
            runtime.refuse_capture(stream, "an algorithm of cuBLASLt")
            plan = self._plan
            call = self._call
            workspace_bytes = max(plan.capabilities.workspace_bytes, call.emulation_bytes)
            invocation = Invocation(
                self._device,
                call,
                alignment,
                workspace_bytes,
                operands,
                partial(autotune.choose, handle=handle),
                f"{title(plan)}, {plan.compute_type}",
            )
            # Concurrent threads each prepare one and use the first.
            invocation = self.invocations.setdefault(alignment, invocation)
        return handle, operands, invocation


def _ordered(call: CublasLtCall, x: int, y: int) -> tuple[int, int]:
    """Return values for ``a`` and ``b`` as those for the first and second operand of a call, or the reverse."""
    return (y, x) if call.swapped else (x, y)


def _length(whole: CublasLtCall, product: PartProduct) -> int:
    """Return the length of a product along the inner dimension, including padding between parts."""
    length = product.k_stop - product.k_start
    if product.terms > 1:
        assert whole.pack_a is not None, "operands of several parts are packed"
        length += (product.terms - 1) * whole.pack_a.part_length
    return length


class LoweredPlan:
    """A plan as steps: packing, the products by calls of cuBLASLt, and the epilogue."""

    def __init__(
        self, plan: GemmPlan, device: int, aligned: bool, options: Mapping[str, bool]
    ) -> None:
        call = plan.call
        if call is not None and (options or not aligned):
            call = lower(plan, aligned=aligned, **options)
        #: None if the inner dimension is 0.
        self.call = call
        self._device = device
        #: None if cuBLASLt reads and writes the caller's arrays directly.
        self._staging: Staging | None = None
        if call is None or call.staged or call.pack_a or call.pack_b:
            self._staging = Staging(plan, call, device)
        #: The call that cuSPARSELt computes; None if there is none, or if cuSPARSELt has refused it once.
        self._sparse_call: CublasLtCall | None = None
        self._sparse_refusal = ""
        if call is not None and sparse_reason(plan, call).kind is ReasonKind.SPARSE:
            self._sparse_call = call
        #: Whether it has run before, so that the kernels of a staged product are loaded.
        self._has_run = False
        #: Workspace that is allocated together with the staging buffer.
        self._workspace_bytes = 0
        #: FP8 products without scales are legal, but PyTorch and XLA always pass them; those of FP4 are not.
        self._has_scales = False
        #: How operands are read, if one is quantised.
        self._reads: Callable[[Arguments], AbstractContextManager[Arguments]] = nullcontext
        if plan.problem.has_blocks:
            reads_codes = call is not None and call.first.codes
            self._reads = as_codes if reads_codes else widened
        #: The products of the schedule, each in as many steps as its batch needs.
        self.products: list[Multiply] = []
        #: Whether only the addresses of operands and result vary, and are those of the caller's arrays.
        self.is_plain = False
        if call is not None:
            self._add_products(plan, call)

    def _add_products(self, plan: GemmPlan, call: CublasLtCall) -> None:
        self._has_scales = call.first.dtype.is_float8 or call.first.codes is not None
        is_alone = (
            call.c is None
            and "BIAS" not in call.epilogue
            and not (plan.problem.has_alpha and not call.staged)
            and len(call.offsets) == len(call.runs) == 1
            and not (reads_k_contiguous(plan.multiplied_dtype) or call.first.codes)
        )
        known: dict[tuple[int, int], dict[int, Invocation]] = {}
        for product in plan.schedule:
            for part in call.runs:
                step = Multiply(plan, self._device, part, product, is_alone)
                extents = (_length(part, product), part.batch_count)
                step.invocations = known.setdefault(extents, {})
                self.products.append(step)
        self.is_plain = is_alone and self._staging is None and not plan.problem.has_blocks

    def _addresses(self, arguments: Arguments) -> Addresses:
        """Return the addresses of the caller's arrays."""
        a, b, out = (x.address for x in arguments[:3])
        one = memory.one(arguments.a.device) if self._has_scales else 0
        return Addresses(
            a,
            b,
            out,
            getattr(arguments.c, "address", 0),
            getattr(arguments.bias, "address", 0),
            packed_a=a,
            packed_b=b,
            product=out,
            lt_scales_a=getattr(arguments.scale_a, "address", one),
            lt_scales_b=getattr(arguments.scale_b, "address", one),
            draw_a=2 * arguments.draw,
            draw_b=2 * arguments.draw + 1,
            alpha=arguments.alpha,
            beta=arguments.beta,
        )

    def run(self, arguments: Arguments, sparse: tuple[SparseProduct, int] | None = None) -> Any:
        """Queue the work on the stream of the arguments, and return its last invocation; the device is current.

        ``sparse`` replaces the products of cuBLASLt.
        """
        with self._reads(arguments) as numbers:
            addresses = self._addresses(numbers)
            stream = numbers.stream
            products: Sequence[Step] = self.products
            if sparse is not None:
                products = [sparse[0]]
                addresses = addresses._replace(packed_b=sparse[1])
            elif (self._staging or len(products) > 1) and runtime.is_capturing(stream):
                self._check_capture(addresses, stream)
            if self._staging is None:
                last = self._multiply(products, addresses, stream)
            else:
                last = self._queue_staged(self._staging, numbers, products, addresses)
        self._has_run = True
        return last

    def _queue_staged(
        self, staging: Staging, arguments: Arguments, products: Sequence[Step], addresses: Addresses
    ) -> Any:
        stream = arguments.stream
        workspace_bytes = self._workspace_bytes
        kept_b = staging.kept_b(arguments, addresses)
        nbytes = staging.bytes_without_b if kept_b else staging.nbytes
        with memory.temporary(nbytes + workspace_bytes, self._device, stream) as block:
            addresses = addresses._replace(workspace=(block + nbytes, workspace_bytes))
            addresses = staging.queue_packing(block, addresses, stream, kept_b)
            last = self._multiply(products, addresses, stream)
            queue_all(staging.after, addresses, stream)
        return last

    def _multiply(self, products: Sequence[Step], addresses: Addresses, stream: int) -> Any:
        last = None
        for product in products:
            try:
                last = product(addresses, stream)
            except UnsupportedError as error:
                if last is None or self._staging is not None:
                    raise
                # c may be the result, a part of which is written
                raise BackendError(str(error)) from error
            if isinstance(last, Invocation):
                self._workspace_bytes = max(self._workspace_bytes, last.algorithm.workspace_bytes)
        return last

    def _check_capture(self, addresses: Addresses, stream: int) -> None:
        """Raise if the product would create objects in a capture, after its packing is queued."""
        for product in self.products:
            product.first_invocation(addresses, stream)
        if not self._has_run:
            runtime.refuse_capture(stream, "a kernel")

    def prepared_sparse(self, arguments: Arguments) -> tuple[SparseProduct, int] | str:
        """Return the product by cuSPARSELt, or the reason for a dense one, "" if the plan shows it."""
        call = self._sparse_call
        if call is None:
            return self._sparse_refusal
        try:
            return prepared_product(call, arguments, self._addresses(arguments))
        except UnsupportedError as error:
            self._sparse_refusal = f"{error}: a dense product"
            self._sparse_call = None  # last, so that other threads find the reason
            return self._sparse_refusal

    def first_invocation(self, arguments: Arguments) -> Invocation:
        with self._reads(arguments) as numbers:
            return self.products[0].first_invocation(self._addresses(numbers), numbers.stream)

    def tune(
        self, arguments: Arguments, candidates: int, progress: Progress | None
    ) -> tuple[Measured, ...]:
        """Measure the algorithms for the first product of the schedule, without packing and epilogue."""
        stream = arguments.stream
        nbytes = self._staging.nbytes if self._staging else 0
        with (
            self._reads(arguments) as numbers,
            memory.temporary(nbytes, self._device, stream) as block,
        ):
            addresses = self._addresses(numbers)
            if self._staging is not None:
                addresses = self._staging.queue_packing(block, addresses, stream, {})
            handle, operands, invocation = self.products[0].prepared(addresses, stream)
            chosen = invocation.algorithm
            try:
                measured = autotune.tune(invocation, handle, stream, operands, candidates, progress)
                chosen = measured[0].algorithm
            finally:
                invocation.use(chosen)
        return measured
