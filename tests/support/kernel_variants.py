"""The variants of the kernels: element types and options that plans use, and the source of each with its arguments."""

import re
from typing import NamedTuple

from lowprec.backends.cuda.compiling import Launch
from lowprec.backends.cuda.epilogue import Epilogue, prepare_epilogue, prepare_recomputing
from lowprec.backends.cuda.packing import prepare_packing
from lowprec.formats import DType
from lowprec.planning import Activation, MatrixStack, OperandSpec
from lowprec.planning.cublaslt.calls import PACKED, Packing
from support.recording_compiler import recording

D = DType

REAL = (D.FLOAT16, D.BFLOAT16, D.FLOAT32)
FLOAT8 = (D.FLOAT8_E4M3FN, D.FLOAT8_E5M2)

CONVERSIONS = [
    *[(a, b) for a in (*REAL, *FLOAT8) for b in (*REAL, D.FLOAT64, D.COMPLEX64, D.COMPLEX128)],
    *[(D.FLOAT64, b) for b in (D.FLOAT64, D.COMPLEX128)],
    *[(D.COMPLEX64, b) for b in (D.COMPLEX64, D.COMPLEX128)],
    *[(x, x) for x in (D.COMPLEX128, D.INT8, D.INT32, *FLOAT8)],
]

#: Source, destination, scaled, complex as.
TAKEN_APART = [
    (source, target, False, how)
    for source in (D.COMPLEX64, *REAL, *FLOAT8)
    for target in (D.BFLOAT16, D.FLOAT16)
    for how in ("pairs", "rotated")
]
SCALED = [
    *[(source, D.FLOAT16, True, "no") for source in (D.FLOAT32, D.BFLOAT16)],
    *[
        (source, D.FLOAT16, True, how)
        for source in (D.COMPLEX64, D.FLOAT32, D.BFLOAT16)
        for how in ("pairs", "rotated")
    ],
]
EVERY_PACKING = [(a, b, False, "no") for a, b in CONVERSIONS] + TAKEN_APART + SCALED

#: Source, destination, scaled, complex as; parts, exponent, sum, TF32.
IN_PARTS = {
    "bf16x3": ((D.FLOAT32, D.BFLOAT16, False, "no"), (2, 0, False, False)),
    "bf16x9": ((D.FLOAT32, D.BFLOAT16, False, "no"), (3, 0, False, False)),
    "bf16x9, complex": ((D.COMPLEX64, D.BFLOAT16, False, "rotated"), (3, 0, False, False)),
    "tf32x3": ((D.FLOAT32, D.FLOAT32, False, "no"), (2, 0, False, True)),
    "tf32x3, complex": ((D.COMPLEX64, D.COMPLEX64, False, "no"), (2, 0, False, True)),
    "tf32x3, mixed": ((D.FLOAT32, D.COMPLEX64, False, "no"), (2, 0, False, True)),
    "fp16x3": ((D.FLOAT32, D.FLOAT16, True, "no"), (2, 11, False, False)),
    "fp16x3, complex": ((D.COMPLEX64, D.FLOAT16, True, "pairs"), (2, 11, False, False)),
    "fp16_karatsuba": ((D.FLOAT32, D.FLOAT16, True, "no"), (3, 11, True, False)),
}

#: Element types of products and results, and of products and addends.
RESULTS = [
    (D.FLOAT32, D.FLOAT32), (D.FLOAT32, D.FLOAT16), (D.FLOAT32, D.BFLOAT16), (D.FLOAT32, D.FLOAT64),
    (D.FLOAT64, D.FLOAT64), (D.COMPLEX64, D.COMPLEX64), (D.COMPLEX64, D.COMPLEX128), (D.COMPLEX128, D.COMPLEX128),
    (D.INT32, D.INT32), *[(D.FLOAT64, x) for x in REAL], (D.COMPLEX128, D.COMPLEX64),
    *[(x, y) for x in (D.FLOAT32, D.FLOAT64) for y in FLOAT8],
]  # fmt: skip
ADDENDS = [
    *[(D.FLOAT32, c) for c in REAL],
    *[(D.FLOAT64, c) for c in (*REAL, D.FLOAT64)],
    *[(D.COMPLEX64, c) for c in (*REAL, D.COMPLEX64)],
    *[(D.COMPLEX128, c) for c in (*REAL, D.FLOAT64, D.COMPLEX64, D.COMPLEX128)],
]

#: Row and column strides for the kernels of contiguous columns, of contiguous rows, and of any strides.
_STRIDES = ((64, 1), (1, 64), (192, 3))
#: A pointer that is aligned and one that is not.
_POINTERS = (1 << 12, 1 << 12 | 1)
_KERNEL = re.compile(r"__global__ void (\w+)")


def _packings():
    variants = [(variant, ()) for variant in EVERY_PACKING]
    for (source, target, scaled, how), parts in [*variants, *IN_PARTS.values()]:
        lines, elements = PACKED[how]
        for strides in _STRIDES:
            stack = MatrixStack.of(source, 64, 64, *strides)
            yield Packing(stack, target, 64 * elements, 64 * lines, scaled, how, *parts)


def _epilogue(product, out, c=None, bias=None, activation=None, scaled=False):
    result, addend = (MatrixStack.of(x, 64, 64, 64, 1) if x else None for x in (out, c))
    assert result is not None
    added = OperandSpec(bias, (64,), (1,)) if bias else None
    return Epilogue(product, 64, result, addend, added, activation, scaled)


def _epilogues():
    for product, out in RESULTS:
        yield _epilogue(product, out)
    for product, addend in ADDENDS:
        yield _epilogue(product, product, addend)
        yield _epilogue(product, product, addend, addend)
        yield _epilogue(product, product, None, addend)
    for activation in Activation:
        yield _epilogue(D.FLOAT64, D.FLOAT64, activation=activation)
        for out in REAL:
            yield _epilogue(D.FLOAT32, out, None, out, activation)
            yield _epilogue(D.FLOAT32, out, None, out, activation, True)
    for bias in (D.INT8, D.INT32):
        yield _epilogue(D.INT32, D.INT32, None, bias)
        yield _epilogue(D.INT32, D.INT32, None, bias, Activation.RELU)
    for product in (D.FLOAT32, D.COMPLEX64):
        yield _epilogue(product, product, product, product, None, True)


class Variant(NamedTuple):
    """A kernel: its name, source, macros, and the number of arguments of a launch."""

    name: str
    source: str
    macros: dict[str, str]
    arguments: int

    def __str__(self):
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.macros.items() if value != "0")])


def every_variant():
    """Return all variants, recorded from launches that a compiler and a driver in software accept."""
    with recording() as compiler:
        _launch_all()
    found = []
    for code, arguments in compiler.arguments.items():
        source = code.partition(b"\n")[2].decode()
        head = source[: source.index("//")]
        (name,) = re.findall(r"^#define KERNEL_(\w+)", head, re.MULTILINE) or re.findall(_KERNEL, source)
        macros = re.findall(r"^#define (?!KERNEL_)(\w+) (.+)$", head, re.MULTILINE)
        found.append(Variant(name, source, dict(macros), arguments))
    return sorted(found, key=str)  # a sample has some of each kernel


def _launch_all():
    for packing in _packings():
        for pointer in _POINTERS:
            prepare_packing(packing, 0)(pointer, pointer, pointer, 1)
    for spec in _epilogues():
        for pointer in _POINTERS:
            prepare_epilogue(spec, 0)(*[pointer] * 6, 1.0, 1.0, 1)
    for dtype in (D.FLOAT32, D.COMPLEX64):
        stack = MatrixStack.of(dtype, 64, 64, 64, 1)
        prepare_recomputing(dtype, 64, stack, stack, 0)(*[_POINTERS[0]] * 3, 1)
    Launch("spin", "spin.cu", {}, 0, 1, (1,), 1, ())(1, 1)
