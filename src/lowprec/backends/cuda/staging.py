"""Temporary memory for products that cuBLASLt cannot read or write in place, and the kernels that fill and empty it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

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
        self._blocks: list[memory.Block] = []
        self._product = 0
        self._exponents = (0, 0)
        self._operands = (0, 0)

    def __enter__(self) -> Staging:
        try:
            self._fill()
        except BaseException:
            self._blocks.clear()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._blocks.clear()

    def _fill(self) -> None:
        call, layout, arguments = self._call, self._plan.layout, self._arguments
        if call is None:
            dtype = self._plan.compute_dtype.accumulator
            self._product = self._zeros(layout.batch_count * layout.m * layout.n * dtype.itemsize)
            return
        a, a_exponents = self._packed(arguments.a, layout.a, call.pack_a)
        b, b_exponents = self._packed(arguments.b, layout.b, call.pack_b)
        if a_exponents or b_exponents:
            count = _INT32_BYTES * layout.batch_count
            self._exponents = (
                a_exponents or self._zeros(count * layout.m),
                b_exponents or self._zeros(count * layout.n),
            )
        self._product = self._block(call.product_bytes) if call.staged else 0
        self._operands = (a, b)

    def addresses(self, product: Product) -> tuple[int, int, int]:
        """Return where the parts of ``a`` and ``b`` lie that a product multiplies, and where it goes."""
        call, (a, b) = self._call, self._operands
        assert call is not None
        a += product.a_part * (call.pack_a.part_bytes if call.pack_a else 0)
        b += product.b_part * (call.pack_b.part_bytes if call.pack_b else 0)
        return a, b, self._product or self._arguments.out.address

    def _block(self, nbytes: int) -> int:
        self._blocks.append(memory.allocate(nbytes, self._device, self._stream))
        return self._blocks[-1].address

    def _zeros(self, nbytes: int) -> int:
        address = self._block(nbytes)
        runtime.set_zero_async(address, nbytes, self._stream)
        return address

    def _packed(self, view: ArrayView, stack: MatrixStack, pack: Pack | None) -> tuple[int, int]:
        """Return the addresses of an operand as it is multiplied, and of its rows' exponents (0 for none)."""
        if pack is None:
            return view.address, 0
        rows = stack.cols if pack.transposed else stack.rows
        exponents = self._block(_INT32_BYTES * rows * pack.count) if pack.scaled else 0
        target = self._block(pack.nbytes)
        for packing in packings(self._plan, stack, pack):
            launch = prepare_packing(packing, self._device.index)
            part = target + packing.part * pack.part_bytes
            launch(view.address, part, exponents, self._stream)
        return target, exponents

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
