"""Examples of products that lead along a kernel path of the CPU, for hypothesis to draw."""

import math
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from backends.kernel_paths import MOST_FLOPS, SHAPES, KernelPath, numpy_dtype, promoted
from support.oracles import Epilogue

#: Memory around arrays: read, it makes a result NaN (or a large integer); a write to it is seen.
_CANARY = 0x7F


@dataclass(frozen=True)
class Laid:
    """An array in memory of its own, with other elements around and between its own."""

    memory: np.ndarray
    array: np.ndarray
    inside: np.ndarray  # of the memory, which elements are the array's

    @classmethod
    def of(cls, values, steps, margins, order):
        """Lay values out: by so many elements of each axis apart, backwards if negative, behind so many others."""
        whole = [n * abs(s) + 2 * at for n, s, at in zip(values.shape, steps, margins, strict=True)]
        memory = np.zeros([whole[i] for i in order], values.dtype)
        memory.reshape(-1).view(np.uint8)[...] = _CANARY
        inside = np.zeros(memory.shape, bool)
        sizes = zip(values.shape, steps, margins, strict=True)
        cut = (*(slice(at, at + n * abs(s)) for n, s, at in sizes), ...)
        by = (*(slice(None, None, s) for s in steps), ...)
        view, within = (x.transpose(np.argsort(order))[cut][by] for x in (memory, inside))
        view[...] = values
        within[...] = True
        return cls(memory, view, inside)

    def repeated(self, axis):
        """Return the same with the first of an axis in place of all others."""
        first = self.array[(slice(None),) * axis + (slice(1),)]
        return replace(self, array=np.broadcast_to(first, self.array.shape))

    def check(self):
        """Fail if anything around the array was written."""
        around = self.memory[~self.inside].view(np.uint8)
        assert (around == _CANARY).all(), "something outside the array was written"


@st.composite
def _laid(draw, values):
    axes = values.ndim
    kind = draw(st.sampled_from(("plain", "plain", "transposed", "gaps", "any", "any")))
    steps, margins, order = [1] * axes, [0] * axes, list(range(axes))
    if kind == "transposed":
        order[-2:] = order[:-3:-1]
    elif kind == "gaps":
        margins = [5] * axes
    elif kind == "any":
        steps = [draw(st.sampled_from((1, 1, 2, 3, -1, -2))) for _ in range(axes)]
        margins = [draw(st.integers(0, 2)) for _ in range(axes)]
        order = draw(st.permutations(range(axes)))
    return Laid.of(values, steps, margins, order)


@st.composite
def _numbers(draw, shape, name):
    """Draw numbers: ordinary ones, of one sign, over many binades; and perhaps some that are special."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = numpy_dtype(name)
    if dtype.kind == "i":
        values = rng.integers(-128, 128, shape)
        return (np.full(shape, -128) if draw(st.integers(0, 5)) == 0 else values).astype(dtype)
    half = dtype.itemsize == 2 and name == "float16"
    kind = draw(st.sampled_from(("normal", "positive", "spread", "lines", "tiny", "ties", "whole")))
    reach = 6 if half else 45

    def real():
        x = rng.standard_normal(shape)
        if kind == "positive":
            x = rng.random(shape)
        elif kind == "spread":
            x = np.ldexp(x, rng.integers(-reach, reach, shape))
        elif kind == "lines" and len(shape) > 0:
            axis = draw(st.integers(0, len(shape) - 1))
            of = [n if i == axis else 1 for i, n in enumerate(shape)]
            x = np.ldexp(x, rng.integers(-reach, reach, of))
        elif kind == "tiny":
            x = np.ldexp(x, -18 if half else -120)
        elif kind == "ties":  # one bit more than TF32 and float16 have, or bfloat16
            bits = 12 if rng.random() < 0.5 else 9
            x = np.ldexp(rng.integers(1 << (bits - 1), 1 << bits, shape) | 1, -bits).astype(float)
        elif kind == "whole":  # sums of them are exact
            x = rng.integers(-3, 4, shape).astype(float)
        return x * (rng.random(shape) > 0.03)

    x = np.asarray(real() + 1j * real() if dtype.kind == "c" else real(), dtype)
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 3))) if x.size else 0):
        top = {"float16": 65504.0, "bfloat16": 3.3e38}.get(name, 3.4028234e38)
        special = draw(
            st.sampled_from((np.nan, np.inf, -np.inf, top, -top, 1e-45, -0.0, 2.0**-126, 65536.0))
        )
        with np.errstate(all="ignore"):
            x[tuple(int(rng.integers(n)) for n in shape)] = special
    return x


@dataclass(frozen=True, eq=False, repr=False)
class Example:
    """A product that leads along a path, its epilogue, and the layout of its arrays."""

    path: KernelPath
    mode: str
    a: Laid
    b: Laid
    then: Epilogue
    out: Laid | None
    out_dtype: str | None
    around: tuple[Laid, ...]  # c and bias, where they are
    prepared: str | None  # for which mode, if b is

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))  # without this, hypothesis prints all numbers

    def __repr__(self):
        arrays = {
            "a": self.a,
            "b": self.b,
            "out": self.out,
            **dict(zip(("x", "y"), self.around, strict=False)),
        }
        described = [
            f"{k}={x.array.dtype}{x.array.shape} by {x.array.strides}"
            for k, x in arrays.items()
            if x
        ]
        then = self.then
        return (
            f"{self.path.kernel} {self.mode}, {', '.join(described)}, alpha={then.alpha}, beta={then.beta}, "
            f"c is out: {bool(self.out and then.c is self.out.array)}, bias: {then.bias is not None}, "
            f"{then.activation}, out_dtype={self.out_dtype}, prepared={self.prepared}"
        )


def _stacks(draw, shape):
    """Draw the shapes of a and b: vectors where they may be, and batches of different matrices, or of one b."""
    m, n, k = shape
    a, b = (m, k), (k, n)
    batches = [
        ((), ()),
        ((), ()),
        ((2,), (2,)),
        ((3,), (1,)),
        ((1, 2), (2, 1)),
        ((2,), ()),
        ((), (2,)),
        ((5,), (5,)),
    ]
    left, right = draw(st.sampled_from(batches))
    count = math.prod(np.broadcast_shapes(left, right))
    if count * shape.flops > 2 * MOST_FLOPS:
        left = right = ()
    a = (k,) if m == 1 and not left and draw(st.booleans()) else (*left, *a)
    b = (k,) if n == 1 and not right and draw(st.booleans()) else (*right, *b)
    return a, b


def _results(compute):
    return {
        "float32": ["float32", "float32", "float16", "bfloat16"],
        "float16": ["float16", "float32"],
        "bfloat16": ["bfloat16", "float32"],
        "int8": ["int32"],
    }.get(compute, [compute])


def _addends(compute):
    if compute == "int8":
        return ["int8", "int32"]
    found = ["float32", "float16", "bfloat16"]
    if compute in ("float64", "complex128"):
        found.append("float64")
    return [*found, compute] if compute[0] == "c" else found


@st.composite
def examples(draw, path):
    dtypes = draw(st.sampled_from(path.dtypes))
    if draw(st.booleans()):
        dtypes = dtypes[::-1]
    mode = draw(st.sampled_from(path.modes))
    # a choice from so many would take long to make
    shape = SHAPES[draw(st.integers(0, len(SHAPES) - 1))]
    shapes = _stacks(draw, shape)
    operands = []
    for name, extents in zip(dtypes, shapes, strict=True):
        laid = draw(_laid(draw(_numbers(extents, name))))
        if draw(st.integers(0, 9)) == 0:
            laid = laid.repeated(draw(st.integers(0, len(extents) - 1)))
        operands.append(laid)
    compute = promoted(*dtypes)
    out_dtype = draw(st.sampled_from(_results(compute)))
    out_shape = np.matmul(*(np.broadcast_to(np.int8(0), x) for x in shapes)).shape
    n = shapes[1][-1] if len(shapes[1]) > 1 else 1
    then, around, out = draw(_epilogues(compute, out_dtype, out_shape, n))
    prepared = draw(st.sampled_from((None, None, mode, "fp32")))
    return Example(path, mode, *operands, then, out, out_dtype, around, prepared)


@st.composite
def _epilogues(draw, compute, out_dtype, shape, n):
    """Draw what follows a product, where it is written, and the arrays that are added."""
    is_integer, is_complex = compute == "int8", compute[0] == "c"
    out, around, c, bias = None, [], None, None
    if draw(st.booleans()):
        out = draw(_laid(np.zeros(shape, numpy_dtype(out_dtype))))
    alphas = (1.0, 1.0, 0.5, -1.7, 0.0) + ((0.5 - 2j,) if is_complex else ())
    alpha = 1.0 if is_integer else draw(st.sampled_from(alphas))
    betas = (0.0, 0.0, 1.0, -0.3) + ((1j,) if is_complex else ())
    beta = 0.0 if is_integer else draw(st.sampled_from(betas))
    if beta:
        if out is not None and draw(st.booleans()) and out_dtype in _addends(compute):
            c = out.array
            c[...] = draw(_numbers(shape, out_dtype))
        else:
            some = shape[draw(st.integers(0, len(shape))) :]
            laid = draw(_laid(draw(_numbers(some, draw(st.sampled_from(_addends(compute)))))))
            around.append(laid)
            c = laid.array
    if draw(st.booleans()):
        values = draw(_numbers((n,), draw(st.sampled_from(_addends(compute)))))
        laid = draw(_laid(values))
        around.append(laid)
        bias = laid.array
    activations = [None, None, "relu"] + ([] if is_integer else ["gelu"])
    activation = None if is_complex else draw(st.sampled_from(activations))
    return Epilogue(alpha, beta, c, bias, activation), tuple(around), out
