"""A software cuBLASLt: the functions of ``nvmath.bindings.cublasLt`` that lowprec calls.

What real cuBLASLt refuses is refused, with its status; the message also has the reason. Source: the cuBLAS
documentation, *Using the cuBLASLt API*, and ``cublasLt.h``.
"""

import ctypes
import itertools
import threading
from dataclasses import fields, replace
from typing import Any

import numpy as np
from nvmath.bindings import cublasLt as real

from software_cuda import tables
from software_cuda.algorithms import TIMES, Algorithm, fits_shape, made_for, search
from software_cuda.arithmetic import Call, strided
from software_cuda.attributes import CONFIG, CONFIG_OFFSETS, attributes
from software_cuda.descriptors import DESCRIPTOR, EMULATION, LAYOUT, PREFERENCE, Objects
from software_cuda.emulation import Emulation
from software_cuda.objects import (
    EXECUTION_FAILED,
    INTERNAL_ERROR,
    INVALID_VALUE,
    NOT_SUPPORTED,
    Use,
    known_attribute,
    read_host,
    write_attribute,
)
from software_cuda.problem import Problem, problem, validate
from software_cuda.recorder import Fault, Refusal, function

_WORKSPACE_ALIGNMENT = 256

#: From this version on, C and D that are one matrix must have one descriptor, too (reported in openxla/xla, 34912).
_ONE_LAYOUT_IN_PLACE = 130000

#: From this version on, the heuristics fail in a thread that captures (reported in mudler/vllm.cpp, 1732).
_NO_SEARCH_IN_CAPTURE = 130300


class CublasLt(Objects):
    """Replaces ``nvmath.bindings.cublasLt``.

    ``times`` has simulated times of algorithms relative to the others, by id and name of the tile (``"64x64"``);
    ``first_launch_ms`` is the host's time for loading the kernel of an algorithm at its first product. A
    product with a workspace is two pieces of work, between which others may run.
    """

    def __init__(self, recorder, runtime, version):
        super().__init__(recorder, runtime, version)
        self.times: dict[tuple[int, str], float] = {}
        self.first_launch_ms = 0.0
        self._launched: set[bytes] = set()
        #: First algorithms of searches, with their products.
        self._first: set[tuple[bytes, Problem]] = set()

    # -- algorithms -------------------------------------------------------------------------------

    def _device_name(self):
        model = self.runtime.devices[self.runtime.device]
        return f"{model.name} {model.capability} {self.version}"

    def _problem(self, operation, *layouts):
        """Return a product that this device can compute."""
        a, b, c, d = (self.get(x, LAYOUT) for x in layouts)
        found = problem(self.get(operation, DESCRIPTOR), (a, b, c, d))
        capability = self.runtime.devices[self.runtime.device].capability
        validate(found, capability, self.recorder.switches)
        settings = self._emulation(found.emulation_descriptor)
        return replace(
            found,
            emulation=settings
            if tables.emulates(found.compute, capability, self.version)
            else None,
        )

    def _emulation(self, number):
        """Return the settings of a descriptor; 0 means the defaults."""
        described = self.get(number, EMULATION).attributes if number else {}
        names = [x.name for x in fields(Emulation)]
        return Emulation(
            **{names[i]: int.from_bytes(x, "little", signed=True) for i, x in described.items()}
        )

    @function
    def matmul_algo_get_heuristic(
        self, handle, operation, a, b, c, d,
        preference, requested, results, returned,
    ):  # fmt: skip
        wanted = self.get(preference, PREFERENCE)
        me = threading.get_ident()
        if self.version >= _NO_SEARCH_IN_CAPTURE and any(
            x.thread == me for x in self.runtime.captures
        ):
            raise Refusal(INTERNAL_ERROR, "a search during a capture")
        with Use(self.handle(handle), self.recorder):
            asked = self._problem(operation, a, b, c, d)
            forbidden, switches = bool(self.tf32_forbidden), self.recorder.switches
            found = search(asked, wanted, self._device_name(), switches, tf32_forbidden=forbidden)[
                :requested
            ]
        if switches.first_algorithm and found:
            self._first.add((found[0].pack(), asked.without_pointers))
        for i, algorithm in enumerate(found):
            self._write_result(results, i, algorithm)
        ctypes.c_int.from_address(returned).value = len(found)

    def _write_result(self, address, index, algorithm):
        result = np.zeros(1, real.matmul_heuristic_result_dtype)
        result["algo"] = np.frombuffer(algorithm.pack(), real.matmul_algo_dtype)
        result["workspace_size"] = algorithm.workspace
        result["waves_count"] = 1.0
        ctypes.memmove(address + index * result.nbytes, result.ctypes.data, result.nbytes)

    @function
    def matmul_algo_check(self, handle, operation, a, b, c, d, algo, result):
        with Use(self.handle(handle), self.recorder):
            algorithm = self._algorithm(algo, self._problem(operation, a, b, c, d))
        self._write_result(result, 0, algorithm)

    def _algorithm(self, address, asked):
        found = Algorithm.unpack(read_host(address, real.matmul_algo_dtype.itemsize))
        if found.made_for != made_for(asked, self._device_name()):
            raise Refusal(NOT_SUPPORTED, "the algorithm is for other types or another device")
        if not fits_shape(found, asked):
            raise Refusal(NOT_SUPPORTED, f"the algorithm wants steps of {found.alignment} bytes")
        return found

    @function
    def matmul_algo_config_get_attribute(self, algo, attribute, *rest):
        """Read bytes of an algorithm, whatever these are."""
        data = read_host(algo, real.matmul_algo_dtype.itemsize)
        row = known_attribute(attributes(CONFIG, self.version), attribute)
        start = CONFIG_OFFSETS[row.number]
        write_attribute(data[start : start + row.nbytes], *rest)

    @function
    def matmul_algo_cap_get_attribute(self, algo, attribute, *rest):
        found = Algorithm.unpack(read_host(algo, real.matmul_algo_dtype.itemsize))
        assert attribute == real.MatmulAlgoCapAttribute.NUMERICAL_IMPL_FLAGS, (
            "others are not modelled"
        )
        write_attribute(np.uint64(found.flags).tobytes(), *rest)

    # -- the product ------------------------------------------------------------------------------

    @function
    def matmul(
        self, handle, operation, alpha, a, a_layout, b, b_layout,
        beta, c, c_layout, d, d_layout,
        algo, workspace, workspace_bytes, stream,
    ):  # fmt: skip
        used, described = self.handle(handle), self.get(operation, DESCRIPTOR)
        with Use(used, self.recorder), Use(described, self.recorder, reads=True):
            self.let_others_run()
            asked = self._problem(operation, a_layout, b_layout, c_layout, d_layout)
            algorithm = self._algorithm(algo, asked)
            scale = tables.DTYPES[asked.scale]
            factors = [np.frombuffer(read_host(x, scale.itemsize), scale)[0] for x in (alpha, beta)]
            if c == d and c_layout != d_layout and self.version >= _ONE_LAYOUT_IN_PLACE:
                raise Refusal(INVALID_VALUE, "C is D, by another descriptor")
            call = Call(asked, algorithm, *factors, a, b, c, d, used.device)
            self._check_call(call)
            self._check_workspace(algorithm, workspace, workspace_bytes)
            if stream in (1, 2) and self.recorder.switches.default_streams:
                raise Refusal(INVALID_VALUE, f"stream {stream}")
            if (algorithm.pack(), asked.without_pointers) in self._first:
                raise Refusal(EXECUTION_FAILED, "the first algorithm")
            with self.runtime.lock:
                self._queue(call, workspace, stream)

    def _check_call(self, call):
        x, wanted = call.problem, call.algorithm.alignment
        pointers = {"A": call.a, "B": call.b, "D": call.d}
        if call.beta != 0:
            pointers["C"] = call.c
        if x.has_bias:
            pointers["bias"] = x.bias_pointer
        for name, pointer in pointers.items():
            if not pointer:
                raise Refusal(INVALID_VALUE, f"{name} is null")
            if pointer % wanted:
                raise Refusal(
                    INVALID_VALUE,
                    f"{name} at {pointer:#x}: the algorithm wants multiples of {wanted}",
                )
        if x.scale == tables.R_32I and not {int(call.alpha), int(call.beta)} <= {0, 1}:
            raise Refusal(NOT_SUPPORTED, "alpha and beta are 0 or 1 for integers")
        if call.beta != 0 and call.c == call.d and x.c.strides != x.d.strides:
            raise Refusal(INVALID_VALUE, "C is D, with another layout")
        self._check_overlap(call)

    def _check_overlap(self, call):
        """Note that D overwrites an operand, which has no defined result."""
        x = call.problem
        others = [(x.a, call.a), (x.b, call.b)]
        if call.beta != 0 and call.c != call.d:
            others.append((x.c, call.c))
        d = _extent(x.d, call.d)
        for matrix, pointer in others:
            other = _extent(matrix, pointer)
            if other[0] < d[1] and d[0] < other[1] and self._shares(x.d, call.d, matrix, pointer):
                self.recorder.faults.append(f"D overlaps {matrix.name}")

    def _shares(self, d, d_pointer, other, pointer):
        try:
            first = strided(self.runtime.memory, d, d_pointer, self.runtime.device)
            second = strided(self.runtime.memory, other, pointer, self.runtime.device)
            return np.shares_memory(first, second, max_work=10000)
        except (np.exceptions.TooHardError, Fault):  # a fault is noted when the product runs
            return False

    def _check_workspace(self, algorithm, address, nbytes):
        if nbytes < algorithm.workspace:
            raise Refusal(
                INVALID_VALUE,
                f"the algorithm wants {algorithm.workspace} bytes of workspace, not {nbytes}",
            )
        if algorithm.workspace and (not address or address % _WORKSPACE_ALIGNMENT):
            raise Refusal(INVALID_VALUE, f"the workspace at {address:#x} is not aligned to 256")

    def _queue(self, call, workspace, stream):
        runtime, algorithm, memory = self.runtime, call.algorithm, self.runtime.memory
        try:
            found = runtime.stream(stream, current=True)
            time_ms = self._time_ms(call)
            if algorithm.pack() not in self._launched:
                self._launched.add(algorithm.pack())
                runtime.scheduler.clock_ms += self.first_launch_ms
            if not algorithm.workspace:
                runtime.enqueue(
                    found, "matmul", lambda: call.write(memory, call.multiply(memory)), time_ms
                )
                return
            halves = _Halves(call, memory, workspace, self.recorder)
            runtime.enqueue(found, "matmul", halves.begin, time_ms / 2)
            runtime.enqueue(found, "matmul, second half", halves.end, time_ms / 2)
        except Refusal as refusal:
            raise Refusal(
                EXECUTION_FAILED, f"{call.problem.signature}: {refusal.status!r}"
            ) from None

    def _time_ms(self, call):
        x, algorithm = call.problem, call.algorithm
        key = (algorithm.id, real.MatmulTile(algorithm.tile).name.removeprefix("TILE_"))
        return (0.02 + x.m * x.n * x.k * x.d.batch_count / 1e10) * self.times.get(key, TIMES[key])


def _extent(x, pointer):
    first, end = x.span()
    return pointer + first, pointer + end


_marks = itertools.count()


class _Halves:
    """A product that writes a mark to its workspace and reads it later, unless other work has overwritten it."""

    def __init__(self, call, memory, workspace, recorder):
        self._call = call
        self._memory = memory
        self._workspace = workspace
        self._recorder = recorder
        self._value: Any = None
        self._mark = 0

    def _bytes(self):
        size = self._call.algorithm.workspace
        return self._memory.at(
            self._workspace, size, self._call.device, "cublasLtMatmul, workspace"
        )

    def begin(self):
        self._value = self._call.multiply(self._memory)
        self._mark = 1 + next(_marks) % 251
        self._bytes()[:] = self._mark

    def end(self):
        if (self._bytes() == self._mark).all():
            self._call.write(self._memory, self._value)
        else:
            self._recorder.faults.append("other work wrote to the workspace of a running product")
            self._call.poison(self._memory)
        self._value = None
