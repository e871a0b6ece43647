"""Temporary memory for products that cuBLASLt cannot read or write in place, and the kernels that fill and empty it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from lowprec.arrays.prepared_view import Form, PreparedView
from lowprec.backends.cuda import memory, runtime
from lowprec.backends.cuda.epilogue import (
    Epilogue,
    EpilogueLauncher,
    Mender,
    prepare_epilogue,
    prepare_mending,
)
from lowprec.backends.cuda.packing import Packer, Packing, prepare_packing
from lowprec.backends.execution import Arguments
from lowprec.modes import row
from lowprec.planning import GemmPlan, MatrixStack
from lowprec.planning.calls import CublasLtCall, Pack
from lowprec.planning.layout import addend_layout
from lowprec.planning.prepared import kept_modes

_INT32_BYTES = 4
#: Of what lies in one block.
_ALIGNMENT_BYTES = 256


class KeptPacking(NamedTuple):
    """A prepared operand as it is packed: the memory, which begins with the numbers, and where the exponents are."""

    block: Any
    exponents: int


class Staging:
    """How the operands of a plan are packed and its product is written, described once for all calls.

    One block of temporary memory has room for all: the packed operands, their exponents, the product. The device is the
    current one; there is no call where the inner dimension is 0, and the product with it.
    """

    def __init__(self, plan: GemmPlan, call: CublasLtCall | None, device: int) -> None:
        layout = plan.layout
        self._kept_modes = kept_modes(plan)
        #: How ``b`` is packed, by what, its bytes and those of its exponents.
        self._packing_b: tuple[Packing, Packer, int, int] | None = None
        self._scales_b = False
        self.bytes_beside_b = 0
        #: Of the block.
        self.nbytes = 0
        #: Where it must be zero, and how far.
        self._zeros: list[tuple[int, int]] = []
        #: Of ``a`` (0) or ``b`` (1), where in the block to, and where the exponents lie.
        self._packings: list[tuple[int, Packer, int, int]] = []
        self._operands: list[int | None] = [None, None]
        self._exponents = [0, 0]
        self._product: int | None = None
        if call is None:
            dtype = plan.accumulator
            nbytes = layout.batch_count * layout.m * layout.n * dtype.itemsize
            self._product = self._zero(nbytes)
        else:
            packs = (call.pack_a, call.pack_b)
            if any(pack is not None and pack.scaled for pack in packs):
                for i, (pack, rows) in enumerate(zip(packs, (layout.m, layout.n), strict=True)):
                    scaled = pack is not None and pack.scaled
                    room = self._room if scaled else self._zero
                    self._exponents[i] = room(_INT32_BYTES * layout.batch_count * rows)
            if call.staged:
                self._product = self._room(call.product_bytes)
            for i, (stack, pack) in enumerate(zip((layout.a, layout.b), packs, strict=True)):
                # Of the block without ``b``, which is its end.
                self.bytes_beside_b = self.nbytes
                if pack is not None:
                    self._operands[i] = start = self._room(pack.nbytes)
                    found = packing(plan, stack, pack, descending=i == 0)
                    launch = prepare_packing(found, device)
                    self._packings.append((i, launch, start, self._exponents[i]))
                    if i:
                        beside = _INT32_BYTES * layout.batch_count * layout.n if pack.scaled else 0
                        self._packing_b = (found, launch, pack.nbytes, beside)
                        self._scales_b = pack.scaled
        self._write: EpilogueLauncher | None = None
        #: Of products of parts: what is not finite is computed again.
        self._mend: Mender | None = None
        if self._product is not None:
            spec = epilogue(plan, call)
            self._write = prepare_epilogue(spec, device)
            if max(plan.split) > 1:
                product = (spec.product_dtype, spec.leading_dimension)
                self._mend = prepare_mending(*product, layout.a, layout.b, device)

    def _room(self, nbytes: int) -> int:
        """Return where in the block so many bytes lie."""
        start = self.nbytes
        self.nbytes += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return start

    def _zero(self, nbytes: int) -> int:
        start = self._room(nbytes)
        self._zeros.append((start, nbytes))
        return start

    def kept(self, arguments: Arguments) -> KeptPacking | None:
        """Return a prepared ``b`` as it is packed, made with the first product; None where each packs its own.

        What a graph that is being captured makes would be the graph's, so nothing is made then. What is there it reads
        whenever it runs, so that is held for good.
        """
        view, how = arguments.b, self._packing_b
        if type(view) is not PreparedView or how is None or view.mode not in self._kept_modes:
            return None
        stream, (spec, pack, nbytes, exponents) = arguments.stream, how
        key = (spec, exponents, view.address)
        captured = runtime.is_capturing(stream)
        if captured and key not in view.forms:
            return None

        def make() -> Form:
            start = -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            block = memory.allocate(start + exponents, view.device, stream)
            pack(view.address, block.address, block.address + start, stream)
            memory.synchronize(stream, view.device)  # other streams may read it
            return Form(KeptPacking(block, block.address + start), start + exponents)

        found: KeptPacking = view.form(key, make)
        if captured:
            memory.keep((found,), stream, view.device)
        return found

    def fill(
        self, block: int, arguments: Arguments, kept: KeptPacking | None = None
    ) -> tuple[int, int, int]:
        """Queue the packing, and return where ``a`` and ``b`` lie then, and where the product goes."""
        stream = arguments.stream
        for start, nbytes in self._zeros:
            runtime.call("cudaMemsetAsync", block + start, 0, nbytes, stream)
        a, b = operands = (arguments.a.address, arguments.b.address)
        for i, pack, start, exponents in self._packings[: None if kept is None else -1]:
            pack(operands[i], block + start, block + exponents, stream)
        packed_a, packed_b = self._operands
        if packed_a is not None:
            a = block + packed_a
        if kept is not None:
            b = kept.block.address
        elif packed_b is not None:
            b = block + packed_b
        return a, b, arguments.out.address if self._product is None else block + self._product

    def apply_epilogue(
        self, block: int, arguments: Arguments, alpha: complex, kept: KeptPacking | None
    ) -> None:
        """Queue the writing of the result, where the product is staged; the operands' scales are in ``alpha``."""
        if self._write is None or self._product is None:
            return
        if self._mend is not None:
            a, b = arguments.a.address, arguments.b.address
            self._mend(block + self._product, a, b, arguments.stream)
        self._write(
            block + self._product, arguments.out.address,
            arguments.c.address if arguments.c is not None else 0,
            arguments.bias.address if arguments.bias is not None else 0,
            block + self._exponents[0],
            block + self._exponents[1] if kept is None or not self._scales_b else kept.exponents,
            alpha, arguments.beta, arguments.stream,
        )  # fmt: skip


def packing(plan: GemmPlan, stack: MatrixStack, pack: Pack, *, descending: bool) -> Packing:
    """Return how an operand is packed, with its parts; those of ``a`` in descending order."""
    source = stack.transposed if pack.transposed else stack
    if not pack.batch_shape:
        source = replace(source, batch_shape=(), batch_strides=())
    scheme, split = row(plan.scheme), pack.parts > 1
    return Packing(
        source, pack.dtype, pack.leading_dimension, pack.padded_rows, pack.scaled, pack.complex_as,
        pack.parts, scheme.part_exponent if split else 0, summed=pack.parts > scheme.parts,
        as_tf32=split and scheme.uses_tf32, side_by_side=pack.side_by_side,
        descending=split and descending,
    )  # fmt: skip


def epilogue(plan: GemmPlan, call: CublasLtCall | None) -> Epilogue:
    """Return what follows the staged product of a plan."""
    problem, layout = plan.problem, plan.layout
    c = None
    if problem.has_beta and problem.c is not None:
        c = addend_layout(problem.c, problem.a, problem.b, layout)
        assert c is not None, "the plan collapsed a batch that c cannot follow"
    product_dtype = plan.accumulator
    leading = call.d.leading_dimension if call else layout.n
    if call and product_dtype.is_complex and not call.d.dtype.is_complex:
        leading //= 2
    packs = (call.pack_a, call.pack_b) if call else ()
    return Epilogue(
        product_dtype, leading, layout.out, c, problem.bias, problem.activation,
        scaled=any(pack is not None and pack.scaled for pack in packs),
        product_rows=call.d.cols if call else layout.m,
    )  # fmt: skip
