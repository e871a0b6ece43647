"""Machine-level operations that numba lacks, as intrinsics for kernels. Importing this module imports numba.

A kernel is a function of integers (addresses, strides in bytes, counts), called through ctypes without the GIL. It
accesses memory by `load` and `store`, without index checks, and calls other kernels by function pointers (`call`), so
that each is compiled once.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowprec.backends.cpu.cpuinfo import is_x86_64
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
    """Select elements of `a` followed by `b`, by position."""
    return builder.shuffle_vector(a, b, vector(I32, mask))


def inline_asm(builder: Any, text: str, constraints: str, result: Any, args: Sequence[Any]) -> Any:
    """Assembly in AT&T syntax, with operands ``$0``, ``$1`` and so on."""
    signature = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(ir.InlineAsm(signature, text, constraints, side_effect=True), args)


def emitted(result: Any = types.void, *, of: Any = types.intp, literals: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Turn a function of LLVM's builder and the arguments of a call into an intrinsic.

    ``result`` is the return type and ``of`` the type of the arguments; those in ``literals`` must be literals in the
    calling code, and are passed as Python numbers.
    """

    def decorate(emit: Any) -> Any:
        own = inspect.signature(emit)
        names = list(own.parameters)[1:]

        def typed(typing_context: Any, *given: Any) -> Any:
            known = {name: x.literal_value for name, x in zip(names, given, strict=True) if name in literals}

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                found = emit(builder, *(known.get(name, x) for name, x in zip(names, args, strict=True)))
                return context.get_dummy_value() if result is types.void else found

            return result(*(x if name in literals else of for name, x in zip(names, given, strict=True))), generate

        typed.__name__, typed.__signature__ = emit.__name__, own  # type: ignore[attr-defined]
        return intrinsic(prefer_literal=bool(literals))(typed)

    return decorate


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


@emitted(types.intp)
def field(builder, words, index):
    """``field(job, J.K)``: one of the int64 at an address."""
    word = builder.gep(pointer(builder, words, I64), [index])
    return builder.load(word, align=1)


@emitted(types.intp)
def lesser(builder, a, b):
    """Return the lesser of two integers; ``min`` would be compiled for each literal argument."""
    return builder.select(builder.icmp_signed("<", a, b), a, b)


@intrinsic
def call(typing_context, function, args):
    """Call a kernel by its address with a tuple of integers."""
    count = len(args)

    def generate(context, builder, signature, values):
        parameters = [builder.extract_value(values[1], i) for i in range(count)]
        function_type = ir.FunctionType(I64, [I64] * count)
        return builder.call(pointer(builder, values[0], function_type), parameters)

    return types.intp(types.intp, types.UniTuple(types.intp, count)), generate


@emitted(types.intp)
def atomic_add(builder, address, value):
    """Add to the int64 at an address; return its old value."""
    return builder.atomic_rmw("add", pointer(builder, address, I64), value, "seq_cst")


@emitted(types.intp)
def atomic_exchange(builder, address, value):
    """Write an int64; return its old value."""
    return builder.atomic_rmw("xchg", pointer(builder, address, I64), value, "seq_cst")


@emitted(types.intp)
def exchange_if(builder, address, expected, value):
    """Write an int64 if it has the expected value; return whether it had."""
    at = pointer(builder, address, I64)
    found = builder.cmpxchg(at, expected, value, "seq_cst", "seq_cst")
    return builder.zext(builder.extract_value(found, 1), I64)


@emitted(types.intp)
def atomic_load(builder, address):
    """Read an int64 that other threads write, with acquire semantics."""
    return builder.load_atomic(pointer(builder, address, I64), "acquire", 8)


@emitted()
def atomic_store(builder, address, value):
    """Write an int64 that other threads read, with release semantics."""
    builder.store_atomic(value, pointer(builder, address, I64), "release", 8)


def instruction(text: str, clobbers: str = "~{memory}") -> Any:
    """Return a function for an instruction without operands and result."""
    return emitted()(lambda builder: inline_asm(builder, text, clobbers, ir.VoidType(), []))


#: The instruction for spin loops, and ``sched_yield`` as a system call of x86-64.
pause = instruction("pause" if is_x86_64() else "yield")
yield_cpu = instruction("movl $$24, %eax\nsyscall", "~{rax},~{rcx},~{r11},~{memory},~{flags}")


@emitted()
def prefetch_line(builder, address):
    """Prefetch a cache line into the L2 cache."""
    inline_asm(builder, "prefetcht1 ($0)", "r", ir.VoidType(), [address])


def assembled(name: str, text: str, clobbers: str) -> int:
    """Return the address of a micro-kernel in assembly; ``name`` identifies it.

    Operands: $0 A, $1 B, $2 accumulators, $3 steps (at least 1), $4 whether to add to the accumulators, $5 address of
    the next piece of B.
    """

    def emit(builder, a, b, acc, steps, add, following):
        inline_asm(builder, text, "r,r,r,r,r,r," + clobbers, ir.VoidType(), [a, b, acc, steps, add, following])

    emit.__name__ = name
    assembly = emitted()(emit)

    def micro(a, b, acc, steps, add, following):
        assembly(a, b, acc, steps, add, following)
        return 0

    return compile_kernel(micro)


def try_compiler() -> None:
    """Compile a test function, which fails if numba lacks an interface that kernels need."""

    @inlined(types.intp)
    def same(x):
        return x

    def probe(x):
        return lesser(same(x), 1)

    compile_kernel(probe)


def compiled(function: Callable[..., Any]) -> Callable[..., int]:
    """Return a kernel as a Python callable; the GIL is released while it runs."""
    arity = function.__code__.co_argcount
    return ctypes.CFUNCTYPE(ctypes.c_ssize_t, *[ctypes.c_ssize_t] * arity)(compile_kernel(function))
