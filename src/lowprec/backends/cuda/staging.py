"""Temporary memory for products that cuBLASLt cannot read or write in place, and the kernels that fill and empty it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from lowprec.arrays import ArrayView, Device
from lowprec.backends.cuda import memory, runtime
from lowprec.backends.cuda.epilogue import Epilogue, prepare_epilogue
from lowprec.backends.cuda.packing import Packing, prepare_packing
from lowprec.backends.execution import Arguments
from lowprec.modes import row
from lowprec.planning import GemmPlan, MatrixStack, Product
from lowprec.planning.calls import CublasLtCall, Pack
from lowprec.planning.layout import addend_layout

_INT32_BYTES = 4

#: Of each part of the memory, as of what CUDA allocates.
_ALIGNMENT = 256


class Staging:
    """The temporary memory of one product, filled on entry.

    Parameters
    ----------
    plan : GemmPlan
    call : CublasLtCall or None
        None where the inner dimension is 0, and the product with it.
    device : Device
        The current one.
    arguments : Arguments
    """

    def __init__(
        self, plan: GemmPlan, call: CublasLtCall | None, device: Device, arguments: Arguments
    ) -> None:
        self._plan = plan
        self._call = call
        self._device = device
        self._arguments = arguments
        self._stream = arguments.stream
        self._product = 0
        self._exponents = (0, 0)
        self._operands = (0, 0)

    def __enter__(self) -> Staging:
        sizes = self._sizes()
        starts = [0, *accumulate(-(-n // _ALIGNMENT) * _ALIGNMENT for n in sizes)]
        self._block = memory.temporary(starts.pop(), self._device.index, self._stream)
        try:
            first = self._block.address
            self._fill(*[first + start if n else 0 for start, n in zip(starts, sizes, strict=True)])
        except BaseException as error:
            self._block.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._block.__exit__(kind)

    def _sizes(self) -> tuple[int, int, int, int, int]:
        """Return the bytes of the exponents of either operand, of both operands packed, and of the product."""
        call, layout = self._call, self._plan.layout
        if call is None:
            dtype = self._plan.compute_dtype.accumulator
            return 0, 0, 0, 0, layout.batch_count * layout.m * layout.n * dtype.itemsize
        packs, stacks = (call.pack_a, call.pack_b), (layout.a, layout.b)
        exponents = [0, 0]
        if any(pack is not None and pack.scaled for pack in packs):
            exponents = [_INT32_BYTES * layout.batch_count * n for n in (layout.m, layout.n)]
            for side, (pack, stack) in enumerate(zip(packs, stacks, strict=True)):
                if pack is not None and pack.scaled:
                    rows = stack.cols if pack.transposed else stack.rows
                    exponents[side] = _INT32_BYTES * rows * pack.count
        operands = [0 if pack is None else pack.nbytes for pack in packs]
        return *exponents, *operands, call.product_bytes if call.staged else 0

    def _fill(self, exponents_a: int, exponents_b: int, a: int, b: int, product: int) -> None:
        """Queue the work that fills the memory, of which these are the addresses, 0 for none."""
        call, layout, arguments = self._call, self._plan.layout, self._arguments
        self._product = product
        if call is None:
            runtime.set_zero_async(product, self._block.nbytes, self._stream)
            return
        self._exponents = (exponents_a, exponents_b)
        self._operands = (
            self._packed(arguments.a, layout.a, call.pack_a, a, exponents_a),
            self._packed(arguments.b, layout.b, call.pack_b, b, exponents_b),
        )
        for exponents, pack, n in (
            (exponents_a, call.pack_a, layout.m),
            (exponents_b, call.pack_b, layout.n),
        ):
            if exponents and not (pack is not None and pack.scaled):
                nbytes = _INT32_BYTES * layout.batch_count * n
                runtime.set_zero_async(exponents, nbytes, self._stream)

    def addresses(self, product: Product) -> tuple[int, int, int]:
        """Return where the parts of ``a`` and ``b`` lie that a product multiplies, and where it goes."""
        call, (a, b) = self._call, self._operands
        assert call is not None
        a += product.a_part * (call.pack_a.part_bytes if call.pack_a else 0)
        b += product.b_part * (call.pack_b.part_bytes if call.pack_b else 0)
        return a, b, self._product or self._arguments.out.address

    def _packed(
        self, view: ArrayView, stack: MatrixStack, pack: Pack | None, target: int, exponents: int
    ) -> int:
        """Return the address of an operand as it is multiplied."""
        if pack is None:
            return view.address
        for packing in packings(self._plan, stack, pack):
            launch = prepare_packing(packing, self._device.index)
            part = target + packing.part * pack.part_bytes
            launch(view.address, part, exponents if pack.scaled else 0, self._stream)
        return target

    def apply_epilogue(self, alpha: complex) -> None:
        """Write the result, where the product is staged; the scales of the operands are in ``alpha``."""
        if not self._product:
            return
        arguments, spec = self._arguments, epilogue(self._plan, self._call)
        launch = prepare_epilogue(spec, self._device.index)
        launch(
            self._product,
            arguments.out.address,
            arguments.c.address if spec.c and arguments.c is not None else 0,
            arguments.bias.address if arguments.bias is not None else 0,
            *self._exponents,
            alpha,
            arguments.beta,
            self._stream,
        )


def packings(plan: GemmPlan, stack: MatrixStack, pack: Pack) -> Iterator[Packing]:
    """Yield how the parts of an operand are packed, one after another."""
    source = stack.transposed if pack.transposed else stack
    if not pack.batch_shape:
        source = replace(source, batch_shape=(), batch_strides=())
    for part in range(pack.parts):
        yield Packing(
            source,
            pack.dtype,
            pack.leading_dimension,
            pack.padded_rows,
            pack.scaled,
            pack.complex_as,
            part,
            row(plan.mode).part_exponent if part else 0,
        )


def epilogue(plan: GemmPlan, call: CublasLtCall | None) -> Epilogue:
    """Return what follows the staged product of a plan."""
    problem, layout = plan.problem, plan.layout
    c = None
    if problem.has_beta and problem.c is not None:
        c = addend_layout(problem.c, problem.a, problem.b, layout)
        assert c is not None, "the plan collapsed a batch that c cannot follow"
    product_dtype = plan.compute_dtype.accumulator
    leading = call.d.leading_dimension if call else layout.n
    if call and product_dtype.is_complex and not call.d.dtype.is_complex:
        leading //= 2
    packs = (call.pack_a, call.pack_b) if call else ()
    return Epilogue(
        product_dtype,
        leading,
        layout.out,
        c,
        problem.bias,
        problem.activation,
        scaled=any(pack is not None and pack.scaled for pack in packs),
    )
