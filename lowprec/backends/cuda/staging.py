"""Temporary memory for products that cuBLASLt cannot read or write in place, and its packing and epilogue.

Quantised operands are read as their numbers, widened, or as their codes, with scales in the order of cuBLASLt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from lowprec.arrays import Device, Library, library_of
from lowprec.arrays.quantized import QuantizedArray, codes_view
from lowprec.arrays.view import ArrayView, PackedOperand
from lowprec.backends.cuda import memory, runtime
from lowprec.backends.cuda.compiling import EXPONENT_BYTES
from lowprec.backends.cuda.epilogue import Epilogue, prepare_epilogue, prepare_recomputing
from lowprec.backends.cuda.invocation import ALIGNMENT_BYTES
from lowprec.backends.cuda.packing import prepare_packing
from lowprec.backends.cuda.steps import Addresses, Step, queue_all, zeros
from lowprec.backends.interface import Arguments
from lowprec.formats import DType
from lowprec.planning import GemmPlan, MatrixStack
from lowprec.planning.cublaslt.calls import CublasLtCall, Packing
from lowprec.planning.layout import GemmLayout, addend_layout
from lowprec.planning.stored import kept_modes
from lowprec.util.strides import contiguous_strides

#: Rows and columns of a tile of scales; rows with this distance are adjacent in it.
_ROWS = 128
_COLUMNS = 4
_APART = 32


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
        return block, nbytes

    block: memory.Block = view.packed_operand(key, make)
    block.used_on(stream)
    if is_captured:
        memory.keep((block,), stream, view.device)
    return block


class Staging:
    """The temporary memory of a plan, and the steps before and after its multiplication, prepared once for all calls.

    One block contains scales, the product, and the packed operands, ``b`` last. The device must be current; ``call`` is
    None if the inner dimension is 0.
    """

    def __init__(self, plan: GemmPlan, call: CublasLtCall | None, device: int) -> None:
        layout = plan.layout
        self._kept_modes = kept_modes(plan)
        #: Sizes of the block, with and without ``b``, which is at its end.
        self.nbytes = 0
        self.bytes_without_b = 0
        #: Starts in the block, by field of ``Addresses``.
        self._starts: dict[str, int] = {}
        #: Before the multiplication: all but the packing of ``b``, and that.
        self._before: list[Step] = []
        self._before_b: tuple[Step, ...] = ()
        #: After the multiplication.
        self.after: list[Step] = []
        self._pack_b = call.pack_b if call else None
        if call is None:
            elements = layout.batch_count * layout.m * layout.n
            self._add_zeros("product", elements * plan.accumulator.itemsize)
        else:
            self._lay_out(call, layout, device)
        if "product" in self._starts:
            spec = epilogue(plan, call)
            if max(plan.split) > 1:
                product = (spec.product_dtype, spec.leading_dimension)
                self.after += prepare_recomputing(*product, layout.a, layout.b, device)
            self.after += prepare_epilogue(spec, device)

    def _lay_out(self, call: CublasLtCall, layout: GemmLayout, device: int) -> None:
        has_exponents = _has_exponents(call)
        operands = (("a", call.pack_a, layout.m), ("b", call.pack_b, layout.n))
        for name, pack, extent in operands:
            if pack is not None and (pack.scaled or not has_exponents):
                self._add(f"scales_{name}", pack.scale_bytes)
                if pack.scale_mode:
                    scales = self._starts[f"scales_{name}"] + EXPONENT_BYTES * pack.factor_words
                    self._starts[f"lt_scales_{name}"] = scales
            elif has_exponents:
                count = layout.batch_count * extent
                self._add_zeros(f"scales_{name}", EXPONENT_BYTES * count)
        if call.staged:
            self._add("product", call.product_bytes)
        self.bytes_without_b = self.nbytes
        if call.pack_a is not None:
            self._add("packed_a", call.pack_a.nbytes)
            self._before += prepare_packing(call.pack_a, device, "a")
            self.bytes_without_b = self.nbytes
        if call.pack_b is not None:
            self._add("packed_b", call.pack_b.nbytes)
            self._before_b = prepare_packing(call.pack_b, device, "b")

    def _add(self, name: str, nbytes: int) -> None:
        """Reserve memory in the block."""
        self._starts[name] = self.nbytes
        self.nbytes += _aligned(nbytes)

    def _add_zeros(self, name: str, nbytes: int) -> None:
        self._add(name, nbytes)
        self._before.append(zeros(name, 0, nbytes))

    def kept_b(self, arguments: Arguments, addresses: Addresses) -> dict[str, Any]:
        """Return the addresses of the packed operand of a prepared ``b``, empty if each product packs its own."""
        view = arguments.b
        pack = self._pack_b
        stream = arguments.stream
        if not view.is_prepared or pack is None or view.mode not in self._kept_modes:
            return {}
        key = (pack, view.address)
        if key not in view.packed and runtime.is_capturing(stream):
            return {}
        start = _aligned(pack.nbytes)

        def fill(at: int) -> None:
            target = addresses._replace(packed_b=at, scales_b=at + start)
            queue_all(self._before_b, target, stream)

        block = packed_block(view, key, start + pack.scale_bytes, stream, fill, "the packed b")
        kept = {"packed_b": block.address}
        if pack.scaled:
            kept["scales_b"] = block.address + start
        if pack.scale_mode:
            kept["lt_scales_b"] = block.address + start + EXPONENT_BYTES * pack.factor_words
        return kept

    def queue_packing(
        self, block: int, addresses: Addresses, stream: int, kept_b: dict[str, Any]
    ) -> Addresses:
        """Queue the steps before the multiplication, and return its addresses."""
        starts: dict[str, Any] = {name: block + start for name, start in self._starts.items()}
        addresses = addresses._replace(**starts | kept_b)
        queue_all(self._before, addresses, stream)
        if not kept_b:
            queue_all(self._before_b, addresses, stream)
        return addresses


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _has_exponents(call: CublasLtCall) -> bool:
    packs = (call.pack_a, call.pack_b)
    return any(pack is not None and pack.scaled and not pack.rule for pack in packs)


def _factors(pack: Packing | None) -> int:
    if pack is None or not pack.scaled or not pack.rule:
        return 0
    if pack.scale_mode and not pack.factor_words:
        return 0
    return 2 if pack.source.batch_shape else 1


def epilogue(plan: GemmPlan, call: CublasLtCall | None) -> Epilogue:
    problem = plan.problem
    layout = plan.layout
    c = None
    if problem.has_beta and problem.c is not None:
        c = addend_layout(problem.c, problem.a, problem.b, layout)
        assert c is not None, "the plan collapsed a batch that c cannot follow"
    spec = Epilogue(plan.accumulator, layout.n, layout.out, c, problem.bias, problem.activation)
    if call is None:
        return spec
    dtype = plan.accumulator
    if plan.quantized:  # sums of int8 codes are int32, and float32 with their scales
        dtype = call.scale_dtype
    leading = call.d.leading_dimension
    if dtype.is_complex and not call.d.dtype.is_complex:
        leading //= 2
    return replace(
        spec,
        product_dtype=dtype,
        leading_dimension=leading,
        scaled=_has_exponents(call),
        factors=(_factors(call.pack_a), _factors(call.pack_b)),
        product_rows=call.d.cols,
    )


@contextmanager
def widened(arguments: Arguments) -> Iterator[Arguments]:
    """Return arguments with the numbers of quantised operands, for a ``with`` block that queues the product.

    Their libraries widen them on their own streams, and reuse the memory in the order of these.
    """
    wide = arguments.widened()
    device = arguments.out.device
    stream = arguments.stream
    owners = []
    for before, after in zip(arguments[:2], wide[:2], strict=True):
        if after is not before:
            library, other = _wait(before.quantized.codes, stream, device)
            if library.keeps_owners or other != stream:
                owners.append(after.owner)
    try:
        yield wide
    finally:
        if owners:
            memory.keep(owners, stream, device)


def _wait(array: Any, stream: int, device: Device) -> tuple[Library, int]:
    """Make a stream wait for the current one of an array's library, and return both."""
    library = library_of(array)
    other = library.current_stream(device) or stream
    memory.order(other, stream, device)
    return library, other


@contextmanager
def as_codes(arguments: Arguments) -> Iterator[Arguments]:
    """Return arguments with the scales of two block-scaled operands, whose addresses are those of the codes."""
    scales = [_tiles(x, arguments.stream) for x in arguments[:2]]
    yield arguments._replace(scale_a=scales[0], scale_b=scales[1])


def are_contiguous(arguments: Arguments) -> bool:
    """Whether codes and scales of block-scaled operands are row-major without gaps."""
    views = [x for x in arguments[:2] if x.blocks and x.quantized.scales is not None]
    return all(x.packed_operand("contiguous", partial(_contiguous, x.quantized)) for x in views)


def _contiguous(x: QuantizedArray) -> PackedOperand:
    parts = map(codes_view, (x.codes, x.scales))
    answer = all(part.strides == contiguous_strides(part.shape) for part in parts)
    return answer, 0


def _tiles(view: ArrayView, stream: int) -> ArrayView:
    """Return the scales of an operand in tiles of 128 x 4, padded with zeros, arranged at the first product.

    The scale of row ``r`` and block ``c`` of k is byte ``r % 32 * 16 + r // 32 * 4 + c`` of a tile: the cuBLAS
    documentation, *1D Block Scaling Factors Layout*.
    """
    device = view.device
    scales = codes_view(view.quantized.scales)
    columns = scales.shape[-1]
    rows = scales.size // columns
    tall = -(-rows // _ROWS)
    wide = -(-columns // _COLUMNS)
    length = wide * _COLUMNS
    nbytes = tall * wide * _ROWS * _COLUMNS

    def pack(address: int) -> None:
        _wait(view.quantized.scales, stream, device)
        source = MatrixStack.of(DType.INT8, rows, columns, columns, 1)
        batch = (tall, wide, _APART)
        strides = (_ROWS * length, _COLUMNS, length)
        tiles = MatrixStack.of(DType.INT8, _COLUMNS, _COLUMNS, _APART * length, 1, batch, strides)
        padding = Packing(source, DType.INT8, length, tall * _ROWS)
        arranging = Packing(tiles, DType.INT8, _COLUMNS, _COLUMNS)
        pad = prepare_packing(padding, device.index)
        arrange = prepare_packing(arranging, device.index)
        with memory.temporary(nbytes, device.index, stream) as padded:
            queue_all(pad, Addresses(a=scales.address, packed_a=padded), stream)
            queue_all(arrange, Addresses(a=padded, packed_a=address), stream)

    what = "the scales of a quantised operand"
    block = packed_block(view, "scales in tiles", nbytes, stream, pack, what)
    return ArrayView(DType.INT8, (nbytes,), (1,), device, block, True, block.address)
