"""Machine-level operations that numba does not offer, as intrinsics for kernels. Importing this module imports numba.

A kernel is a function of integers (addresses, strides in bytes, counts), called through ctypes without the GIL. It
reads and writes memory by `load` and `store`, without the index checks of arrays, and calls other kernels by function
pointers (`call`), so that each is compiled once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowprec.backends.cpu.packed.compilation import compile_kernel, inlined

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()

_ELEMENTS: dict[str, tuple[Any, Any]] = {
    "i8": (I8, types.int8),
    "u16": (I16, types.uint16),
    "i32": (I32, types.int32),
    "u32": (I32, types.uint32),
    "i64": (I64, types.intp),
    "f32": (F32, types.float32),
    "f64": (F64, types.float64),
}


def vector(element: Any, values: Sequence[int]) -> Any:
    """A constant vector."""
    return ir.Constant(ir.VectorType(element, len(values)), list(values))


def pointer(builder: Any, address: Any, pointee: Any) -> Any:
    """An integer as a pointer to `pointee`."""
    return builder.inttoptr(address, pointee.as_pointer())


def shuffle(builder: Any, a: Any, b: Any, mask: Sequence[int]) -> Any:
    """Elements of `a` followed by `b`, picked by position."""
    return builder.shuffle_vector(a, b, vector(I32, mask))


def inline_asm(builder: Any, text: str, constraints: str, result: Any, args: Sequence[Any]) -> Any:
    """Assembly in AT&T syntax, with operands ``$0``, ``$1`` and so on."""
    signature = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(ir.InlineAsm(signature, text, constraints, side_effect=True), args)


@intrinsic(prefer_literal=True)
def load(typing_context, address, kind):
    """``load(address, "f32")``: the element at an address, of any alignment."""
    element, numba_type = _ELEMENTS[kind.literal_value]

    def generate(context, builder, signature, args):
        return builder.load(pointer(builder, args[0], element), align=1)

    return numba_type(types.intp, kind), generate


@intrinsic(prefer_literal=True)
def store(typing_context, address, value, kind):
    """``store(address, value, "f32")``."""
    element, numba_type = _ELEMENTS[kind.literal_value]

    def generate(context, builder, signature, args):
        builder.store(args[1], pointer(builder, args[0], element), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, numba_type, kind), generate


@intrinsic
def field(typing_context, words, index):
    """``field(job, J.K)``: one of the int64 at an address."""

    def generate(context, builder, signature, args):
        word = builder.gep(pointer(builder, args[0], I64), [args[1]])
        return builder.load(word, align=1)

    return types.intp(types.intp, types.intp), generate


def _chosen(comparison: str) -> Any:
    def choose(typing_context, a, b):
        def generate(context, builder, signature, args):
            return builder.select(builder.icmp_signed(comparison, *args), *args)

        return types.intp(types.intp, types.intp), generate

    return intrinsic(choose)


#: The lesser and the greater of two integers. Python's own are compiled again for each literal.
lesser, greater = _chosen("<"), _chosen(">")


@intrinsic
def call(typing_context, function, args):
    """Call a kernel by its address with a tuple of integers."""
    count = len(args)

    def generate(context, builder, signature, values):
        parameters = [builder.extract_value(values[1], i) for i in range(count)]
        function_type = ir.FunctionType(I64, [I64] * count)
        return builder.call(pointer(builder, values[0], function_type), parameters)

    return types.intp(types.intp, types.UniTuple(types.intp, count)), generate


@intrinsic
def atomic_add(typing_context, address, value):
    """Add to the int64 at an address; return what it was before."""

    def generate(context, builder, signature, args):
        return builder.atomic_rmw("add", pointer(builder, args[0], I64), args[1], "seq_cst")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def atomic_exchange(typing_context, address, value):
    """Write an int64; return what it was before."""

    def generate(context, builder, signature, args):
        return builder.atomic_rmw("xchg", pointer(builder, args[0], I64), args[1], "seq_cst")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def exchange_if(typing_context, address, expected, value):
    """Write an int64 if it is as expected; return whether it was."""

    def generate(context, builder, signature, args):
        at = pointer(builder, args[0], I64)
        found = builder.cmpxchg(at, args[1], args[2], "seq_cst", "seq_cst")
        return builder.zext(builder.extract_value(found, 1), I64)

    return types.intp(types.intp, types.intp, types.intp), generate


@intrinsic
def atomic_load(typing_context, address):
    """Read an int64 that other threads write; what they wrote before it is seen as well."""

    def generate(context, builder, signature, args):
        return builder.load_atomic(pointer(builder, args[0], I64), "acquire", 8)

    return types.intp(types.intp), generate


@intrinsic
def atomic_store(typing_context, address, value):
    """Write an int64 for other threads to see, after all that was written before."""

    def generate(context, builder, signature, args):
        builder.store_atomic(args[1], pointer(builder, args[0], I64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


def instruction(text: str, clobbers: str = "~{memory}") -> Any:
    """Return a function that is an instruction without operands and result."""

    def emit(typing_context):
        def generate(context, builder, signature, args):
            inline_asm(builder, text, clobbers, ir.VoidType(), [])
            return context.get_dummy_value()

        return types.void(), generate

    return intrinsic(emit)


#: For a loop that spins; and ``sched_yield``, as a system call.
pause = instruction("pause")
yield_cpu = instruction("movl $$24, %eax\nsyscall", "~{rax},~{rcx},~{r11},~{memory},~{flags}")


def try_compiler() -> None:
    """Compile a function with another inlined, which fails if numba lacks an interface that kernels need."""

    @inlined(types.intp)
    def same(x):
        return x

    def probe(x):
        return lesser(same(x), 1)

    compile_kernel(probe, 1)


def callable_at(address: int, arity: int) -> Callable[..., int]:
    """A Python callable for a kernel; the GIL is released while it runs."""
    return ctypes.CFUNCTYPE(ctypes.c_ssize_t, *[ctypes.c_ssize_t] * arity)(address)
