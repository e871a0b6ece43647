"""The peak rate of the FP32 units: fused multiply-adds on registers, on all cores."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import statistics
import sys
import threading
import time

import machine

#: By flag of the processor: register, number of registers, elements of one. `_SUMS` are enough to hide the latency.
_UNITS = {"avx512f": ("zmm", 32, 16), "fma": ("ymm", 16, 8)}
_SUMS = {"zmm": 24, "ymm": 12}
#: Longer than the first 10 ms, in which a processor may throttle its widest units.
_STEPS, _ROUNDS = 10_000_000, 5


def fp32_gflops() -> float | None:
    """Return the highest measured rate, at the current clock; None where it cannot be measured."""
    unit = next((_UNITS[flag] for flag in _UNITS if flag in machine.cpu_flags()), None)
    if unit is None or sys.platform != "linux" or importlib.util.find_spec("numba") is None:
        return None
    register, count, numbers = unit
    spin = _loop(register, count)
    flops = 2.0 * numbers * _SUMS[register] * _STEPS * machine.cores()
    return max(1e-9 * flops / _seconds(spin, machine.cores()) for _ in range(_ROUNDS))


def _loop(register: str, count: int) -> ctypes._CFuncPtr:
    """Return a function of the number of steps, in each of which every sum grows once."""
    import llvmlite.binding
    from llvmlite import ir

    llvmlite.binding.initialize_native_target()
    llvmlite.binding.initialize_native_asmprinter()
    llvmlite.binding.initialize_native_asmparser()
    names = [f"%{register}{i}" for i in range(count)]
    lines = [f"vxorps {x}, {x}, {x}" for x in names] if register == "ymm" else [f"vpxord {x}, {x}, {x}" for x in names]
    lines += ["1:", *(f"vfmadd231ps {names[-1]}, {names[-2]}, {x}" for x in names[: _SUMS[register]])]
    lines += ["decq %rax", "jnz 1b", "vzeroupper"]
    module = ir.Module()
    word = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [word]), "spin")
    builder = ir.IRBuilder(function.append_basic_block())
    kind = ir.FunctionType(word, [word])
    clobbers = ",".join(f"~{{{register}{i}}}" for i in range(count))
    builder.call(ir.InlineAsm(kind, "\n".join(lines), f"={{rax}},{{rax}},{clobbers},~{{flags}}", True), function.args)
    builder.ret_void()
    target = llvmlite.binding.Target.from_default_triple()
    machine_ = target.create_target_machine(cpu=llvmlite.binding.get_host_cpu_name(), jit=True)
    engine = llvmlite.binding.create_mcjit_compiler(llvmlite.binding.parse_assembly(str(module)), machine_)
    spin = ctypes.CFUNCTYPE(None, ctypes.c_int64)(engine.get_function_address("spin"))
    spin.engine = engine  # type: ignore[attr-defined] # which owns the code
    return spin


def _seconds(spin: ctypes._CFuncPtr, cores: int) -> float:
    """Return the time of a core, the mean over all cores running concurrently."""
    together, times = threading.Barrier(cores), list[float]()
    cpus = sorted(os.sched_getaffinity(0))

    def run(number: int) -> None:
        # A scheduler may begin with two threads on one core.
        os.sched_setaffinity(0, {cpus[number % len(cpus)]})
        together.wait()
        begin = time.perf_counter()
        spin(_STEPS)
        times.append(time.perf_counter() - begin)

    workers = [threading.Thread(target=run, args=[i]) for i in range(cores)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return statistics.harmonic_mean(times)
