"""Execution of a plan on a GPU, by the first lowering that cuBLASLt supports.

Two properties are known only in a call: the alignment of its pointers, and whether cuBLASLt supports it. An invocation
is created for each alignment and cached with the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from lowprec.backends.cuda import bindings, runtime
from lowprec.backends.cuda.libraries import cached
from lowprec.backends.cuda.lowered import LoweredPlan, Multiply
from lowprec.backends.cuda.sparse import SparseProduct
from lowprec.backends.cuda.staging import are_contiguous
from lowprec.backends.interface import Arguments
from lowprec.errors import UnsupportedError
from lowprec.planning import GemmPlan
from lowprec.planning.cublaslt.calls import STEP_BYTES, CublasLtCall
from lowprec.planning.lowering.inputs import reads_k_contiguous

_T = TypeVar("_T")

#: The first compute capability that CUDA 13 supports, and its first cuBLAS.
_OLDEST_OF_CUDA_13 = (7, 5)
_CUBLAS_OF_CUDA_13 = 130000

#: Options of the lowering with descriptions, tried in this order until cuBLASLt supports the product.
_LOWERINGS: tuple[tuple[dict[str, bool], str], ...] = (
    ({}, ""),
    ({"fuse": False}, "a kernel applies the epilogue to a staged product"),
    (
        {"fuse": False, "pad_rows": True},
        "rows are padded, and a kernel applies the epilogue to a staged product",
    ),
    ({"widen": True}, "block-scaled operands are widened"),
    (
        {"widen": True, "fuse": False},
        "block-scaled operands are widened, and a kernel applies the epilogue",
    ),
)


@cached
def _refusal(plan: GemmPlan) -> list[tuple[int, str]]:
    """Return the index of the supported lowering and the error of the first one, for all executors of a plan."""
    return [(0, "")]


class GemmExecutor:
    """Executor of a plan with a non-empty result; safe to call from several threads at once."""

    def __init__(self, plan: GemmPlan) -> None:
        capability = plan.capabilities.compute_capability or _OLDEST_OF_CUDA_13
        if capability < _OLDEST_OF_CUDA_13 and bindings.cublas_version() >= _CUBLAS_OF_CUDA_13:
            raise UnsupportedError(
                "CUDA 13 is for compute capability 7.5 and later; earlier devices (V100) need CUDA 12: lowprec's extra "
                "cuda12"
            )
        self.plan = plan
        #: ``last.invocation`` is that of the last product of this thread.
        self.last = threading.local()
        self._lowered: dict[tuple[bool, int], LoweredPlan] = {}
        self._refusal = _refusal(plan)
        self._reads_k_contiguous = plan.problem.has_blocks or reads_k_contiguous(
            plan.multiplied_dtype
        )
        #: The product of calls of which only the addresses of ``a``, ``b`` and the result vary.
        self._plain: Multiply | None = None

    def __call__(self, arguments: Arguments) -> None:
        if arguments.b.is_prepared:
            arguments.b.owner.used_on(arguments.stream)
        device = arguments.a.device.index
        if runtime.current_device() == device:
            self._run(arguments)
        else:
            with runtime.on_device(device):
                self._run(arguments)

    def _run(self, arguments: Arguments) -> None:
        last: Any = None
        sparse = self.prepared_sparse(arguments)
        if not isinstance(sparse, str):
            last = self.lowered(arguments, 0).run(arguments, sparse)
        elif self._plain is not None:
            pointers = (arguments.a.address, arguments.b.address, arguments.out.address)
            last = self._plain.queue_alone(pointers, arguments.stream)
        self.last.invocation = last or self.use(arguments, lambda x: x.run(arguments))

    def prepared_sparse(self, arguments: Arguments) -> tuple[SparseProduct, int] | str:
        """Return the product by cuSPARSELt, or the reason for a dense one, "" if the plan shows it."""
        if not arguments.b.is_sparse:
            return ""
        return self.lowered(arguments, 0).prepared_sparse(arguments)

    def use(self, arguments: Arguments, use: Callable[[LoweredPlan], _T]) -> _T:
        """Call ``use`` with the first lowering that cuBLASLt supports, and remember it; the device must be current."""
        tried: list[CublasLtCall | None] = []
        refusal: UnsupportedError | None = None
        for index in range(self._refusal[0][0], len(_LOWERINGS)):
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
            if lowered.is_plain:
                self._plain = lowered.products[0]
            return result
        assert refusal is not None
        raise refusal

    @property
    def fallback(self) -> str:
        """Description of the lowering, and cuBLASLt's error for the plan's own; empty if that is supported."""
        index, error = self._refusal[0]
        return f"{_LOWERINGS[index][1]}: {error}" if index else ""

    def lowered(self, arguments: Arguments, lowering: int | None = None) -> LoweredPlan:
        """Return the plan lowered for pointers of this alignment, by the executor's lowering or a given one."""
        read = [arguments.bias]
        if self._reads_k_contiguous:
            read += arguments[:4]
        aligned = not any(x.address % STEP_BYTES for x in read if x is not None)
        if self.plan.problem.has_blocks:
            aligned = aligned and are_contiguous(arguments)
        if lowering is None:
            lowering = self._refusal[0][0]
        key = (aligned, lowering)
        lowered = self._lowered.get(key)
        if lowered is None:
            options, _ = _LOWERINGS[lowering]
            lowered = LoweredPlan(self.plan, arguments.a.device.index, aligned, options)
            lowered = self._lowered.setdefault(key, lowered)
        return lowered
