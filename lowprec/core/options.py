"""``Options``: the keyword arguments of a product, with arrays as views, and their checks."""

from __future__ import annotations

import sys
from math import inf, prod
from typing import Any, NamedTuple

from lowprec.arrays import ArrayView, may_overlap
from lowprec.backends import Arguments
from lowprec.errors import DTypeError, ShapeError, UnsupportedError
from lowprec.formats import Blocks, DType
from lowprec.planning import Activation, GemmProblem, OperandSpec


def spec_of(x: ArrayView) -> OperandSpec:
    """Return the shape, strides and element type of a view, for planning."""
    return OperandSpec(x.dtype, x.shape, x.strides, x.blocks)


class Options(NamedTuple):
    """Keyword arguments of ``matmul``, with arrays as views."""

    out: ArrayView | None = None
    c: ArrayView | None = None
    bias: ArrayView | None = None
    alpha: complex = 1.0
    beta: complex = 0.0
    activation: Activation | None = None
    out_dtype: DType | None = None
    scale_a: ArrayView | float | None = None
    scale_b: ArrayView | float | None = None
    k_chunk: int | None = None
    blocks: tuple[Blocks | None, Blocks | None] = (None, None)  # of quantised a and b

    def views(self, a: ArrayView, b: ArrayView) -> dict[str, ArrayView]:
        named = {"a": a, "b": b, **self._asdict()}
        return {name: x for name, x in named.items() if isinstance(x, ArrayView)}

    @property
    def key(self) -> tuple[Any, ...]:
        out, c, bias, alpha, beta, activation, out_dtype, scale_a, scale_b, k_chunk, blocks = self
        return (
            None if out is None else (out.device, out.dtype, out.shape, out.strides),
            None if c is None else (c.device, c.dtype, c.shape, c.strides),
            None if bias is None else (bias.device, bias.dtype, bias.shape, bias.strides),
            alpha != 1, alpha == 0, beta != 0, type(alpha) is complex or type(beta) is complex,
            _exceeds_float32(alpha), _exceeds_float32(beta),
            activation, out_dtype, type(scale_a), type(scale_b), k_chunk, blocks,
        )  # fmt: skip

    def problem(self, a: OperandSpec, b: OperandSpec) -> GemmProblem:
        out, c, bias = (None if v is None else spec_of(v) for v in (self.out, self.c, self.bias))
        return GemmProblem(
            a, b, self.out_dtype, out, c, bias, self.alpha != 1, self.beta != 0, self.activation, self.k_chunk,
            ignores_product=self.alpha == 0,
        )  # fmt: skip

    def arguments(self, a: ArrayView, b: ArrayView, out: ArrayView, stream: int = 0) -> Arguments:
        return Arguments(a, b, out, self.c, self.bias, self.alpha, self.beta, self.scale_a, self.scale_b, stream)

    def needs_staging(self, a: ArrayView, b: ArrayView) -> bool:
        """Whether ``out`` overlaps an operand, so that the result is computed in temporary memory."""
        out, c = self.out, self.c
        if out is None:
            return False
        operands = (*a.stored(), *b.stored())
        read = (*operands, self.bias, self.scale_a, self.scale_b)
        if any(isinstance(x, ArrayView) and may_overlap(out, x) for x in read):
            return True
        if c is None:
            return False
        # The epilogue reads and writes element by element, so ``c`` may be ``out`` itself.
        same = (c.address, c.dtype, c.shape, c.strides)
        if same == (out.address, out.dtype, out.shape, out.strides):
            return False
        return may_overlap(out, c)


_LARGEST_FLOAT32 = float.fromhex("0x1.fffffep+127")

#: The options of ``matmul(a, b)``.
PLAIN = Options()


def _exceeds_float32(value: complex) -> bool:
    return any(_LARGEST_FLOAT32 < abs(x) < inf for x in (value.real, value.imag))


def with_scales(options: Options, a: ArrayView, b: ArrayView) -> Options:
    """Return options with the scales of FP8 operands multiplied into alpha, except arrays in device memory."""
    for operand in (a, b):
        if operand.blocks:
            options = options._replace(alpha=options.alpha * operand.quantized.scale)
    options = options._replace(blocks=(a.blocks, b.blocks))
    for name, operand in (("scale_a", a), ("scale_b", b)):
        scale = getattr(options, name)
        if scale is None:
            continue
        if not operand.dtype.is_float8:
            raise UnsupportedError(f"{name} is for an FP8 operand, but the operand is {operand.dtype}; pass alpha=")
        if isinstance(scale, ArrayView):
            if not scale.device.is_host or scale.is_description:
                continue
            scale = float(scale.ndarray().item())
        options = options._replace(alpha=options.alpha * scale)
        options = options._replace(scale_a=None) if name == "scale_a" else options._replace(scale_b=None)
    return options


def check_scalars(options: Options, compute_dtype: DType) -> None:
    """Raise for complex ``alpha`` or ``beta`` with real operands, and for scales that the product cannot read."""
    for name, scale in (("scale_a", options.scale_a), ("scale_b", options.scale_b)):
        if isinstance(scale, ArrayView) and not compute_dtype.is_float8:
            raise UnsupportedError(
                f"{name} is in device memory, but the operands are multiplied as {compute_dtype}; pass a number"
            )
    for name, value in (("alpha", options.alpha), ("beta", options.beta)):
        if isinstance(value, complex) and not compute_dtype.is_complex:
            raise DTypeError(f"{name} is complex, but the operands are {compute_dtype}")
        if compute_dtype.itemsize <= compute_dtype.is_complex * 4 + 4 and _exceeds_float32(value):
            raise UnsupportedError(
                f"{name} is {value}, which float32 cannot represent; scale the operands instead, or make them float64"
            )


def check_sizes(views: dict[str, ArrayView], out_shape: tuple[int, ...], out_dtype: DType) -> None:
    """Raise ShapeError if an array of a call, or its result, exceeds the address space."""
    specs = {name: (view.shape, view.dtype) for name, view in views.items()}
    for name, (shape, dtype) in {**specs, "the result": (out_shape, out_dtype)}.items():
        if prod(shape) * dtype.itemsize > sys.maxsize:
            raise ShapeError(f"{name} of shape {shape} and {dtype} exceeds the address space")
