"""Temporary memory for products that cuBLASLt cannot read or write in place, and its packing and epilogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lowprec.arrays.view import ArrayView, PackedOperand
from lowprec.backends.cuda import memory, runtime
from lowprec.backends.cuda.compiling import EXPONENT_BYTES
from lowprec.backends.cuda.epilogue import Epilogue, EpilogueLauncher, Recomputer, prepare_epilogue, prepare_recomputing
from lowprec.backends.cuda.invocation import ALIGNMENT_BYTES
from lowprec.backends.cuda.packing import Packer, prepare_packing
from lowprec.backends.interface import Arguments
from lowprec.formats import DType
from lowprec.planning import GemmPlan
from lowprec.planning.cublaslt.calls import CublasLtCall, Packing
from lowprec.planning.layout import addend_layout
from lowprec.planning.stored import kept_modes


def packed_block(
    view: ArrayView, key: Any, nbytes: int, stream: int, pack: Callable[[int], None], what: str
) -> memory.Block:
    """Return memory that a stored operand keeps, for work on a stream; ``pack`` fills a new one, given its address.

    None is created during a capture, because it would belong to the graph; one that a graph reads is never released.
    """
    is_captured = runtime.is_capturing(stream)
    if is_captured and key not in view.packed:
        runtime.refuse_capture(stream, what)

    def make() -> PackedOperand:
        block = memory.allocate(nbytes, view.device, stream)
        pack(block.address)
        memory.synchronize(stream, view.device)  # because other streams may read it
        return PackedOperand(block, nbytes)

    block: memory.Block = view.packed_operand(key, make)
    block.used_on(stream)
    if is_captured:
        memory.keep((block,), stream, view.device)
    return block


class KeptPacking(NamedTuple):
    """A packed prepared operand: its memory, which begins with the elements, and the address of exponents or 0."""

    block: memory.Block
    exponents: int


class _Operand(NamedTuple):
    packing: Packing
    pack: Packer
    start: int  # in the block
    scales: int  # its exponents or scales, in the block


class Staging:
    """The packing of a plan's operands and its epilogue, prepared once for all calls.

    One block of temporary memory contains the packed operands, their exponents and the product. The device must be
    current; ``call`` is None if the inner dimension is 0.
    """

    def __init__(self, plan: GemmPlan, call: CublasLtCall | None, device: int) -> None:
        layout = plan.layout
        self._kept_modes = kept_modes(plan)
        #: Sizes of the block, with and without ``b``, which is at its end.
        self.nbytes = self.bytes_without_b = 0
        #: Starts and sizes of the ranges that are set to zero.
        self._zeros: list[tuple[int, int]] = []
        self._operands: list[_Operand | None] = [None, None]
        #: Starts of the exponents, or of the scales of quantised operands, None without.
        self._exponents: list[int | None] = [None, None]
        self._product: int | None = None
        if call is None:
            nbytes = layout.batch_count * layout.m * layout.n * plan.accumulator.itemsize
            self._product = self._zero(nbytes)
        else:
            packs = (call.pack_a, call.pack_b)
            zeros = any(pack is not None and pack.scaled and not pack.rule for pack in packs)
            scales = [self._allocate(pack.scale_bytes) if pack is not None else 0 for pack in packs]
            for i, (pack, extent) in enumerate(zip(packs, (layout.m, layout.n), strict=True)):
                if pack is not None and pack.scaled:
                    self._exponents[i] = scales[i]
                elif zeros:
                    self._exponents[i] = self._zero(EXPONENT_BYTES * layout.batch_count * extent)
            if call.staged:
                self._product = self._allocate(call.product_bytes)
            for i, pack in enumerate(packs):
                self.bytes_without_b = self.nbytes
                if pack is not None:
                    packer = prepare_packing(pack, device)
                    self._operands[i] = _Operand(pack, packer, self._allocate(pack.nbytes), scales[i])
        self._write: EpilogueLauncher | None = None
        #: Recomputes non-finite results of products of parts.
        self._recompute: Recomputer | None = None
        if self._product is not None:
            spec = epilogue(plan, call)
            self._write = prepare_epilogue(spec, device)
            if max(plan.split) > 1:
                product = (spec.product_dtype, spec.leading_dimension)
                self._recompute = prepare_recomputing(*product, layout.a, layout.b, device)

    def _allocate(self, nbytes: int) -> int:
        """Reserve ``nbytes`` in the block, and return their start."""
        start = self.nbytes
        self.nbytes += _aligned(nbytes)
        return start

    def _zero(self, nbytes: int) -> int:
        start = self._allocate(nbytes)
        self._zeros.append((start, nbytes))
        return start

    def packed_b(self, arguments: Arguments) -> KeptPacking | None:
        """Return the packed operand of a prepared ``b``; None if each product packs its own."""
        view, operand, stream = arguments.b, self._operands[1], arguments.stream
        if not view.is_prepared or operand is None or view.mode not in self._kept_modes:
            return None
        exponents = operand.packing.scale_bytes
        key = (operand.packing, exponents, view.address)
        if key not in view.packed and runtime.is_capturing(stream):
            return None
        start, draw = _aligned(operand.packing.nbytes), _draw(operand, arguments, 1)

        def pack(at: int) -> None:
            operand.pack(view.address, at, at + start, stream, *draw)

        block = packed_block(view, key, start + exponents, stream, pack, "the packed b")
        return KeptPacking(block, block.address + start if operand.packing.scaled else 0)

    def fill(self, block: int, arguments: Arguments, packed_b: KeptPacking | None = None) -> tuple[int, int, int]:
        """Queue the packing, and return the addresses of ``a``, ``b`` and the product."""
        stream = arguments.stream
        for start, nbytes in self._zeros:
            runtime.call("cudaMemsetAsync", block + start, 0, nbytes, stream)
        pointers = [arguments.a.address, arguments.b.address]
        for i, operand in enumerate(self._operands):
            if i and packed_b is not None:
                pointers[i] = packed_b.block.address
            elif operand is not None:
                target = block + operand.start
                scales = block + operand.scales
                operand.pack(pointers[i], target, scales, stream, *_draw(operand, arguments, i))
                pointers[i] = target
        product = arguments.out.address if self._product is None else block + self._product
        return pointers[0], pointers[1], product

    def with_scales(self, block: int, arguments: Arguments, packed_b: KeptPacking | None = None) -> Arguments:
        """Return arguments with the scales of quantised operands, if cuBLASLt applies them."""
        operands = [x for x in self._operands if x is not None and x.packing.scale_mode]
        if not operands:
            return arguments
        addresses = [block + x.scales for x in operands]
        if packed_b is not None:
            addresses[1] = packed_b.exponents
        addresses = [at + EXPONENT_BYTES * x.packing.factor_words for at, x in zip(addresses, operands, strict=True)]
        device = arguments.a.device
        a, b = (ArrayView(DType.FLOAT32, (1,), (1,), device, None, True, address) for address in addresses)
        return arguments._replace(scale_a=a, scale_b=b)

    def apply_epilogue(self, block: int, arguments: Arguments, packed_b: KeptPacking | None) -> None:
        """Queue the epilogue of a staged product; alpha includes the operands' scales."""
        if self._write is None or self._product is None:
            return
        if self._recompute is not None:
            a, b = arguments.a.address, arguments.b.address
            self._recompute(block + self._product, a, b, arguments.stream)
        rows, cols = (0 if at is None else block + at for at in self._exponents)
        if packed_b is not None and packed_b.exponents:
            cols = packed_b.exponents
        self._write(
            block + self._product, arguments.out.address,
            arguments.c.address if arguments.c is not None else 0,
            arguments.bias.address if arguments.bias is not None else 0,
            rows, cols, arguments.alpha, arguments.beta, arguments.stream,
        )  # fmt: skip


def _draw(operand: _Operand, arguments: Arguments, number: int) -> tuple[int, ...]:
    """Return the number of the random numbers of a quantised operand (`Rule.drawn`), nothing for others."""
    return (2 * arguments.draw + number,) if operand.packing.rule else ()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _factors(pack: Packing | None) -> int:
    if pack is None or not (pack.scaled and pack.rule) or (pack.scale_mode and not pack.factor_words):
        return 0
    return 2 if pack.source.batch_shape else 1


def epilogue(plan: GemmPlan, call: CublasLtCall | None) -> Epilogue:
    problem, layout = plan.problem, plan.layout
    c = None
    if problem.has_beta and problem.c is not None:
        c = addend_layout(problem.c, problem.a, problem.b, layout)
        assert c is not None, "the plan collapsed a batch that c cannot follow"
    # Sums of int8 codes are int32, and float32 with their scales.
    product_dtype = call.scale_dtype if call and plan.quantized else plan.accumulator
    leading = call.d.leading_dimension if call else layout.n
    if call and product_dtype.is_complex and not call.d.dtype.is_complex:
        leading //= 2
    packs = (call.pack_a, call.pack_b) if call else (None, None)
    return Epilogue(
        product_dtype, leading, layout.out, c, problem.bias, problem.activation,
        scaled=any(pack is not None and pack.scaled and not pack.rule for pack in packs),
        factors=(_factors(packs[0]), _factors(packs[1])),
        product_rows=call.d.cols if call else layout.m,
    )  # fmt: skip
