"""The few machine-level operations that numba does not offer, and the way from Python to a kernel.

A kernel is a function of integers: addresses, strides in bytes, counts. It is called through
ctypes, which releases the GIL and unboxes nothing. Inside, memory is read and written through
`load` and `store` (an ndarray's indexing would test every index for being negative), vectors are
built as LLVM IR, and kernels reach each other through plain function pointers (`call`), so that
each is compiled once and combined at run time.

Importing this module imports numba; nothing on the way of ``import lowprec`` may do so.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from lowprec import forking
from lowprec.backends.cpu.cpuinfo import hidden_flags
from lowprec.backends.cpu.packed import stored_code

# Inline assembly is assembled by LLVM itself.
llvmlite.binding.initialize_native_asmparser()


def _llvm_features(hidden: frozenset[str]) -> str:
    """Return this processor's features without some flags, as LLVM spells them."""
    found = llvmlite.binding.get_host_cpu_features()
    present = [f"+{name}" for name, is_there in sorted(found.items()) if is_there]
    names = (x.replace("_", "-" if x.startswith("amx") else "") for x in sorted(hidden))
    # In this order: taking one away takes away all that needs it.
    return ",".join([*present, *(f"-{name}" for name in names)])


if hidden_flags() and numba.config.CPU_FEATURES is None:
    # For the process, since numba has one compiler; too late if that has compiled something already.
    numba.config.CPU_FEATURES = _llvm_features(hidden_flags())

# numba makes its target with the first function, under a lock of its own, and then takes the compiler's. A thread that
# compiles takes them the other way round, so two first uses at once could wait for each other for ever.
with global_compiler_lock:
    TARGET = cpu_target.target_context

# A fork waits until no other thread compiles: in the child nobody would release the lock, nor go on with what LLVM is
# in the middle of.
forking.hold(global_compiler_lock)

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


# --- LLVM IR in short -------------------------------------------------------------------------


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


# --- operations for kernels -------------------------------------------------------------------


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


#: The lesser and the greater of two integers. Python's own are compiled anew for each literal.
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


@intrinsic
def pause(typing_context):
    """Tell the core that this is a spinning loop."""

    def generate(context, builder, signature, args):
        inline_asm(builder, "pause", "~{memory}", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def yield_cpu(typing_context):
    """``sched_yield``, as a system call."""

    def generate(context, builder, signature, args):
        text = "movl $$24, %eax\nsyscall"
        clobbers = "~{rax},~{rcx},~{r11},~{memory},~{flags}"
        inline_asm(builder, text, clobbers, ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), generate


# --- the functions that kernels are made of ---------------------------------------------------


def _flags() -> compiler.Flags:
    """Return how functions are compiled: for callers that are native code, too, and without errors of arithmetic."""
    flags = compiler.Flags()
    flags.no_cpython_wrapper, flags.no_cfunc_wrapper, flags.no_compile = True, True, True
    flags.nrt, flags.error_model = True, "numpy"
    return flags


def _made_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, and all that it closes over; the name of a helper tells that of itself."""
    names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    made_of = [f"{name}={cell.cell_contents!r}" for name, cell in names]
    found = " ".join([function.__module__, function.__qualname__, *made_of])
    assert " at 0x" not in found, f"{found} would be compiled anew in each process"
    return found


def helper(result: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function one that kernels call, by the type of what it returns; its integers are 64-bit words.

    Nobody calls it from Python, so that it is compiled with the kernel, once. As a function of ``njit`` it would be
    typed for each literal argument, and get wrappers and machine code of its own, for twice the time of it all.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        def typed(typing_context, *args):
            words = (types.intp if isinstance(x, types.Integer) else x for x in args)

            def generate(context, builder, signature, args):
                compiled = context.compile_subroutine(builder, function, signature, flags=_flags())
                return context.call_internal(builder, compiled.fndesc, signature, args)

            return result(*words), generate

        parameters = inspect.signature(function).parameters.values()
        context = inspect.Parameter("typing_context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        typed.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
        typed.__name__ = _made_of(function)
        return intrinsic(typed)

    return decorate


# --- from Python ------------------------------------------------------------------------------

#: What this process has compiled: who looks for an instruction asks for its assembly.
compiled_here: list[Any] = []


def compile_kernel(function: Callable[..., Any], arity: int) -> int:
    """Compile a Python function of integers to native code and return its address.

    The machine code is kept in the cache on disk, by what the function is made of: its name, and the numbers and words
    that it closes over. Loading it from there makes numba type and compile nothing.
    """
    with global_compiler_lock:
        return stored_code.address(
            f"{_made_of(function)} {arity}", lambda: _machine_code(function, arity)
        )


def try_compiler() -> None:
    """Compile a function with another inlined, so that numba's interfaces that kernels need are known to work."""

    @helper(types.intp)
    def same(x):
        return x

    def probe(x):
        return lesser(same(x), 1)

    compile_kernel(probe, 1)


def _machine_code(function: Callable[..., Any], arity: int) -> bytes:
    """Return an object file with the symbol `stored_code.SYMBOL`, which calls the function and nothing of Python."""
    result = compiler.compile_extra(
        cpu_target.typing_context, TARGET, function, (types.intp,) * arity, types.intp, _flags(), {}
    )
    described, library = result.fndesc, result.library
    module = TARGET.create_module(stored_code.SYMBOL)
    inner_type = TARGET.call_conv.get_function_type(described.restype, described.argtypes)
    inner = ir.Function(module, inner_type, described.llvm_func_name)
    outer = ir.Function(module, ir.FunctionType(I64, [I64] * arity), stored_code.SYMBOL)
    builder = ir.IRBuilder(outer.append_basic_block())
    # Kernels raise nothing, so there is no status to look at.
    _, value = TARGET.call_conv.call_function(
        builder, inner, described.restype, described.argtypes, outer.args, attrs=("noinline",)
    )
    builder.ret(value)
    library.add_ir_module(module)
    # Numba makes machine code as it links a library, and keeps it for caches where it is told so.
    library.enable_object_caching()
    library.finalize()
    compiled_here.append(library)
    return bytes(library._get_compiled_object())


def callable_at(address: int, arity: int) -> Callable[..., int]:
    """A Python callable for a kernel; the GIL is released while it runs."""
    return ctypes.CFUNCTYPE(ctypes.c_ssize_t, *[ctypes.c_ssize_t] * arity)(address)
