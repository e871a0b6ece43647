"""The variants of the kernels: element types and options that plans use, and the source of each with its arguments."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from lowprec.backends.cuda.compiling import Launch
from lowprec.backends.cuda.epilogue import Epilogue, prepare_epilogue, prepare_recomputing
from lowprec.backends.cuda.packing import prepare_packing
from lowprec.backends.cuda.steps import Addresses, queue_all
from lowprec.formats import DType
from lowprec.planning import ACTIVATIONS, MatrixStack, OperandSpec
from lowprec.planning.cublaslt.calls import PACKED, Packing
from lowprec.recipes import FORMATS, Rule
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


#: How the quantising kernels round: the rules of all modes of GPUs, with each measure alone.
QUANTIZED = [
    *dict.fromkeys(
        rule
        for rules in FORMATS.values()
        for rule in rules
        if rule.codes != "int8_blocks" and rule.is_plain
    ),
    Rule("e4m3", "block", (1, 32), "rceil"), Rule("e2m1", "block", (1, 32), "rceil"),
    Rule("e2m1", "block", (16, 16), "e4m3"),
]  # fmt: skip


#: Modes of the scales of operands that FP8 units multiply, by the rule's scale or scaling.
FLOAT8_UNITS = {
    "tensor": "SCALAR_32F", "vector": "OUTER_VEC_32F", "floor": "VEC32_UE8M0", "rceil": "VEC32_UE8M0",
    "even": "VEC32_UE8M0", "float32": "BLK128x128_32F",
}  # fmt: skip


def quantizing(source, rule, dtype, leading, rows, scale_mode=""):
    """Return the packing of an operand that is quantised, as plans have it."""
    scaled = rule.has_tensor_scale or rule.scaling == "vector" or bool(scale_mode)
    return Packing(source, dtype, leading, rows, scaled, rule=rule, scale_mode=scale_mode)


def scale_mode_of(rule):
    """Return the mode of an operand that FP8 units multiply."""
    return (
        "VEC128_32F" if rule.block == (1, 128) else FLOAT8_UNITS[rule.block_scale or rule.scaling]
    )


def target_of(rule):
    """Return the type in which rounded numbers are multiplied on every GPU."""
    return (
        D.INT8
        if rule.elements == "int8"
        else D.FLOAT32
        if rule.block_scale == "float32"
        else D.BFLOAT16
    )


def _quantizing():
    stack = MatrixStack.of(D.FLOAT32, 64, 64, 64, 1)
    for rule in QUANTIZED:
        yield quantizing(stack, rule, target_of(rule), 64, 64)
        if rule.elements in ("e4m3", "e5m2"):
            dtype = D.FLOAT8_E4M3FN if rule.elements == "e4m3" else D.FLOAT8_E5M2
            yield quantizing(stack, rule, dtype, 64, 64, scale_mode_of(rule))
        if rule.block_scale == "e4m3":
            yield quantizing(stack, rule, D.INT8, 32, 64, "VEC16_UE4M3")
    for rule in QUANTIZED[:: len(QUANTIZED) // 3]:
        for measures in (
            {"rounding": "stochastic"},
            {"hadamard": 16},
            {"rounding": "stochastic", "hadamard": 16},
        ):
            yield quantizing(stack, rule._replace(seed=1, **measures), target_of(rule), 64, 64)
        for source in (D.FLOAT16, D.BFLOAT16):
            for target in (D.BFLOAT16, D.FLOAT32):
                yield quantizing(replace(stack, dtype=source), rule, target, 64, 64)


def _epilogue(product, out, c=None, bias=None, activation=None, scaled=False, factors=(0, 0)):
    result, addend = (MatrixStack.of(x, 64, 64, 64, 1) if x else None for x in (out, c))
    assert result is not None
    added = OperandSpec(bias, (64,), (1,)) if bias else None
    return Epilogue(product, 64, result, addend, added, activation, scaled, factors)


def _epilogues():
    for product, out in RESULTS:
        yield _epilogue(product, out)
    for product, addend in ADDENDS:
        yield _epilogue(product, product, addend)
        yield _epilogue(product, product, addend, addend)
        yield _epilogue(product, product, None, addend)
    for activation in ACTIVATIONS:
        yield _epilogue(D.FLOAT64, D.FLOAT64, activation=activation)
        for out in REAL:
            yield _epilogue(D.FLOAT32, out, None, out, activation)
            yield _epilogue(D.FLOAT32, out, None, out, activation, True)
    for bias in (D.INT8, D.INT32):
        yield _epilogue(D.INT32, D.INT32, None, bias)
        yield _epilogue(D.INT32, D.INT32, None, bias, "relu")
    for product in (D.FLOAT32, D.COMPLEX64):
        yield _epilogue(product, product, product, product, None, True)
    for product in (D.FLOAT32, D.INT32):
        for out in REAL:
            yield _epilogue(product, out, None, out, "relu", factors=(2, 1))
        yield _epilogue(product, D.FLOAT32, D.FLOAT32, factors=(0, 2))


class Variant(NamedTuple):
    """A kernel: its name, source, macros, and the number of arguments of a launch."""

    name: str
    source: str
    macros: dict[str, str]
    arguments: int

    def __str__(self):
        return " ".join(
            [self.name, *(f"{name}={value}" for name, value in self.macros.items() if value != "0")]
        )


def every_variant():
    """Return all variants, recorded from launches that a compiler and a driver in software accept."""
    with recording() as compiler:
        _launch_all()
    found = []
    for code, arguments in compiler.arguments.items():
        source = code.partition(b"\n")[2].decode()
        head = source[: source.index("//")]
        (name,) = re.findall(r"^#define KERNEL_(\w+)", head, re.MULTILINE) or re.findall(
            _KERNEL, source
        )
        macros = re.findall(r"^#define (?!KERNEL_)(\w+) (.+)$", head, re.MULTILINE)
        found.append(Variant(name, source, dict(macros), arguments))
    return sorted(found, key=str)  # a sample has some of each kernel


def _launch_all():
    for packing in _packings():
        for pointer in _POINTERS:
            queue_all(
                prepare_packing(packing, 0),
                Addresses(a=pointer, packed_a=pointer, scales_a=pointer),
                1,
            )
    for packing in _quantizing():
        for at in _POINTERS:
            queue_all(
                prepare_packing(packing, 0), Addresses(a=at, packed_a=at, scales_a=_POINTERS[0]), 1
            )
    for spec in _epilogues():
        for pointer in _POINTERS:
            at = dict.fromkeys(("product", "out", "c", "bias", "scales_a", "scales_b"), pointer)
            queue_all(prepare_epilogue(spec, 0), Addresses(**at), 1)
    for dtype in (D.FLOAT32, D.COMPLEX64):
        stack = MatrixStack.of(dtype, 64, 64, 64, 1)
        steps = prepare_recomputing(dtype, 64, stack, stack, 0)
        queue_all(steps, Addresses(a=_POINTERS[0], b=_POINTERS[0], product=_POINTERS[0]), 1)
    Launch("spin", "spin.cu", {}, 0, 1, (1,), "Q", ())(1, 1)
