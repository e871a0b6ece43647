"""Compilation of kernels by numba's private interfaces, which only this file uses.

The public interface (``cfunc(cache=True)``) takes 0.33 s to load a cached function, because it sets up numba's typing
of NumPy; the machine code of `stored_code` is linked in milliseconds. If numba changes one of these interfaces,
`numba_import.fails` reports it before the first product, and products run without kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from lowprec.backends.cpu.cpuinfo import llvm_features
from lowprec.backends.cpu.packed import stored_code
from lowprec.util.lock import locked

llvmlite.binding.initialize_native_asmparser()  # for inline assembly

if numba.config.CPU_FEATURES is None:
    numba.config.CPU_FEATURES = llvm_features()

# numba creates its target under one lock and then acquires the compiler's lock, while a compiling thread acquires them
# in the other order: two concurrent first uses could deadlock. So the target is created here, under the second lock.
with global_compiler_lock:
    _TARGET = cpu_target.target_context

compiled_here: list[Any] = []  # the libraries of functions that this process has compiled


def _flags() -> compiler.Flags:
    """Return numba's flags: functions callable from native code, without arithmetic errors."""
    flags = compiler.Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = flags.nrt = True
    flags.error_model = "numpy"
    return flags


def inlined(result: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function into the kernels that call it; ``result`` is its return type, integers are 64-bit words.

    ``njit`` would type it for each literal argument and compile it separately, which takes twice as long.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        def typed(typing_context, *args):
            words = (types.intp if isinstance(x, types.Integer) else x for x in args)

            def generate(context, builder, signature, args):
                compiled = context.compile_subroutine(builder, function, signature, flags=_flags())
                return context.call_internal(builder, compiled.fndesc, signature, args)

            return result(*words), generate

        context, _ = inspect.signature(typed).parameters.values()
        parameters = [context, *inspect.signature(function).parameters.values()]
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        typed.__name__ = stored_code.made_of(function)
        return intrinsic(typed)

    return decorate


def compile_kernel(function: Callable[..., Any]) -> int:
    """Return the address of a function of integers that does not raise, compiled or loaded from disk."""
    return locked(_address, function)


def _address(function: Callable[..., Any]) -> int:
    with global_compiler_lock:
        return stored_code.address(stored_code.made_of(function), lambda: _machine_code(function))


def _machine_code(function: Callable[..., Any]) -> bytes:
    """Return an object file with the symbol `stored_code.SYMBOL`, which does not depend on Python."""
    arity = function.__code__.co_argcount
    how: Any = (types.intp,) * arity, types.intp, _flags(), {}
    result = compiler.compile_extra(cpu_target.typing_context, _TARGET, function, *how)
    described, library, word = result.fndesc, result.library, ir.IntType(64)
    module = _TARGET.create_module(stored_code.SYMBOL)
    signature, convention = (described.restype, described.argtypes), _TARGET.call_conv
    inner_type = convention.get_function_type(*signature)
    inner = ir.Function(module, inner_type, described.llvm_func_name)
    outer = ir.Function(module, ir.FunctionType(word, [word] * arity), stored_code.SYMBOL)
    builder = ir.IRBuilder(outer.append_basic_block())
    _, value = convention.call_function(builder, inner, *signature, outer.args, attrs=("noinline",))
    builder.ret(value)
    library.add_ir_module(module)
    library.enable_object_caching()  # to read the machine code after linking
    library.finalize()
    compiled_here.append(library)
    return bytes(library._get_compiled_object())
