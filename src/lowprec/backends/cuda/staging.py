"""Temporary memory for products that cuBLASLt cannot read or write in place, and the kernels that fill and empty it."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType

from lowprec.arrays import ArrayView, Device
from lowprec.backends.cuda import convert, driver, finish, memory
from lowprec.backends.cuda.convert import Packing
from lowprec.backends.cuda.finish import Finish
from lowprec.backends.execution import Arguments
from lowprec.modes import row
from lowprec.planning import GemmPlan, MatrixStack, Product
from lowprec.planning.calls import CublasLtCall, Pack
from lowprec.planning.layout import addend_layout

__all__ = ["Staging"]

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._blocks.clear()

    def _fill(self) -> None:
        call, layout, arguments = self._call, self._plan.layout, self._arguments
        if call is None:
            dtype = self._plan.compute_dtype.accumulator
            self._product = self._zeros(layout.batch_count * layout.m * layout.n * dtype.itemsize)
            return
        a, a_exponents = self._rewritten(arguments.a, layout.a, call.pack_a)
        b, b_exponents = self._rewritten(arguments.b, layout.b, call.pack_b)
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
        driver.set_zero_async(address, nbytes, self._stream)
        return address

    def _rewritten(self, view: ArrayView, stack: MatrixStack, pack: Pack | None) -> tuple[int, int]:
        """Return the addresses of an operand as it is multiplied, and of its rows' exponents (0 for none)."""
        if pack is None:
            return view.address, 0
        source = stack.transposed if pack.transposed else stack
        if not pack.batch_shape:
            source = replace(source, batch_shape=(), batch_strides=())
        exponents = 0
        if pack.scaled:
            exponents = self._block(_INT32_BYTES * source.rows * pack.count)
        target = self._block(pack.nbytes)
        for part in range(pack.parts):
            packing = Packing(
                source,
                pack.dtype,
                pack.leading_dimension,
                pack.padded_rows,
                "rows" if pack.scaled else "none",
                pack.complex_as,
                part,
                row(self._plan.mode).part_exponent if part else 0,
            )
            launch = convert.pack(packing, self._device.index)
            launch(view.address, target + part * pack.part_bytes, exponents, self._stream)
        return target, exponents

    def finish(self, alpha: complex) -> None:
        """Make the result of the product, if that went aside; ``alpha`` has the scales of the operands in it."""
        if not self._product:
            return
        arguments, spec = self._arguments, self._finish_spec()
        launch = finish.finish(spec, self._device.index)
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

    def _finish_spec(self) -> Finish:
        plan, call = self._plan, self._call
        problem, layout = plan.problem, plan.layout
        c = None
        if problem.has_beta and problem.c is not None:
            c = addend_layout(problem.c, problem.a, problem.b, layout)
            assert c is not None, "the plan collapsed a batch that c cannot follow"
        product_dtype = plan.compute_dtype.accumulator
        leading = call.d.leading_dimension if call else layout.n
        if call and product_dtype.is_complex and not call.d.dtype.is_complex:
            leading //= 2
        return Finish(
            product_dtype=product_dtype,
            rows=layout.m,
            cols=layout.n,
            leading_dimension=leading,
            padded_rows=layout.m,
            out=layout.out,
            c=c,
            bias_dtype=problem.bias.dtype if problem.bias else None,
            bias_stride=problem.bias.strides[0] if problem.bias else 0,
            activation=str(problem.activation) if problem.activation else None,
            scaled=any(self._exponents),
        )
