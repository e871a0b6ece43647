"""NumPy oracles of the packing and epilogue kernels, and arrays for them."""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.backends.cuda import runtime
from lowprec.planning import MatrixStack
from support.oracles import nans

_CANARY = 0xA5
_MARGIN = 64


def stack_of(array, dtype):
    """Describe a stack of matrices, shape (..., rows, cols)."""
    strides = [s // array.itemsize for s in array.strides]
    return MatrixStack.of(
        dtype, *array.shape[-2:], *strides[-2:], array.shape[:-2], tuple(strides[:-2])
    )


# -- arrays ---------------------------------------------------------------------------------------


def random_bits(rng, dtype, size):
    """Return numbers of every kind: any bits at all, infinities and every class of NaN among them."""
    found = rng.integers(0, 256, size * dtype.itemsize, np.uint8).view(NUMPY_DTYPES[dtype])
    return with_nans(found) if dtype.format is not None and dtype.itemsize > 1 else found


def random_numbers(rng, dtype, size):
    """Return finite numbers of ordinary size, and integers of any."""
    if dtype.format is None:
        limits = np.iinfo(NUMPY_DTYPES[dtype])
        return rng.integers(limits.min, limits.max, size, NUMPY_DTYPES[dtype], endpoint=True)
    values = rng.standard_normal(size)
    if dtype.is_complex:
        values = values + 1j * rng.standard_normal(size)
    return values.astype(NUMPY_DTYPES[dtype])


def with_nans(numbers):
    """Put NaN of every class, infinities, a zero, and the limits of float16 and float32 among the numbers."""
    parts = numbers.view(numbers.real.dtype)
    with np.errstate(over="ignore"):
        special = np.array([np.inf, -np.inf, -0.0, 65519.9, 65520, 3e38, -3e38, 1e-45]).astype(
            parts.dtype
        )
    special = np.concatenate([special, nans(parts.dtype)])[: len(parts[::3])]
    parts[: 3 * len(special) : 3] = special
    return numbers


def address(array):
    return array.__array_interface__["data"][0]


def aligned(size, dtype, offset=0):
    """Return memory that begins ``offset`` elements after a multiple of 64 bytes."""
    dtype = np.dtype(dtype)
    memory = np.zeros((size + offset) * dtype.itemsize + 64, np.uint8)
    start = -address(memory) % 64 + offset * dtype.itemsize
    return memory[start : start + size * dtype.itemsize].view(dtype)


#: Strides of a stack: the order of its axes in memory, outermost first by their place (b is the batch), the step
#: that widens each, and whether it runs backwards.
LAYOUTS = {
    "rows": ("brc", 1, 1, False),
    "rows apart": ("brc", 4, 1, False),
    "columns": ("bcr", 1, 1, False),
    "columns apart": ("bcr", 4, 1, False),
    "columns first": ("crb", 1, 1, False),
    "every third": ("brc", 1, 3, False),
    "every third, columns": ("bcr", 1, 3, False),
    "backwards": ("brc", 1, 1, True),
    "backwards, columns": ("bcr", 1, 1, True),
    "gaps": ("brc", 1, 1, False),
}


def lay_out(values, shape, layout, offset=0):
    """Return an array of this shape, (..., rows, cols), on flat memory, filled with ``values``."""
    order, pad, step, backwards = LAYOUTS[layout]
    places = {"b": range(len(shape) - 2), "r": [len(shape) - 2], "c": [len(shape) - 1]}
    axes = [axis for letter in order for axis in places[letter]]
    strides, reach = [0] * len(shape), step
    for number, axis in enumerate(reversed(axes)):
        strides[axis] = reach
        reach *= max(1, shape[axis]) + (layout == "gaps")
        if number == 0 and pad > 1:
            reach += -reach % 16 + 16
    memory = aligned(reach, values.dtype, offset)
    sign, start = 1, 0
    if backwards:
        sign = -1
        start = sum(s * (n - 1) for s, n in zip(strides, shape, strict=True) if n)
    itemsize = values.itemsize
    steps = [sign * s * itemsize for s in strides]
    view = np.ndarray(shape, values.dtype, memory, start * itemsize, steps)
    view[...] = np.resize(values, shape) if values.size else 0
    return view


def owner_of(view):
    """Return the array that owns the memory of a view.

    Between the two there may be objects that are no arrays: a view made by strides can claim more bytes than there are.
    """
    owner, base = view, view.base
    while base is not None:
        if isinstance(base, np.ndarray):
            owner = base
        base = getattr(base, "base", None)
    return owner


class DeviceCopies:
    """Copies of arrays in the memory of the current device, aligned to 64 bytes as in the host's."""

    def __init__(self, stream):
        self._stream = stream
        self._copies: dict[int, tuple[np.ndarray, int, int]] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for _, block, _ in self._copies.values():
            runtime.free(block)

    def put(self, view):
        """Copy all memory of which this is a view, and return the address of the view's first element; 0 for None."""
        if view is None:
            return 0
        root = owner_of(view)
        start = address(root)
        if start not in self._copies:
            block = runtime.allocate(root.nbytes + 64)
            copy = block + start % 64
            if root.nbytes:
                runtime.copy_async(copy, start, root.nbytes, self._stream)
            self._copies[start] = (root, block, copy)
        return self._copies[start][2] + address(view) - start

    def fetch(self):
        """Copy everything back."""
        for start, (root, _, copy) in self._copies.items():
            if root.nbytes:
                runtime.copy_async(start, copy, root.nbytes, self._stream)
        runtime.call("cudaStreamSynchronize", self._stream)


@dataclass
class Guarded:
    """Memory with canaries on both sides."""

    memory: np.ndarray
    inside: np.ndarray

    @classmethod
    def of(cls, size, dtype, offset=0):
        memory = aligned((size + 2 * _MARGIN) * np.dtype(dtype).itemsize, np.uint8)
        memory[:] = _CANARY
        return cls(memory, memory.view(dtype)[_MARGIN + offset : _MARGIN + offset + size])

    def check(self):
        """Fail if anything but the inside was written."""
        first = address(self.inside) - address(self.memory)
        last = first + self.inside.nbytes
        outside = np.concatenate([self.memory[:first], self.memory[last:]])
        assert (outside == _CANARY).all(), "something outside the destination was written"


# -- comparing ------------------------------------------------------------------------------------


def bits(array):
    """Return the bits of real numbers, with one NaN for all."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind == "c":
        array = array.view(array.real.dtype)
    found = array.view(f"u{array.itemsize}").copy()
    if array.dtype.kind not in "iu":
        with np.errstate(invalid="ignore"):  # a signaling NaN
            found[np.isnan(array.astype(np.float64))] = np.iinfo(found.dtype).max
    return found


def assert_same_bits(got, want):
    """Compare bit by bit, but for the kind of NaN."""
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(bits(got), bits(want), strict=True)


# -- packing --------------------------------------------------------------------------------------


def cast(array, dtype):
    with np.errstate(all="ignore"):
        target = NUMPY_DTYPES[dtype]
        if array.dtype == target:
            return array
        # What ml_dtypes does not convert directly goes by float32, which holds all 16-bit numbers.
        narrow = (np.float16, ml_dtypes.bfloat16)
        return (array.astype(np.float32) if array.dtype in narrow else array).astype(target)


def exponents_of(array):
    """Return e, shape (..., rows): the largest finite magnitude times 2^e is in [2^14, 2^15)."""
    parts = _parts(array)
    magnitude = np.abs(np.where(np.isfinite(parts), parts, 0))
    largest = magnitude.max((-1, -2), initial=0)
    return np.where(largest > 0, 15 - np.frexp(largest)[1], 0).astype(np.int32)


def _parts(array):
    """Return real and imaginary part in float64, along a new last axis."""
    if array.dtype.kind == "c":
        with np.errstate(invalid="ignore"):
            return np.stack([array.real, array.imag], -1).astype(np.float64)
    with np.errstate(invalid="ignore"):
        wide = array.astype(np.float64)
    return np.stack([wide, np.zeros_like(wide)], -1)


def round_part(x, packing):
    """Return float32 numbers rounded as the parts of a packing are."""
    with np.errstate(all="ignore"):
        if not packing.as_tf32:
            return x.astype(NUMPY_DTYPES[packing.dtype]).astype(np.float32)
        bits = (x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
        return np.where(np.isfinite(x), bits.view(np.float32), x)


def packed_parts(array, packing):
    """Return what a packing in several parts writes, and the exponents: each part as a packing of its own."""
    exponents = exponents_of(array) if packing.scaled else np.zeros(0, np.int32)
    rest = array.astype(np.complex64 if array.dtype.kind == "c" else np.float32)
    rest = np.ascontiguousarray(rest).view(np.float32)
    if packing.scaled:
        with np.errstate(all="ignore"):
            rest = np.ldexp(rest, exponents[..., None])
    parts = [round_part(rest, packing)]
    with np.errstate(all="ignore"):
        while len(parts) < packing.parts:
            if packing.summed and len(parts) == packing.parts - 1:
                parts.append(round_part(parts[0] + parts[1], packing))
                continue
            rest = (rest - parts[-1]) * np.float32(2**packing.part_exponent)
            parts.append(round_part(rest, packing))
    each = replace(packing, parts=1, scaled=False, as_tf32=False, summed=False)
    written = []
    for part in parts:
        numbers = part.view(np.complex64) if array.dtype.kind == "c" else part
        written.append(packed(numbers, each)[0])
    if packing.descending:
        written.reverse()
    # Side by side in each line, or one matrix after another.
    axis = -1 if packing.side_by_side else -2
    return np.concatenate(written, axis), exponents


def packed(array, packing):
    """Return what a packing writes, shape (..., padded_rows, leading_dimension), and the exponents."""
    if packing.parts > 1:
        return packed_parts(array, packing)
    exponents = exponents_of(array) if packing.scaled else np.zeros(0, np.int32)
    batch, target = array.shape[:-2], NUMPY_DTYPES[packing.dtype]
    out = np.zeros((*batch, packing.padded_rows, packing.leading_dimension), target)
    rows, cols = array.shape[-2:]
    if not packing.scaled and packing.complex_as == "no":
        out[..., :rows, :cols] = cast(array, packing.dtype)
        return out, exponents
    parts = _parts(array)
    if packing.scaled:
        with np.errstate(all="ignore"):
            parts = np.ldexp(parts, exponents[..., None, None])
    with np.errstate(all="ignore"):
        parts = parts.astype(target)  # exact products, rounded once
    if packing.complex_as == "no":
        out[..., :rows, :cols] = parts[..., 0]
    elif packing.complex_as == "pairs":
        out[..., :rows, : 2 * cols] = parts.reshape(*batch, rows, 2 * cols)
    else:
        re, im = parts[..., 0], parts[..., 1]
        out[..., 0 : 2 * rows : 2, 0 : 2 * cols : 2] = re
        out[..., 0 : 2 * rows : 2, 1 : 2 * cols : 2] = np.where(im == 0, im, -im)
        out[..., 1 : 2 * rows : 2, 0 : 2 * cols : 2] = im
        out[..., 1 : 2 * rows : 2, 1 : 2 * cols : 2] = re
    return out, exponents


# -- epilogues ------------------------------------------------------------------------------------


def _times(x, by):
    """Multiply as the kernel does, each operation rounded to the type of ``x``."""
    if x.dtype.kind != "c":
        return x * x.dtype.type(by.real)
    part = x.real.dtype.type
    re, im = part(by.real), part(by.imag)
    result = np.empty_like(x)
    if im == 0:
        result.real, result.imag = x.real * re, x.imag * re
    else:
        result.real = x.real * re - x.imag * im
        result.imag = x.real * im + x.imag * re
    return result


def with_epilogue(spec, product, c, bias, exponents, alpha, beta):
    """Return ``activation(alpha * product / 2^exponents + beta * c + bias)`` in the product's type."""
    dtype = product.dtype
    x = product
    with np.errstate(all="ignore"):
        if exponents is not None:
            alpha = complex(np.complex64(alpha))
            wide = product.astype(np.complex128 if dtype.kind == "c" else np.float64)
            wide = _times(wide, alpha)
            power = np.ldexp(1.0, -exponents)
            x = _times_real(wide, power).astype(dtype)
        elif alpha != 1 and dtype.kind != "i":
            x = _times(product, alpha)
        if c is not None and beta != 0:
            addend = c.astype(np.float32) if c.dtype == ml_dtypes.bfloat16 else c
            addend = addend.astype(dtype)
            x = x + (addend if beta == 1 else _times(addend, beta))
        if bias is not None:
            addend = bias.astype(np.float32) if bias.dtype == ml_dtypes.bfloat16 else bias
            if dtype.kind == "i":  # saturates
                limits = np.iinfo(dtype)
                x = np.clip(x.astype(np.int64) + addend, limits.min, limits.max).astype(dtype)
            else:
                x = x + addend.astype(dtype)
        if spec.activation == "relu":
            x = np.where(x < 0, dtype.type(0), x)
        elif spec.activation == "gelu":
            inner = (x * x * dtype.type(0.044715) + dtype.type(1)) * x
            inner = np.tanh(inner * dtype.type(np.sqrt(2 / np.pi)))
            inner = (inner + dtype.type(1)) * dtype.type(0.5)
            x = np.where(inner == 0, -inner, x * inner)
        return x.astype(NUMPY_DTYPES[spec.out.dtype])


def _times_real(x, by):
    if x.dtype.kind != "c":
        return x * by
    return (x.view(np.float64).reshape(*x.shape, 2) * by[..., None]).view(np.complex128)[..., 0]


def every_rounding():
    """Yield all upper halves of a float32, each with lower halves at and next to the ties of a rounding."""
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    ties = (0x1000, 0x3000, 0x5000, 0x8000)
    for lower in (0, 1, *(tie + beside for tie in ties for beside in (-1, 0, 1)), 0x2000, 0xFFFF):
        yield (upper | np.uint32(lower)).view(np.float32)
