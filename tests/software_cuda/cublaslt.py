"""A software cuBLASLt: the functions of ``nvmath.bindings.cublasLt`` that lowprec calls.

What real cuBLASLt refuses is refused, with its status; the message also says why. Source: the cuBLAS documentation,
*Using the cuBLASLt API*, and ``cublasLt.h``.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any

import numpy as np
from nvmath.bindings import cublasLt as real

from software_cuda import tables
from software_cuda.algorithms import Algorithm, fits_shape, made_for, relative_time, search
from software_cuda.arithmetic import Call, strided
from software_cuda.attributes import CONFIG, CONFIG_OFFSETS, attributes
from software_cuda.descriptors import DESCRIPTOR, LAYOUT, PREFERENCE, Objects, SoftwareLtError
from software_cuda.memory import Memory
from software_cuda.objects import (
    EXECUTION_FAILED,
    INTERNAL_ERROR,
    INVALID_VALUE,
    NOT_SUPPORTED,
    LtRefusal,
    Use,
    known_attribute,
    read_host,
)
from software_cuda.problem import Matrix, Problem, problem, validate
from software_cuda.recorder import Fault, Recorder, function
from software_cuda.runtime import Refusal, Runtime

_WORKSPACE_ALIGNMENT = 256

#: From this version on C and D that are one matrix must have one descriptor, too (reported in openxla/xla, 34912).
_ONE_LAYOUT_IN_PLACE = 130000

#: From this version on the heuristics fail in a thread that captures (reported in mudler/vllm.cpp, 1732).
_NO_SEARCH_IN_CAPTURE = 130300


class CublasLt(Objects):
    """Stands for ``nvmath.bindings.cublasLt``.

    Parameters
    ----------
    recorder : Recorder
    runtime : Runtime
    version : int

    Attributes
    ----------
    times : dict
        Simulated time of an algorithm relative to the others, by its id and the name of its tile (``"64x64"``).
    first_launch_ms : float
        How long the host loads the kernel of an algorithm at its first product.
    workspaces_race : bool
        Whether a product that has a workspace is two pieces of work, between which others may run.
    """

    def __init__(self, recorder: Recorder, runtime: Runtime, version: int = 130100) -> None:
        super().__init__(recorder, runtime, version)
        self.times: dict[tuple[int, str], float] = {}
        self.workspaces_race = True
        self.first_launch_ms = 0.0
        self._launched: set[bytes] = set()

    # -- algorithms -------------------------------------------------------------------------------

    def _device_name(self) -> str:
        model = self.runtime.devices[self.runtime.device]
        return f"{model.name} {model.capability} {self.version}"

    def _problem(self, operation: int, *layouts: int) -> Problem:
        """Return a product that this device can compute."""
        a, b, c, d = (self.get(x, LAYOUT) for x in layouts)
        found = problem(self.get(operation, DESCRIPTOR), (a, b, c, d))
        validate(found, self.runtime.devices[self.runtime.device].capability)
        return found

    @function
    def matmul_algo_get_heuristic(
        self,
        handle: int,
        operation: int,
        a: int,
        b: int,
        c: int,
        d: int,
        preference: int,
        requested: int,
        results: int,
        returned: int,
    ) -> None:
        wanted = self.get(preference, PREFERENCE)
        if requested <= 0:
            raise SoftwareLtError(INVALID_VALUE, f"{requested} algorithms were asked for")
        me = threading.get_ident()
        if self.version >= _NO_SEARCH_IN_CAPTURE and any(x.thread == me for x in self.runtime.captures):
            raise SoftwareLtError(INTERNAL_ERROR, "a search during a capture")
        with Use(self.handle(handle), self.recorder):
            try:
                asked = self._problem(operation, a, b, c, d)
                found = search(asked, wanted, self._device_name(), tf32_forbidden=bool(self.tf32_forbidden))[:requested]
            except LtRefusal as refusal:
                raise SoftwareLtError(refusal.status, refusal.why) from None
        for i, algorithm in enumerate(found):
            self._write_result(results, i, algorithm)
        ctypes.c_int.from_address(returned).value = len(found)

    def _write_result(self, address: int, index: int, algorithm: Algorithm) -> None:
        result = np.zeros(1, real.matmul_heuristic_result_dtype)
        result["algo"] = np.frombuffer(algorithm.pack(), real.matmul_algo_dtype)
        result["workspace_size"] = algorithm.workspace
        result["waves_count"] = 1.0
        ctypes.memmove(address + index * result.nbytes, result.ctypes.data, result.nbytes)

    @function
    def matmul_algo_check(
        self, handle: int, operation: int, a: int, b: int, c: int, d: int, algo: int, result: int
    ) -> None:
        with Use(self.handle(handle), self.recorder):
            try:
                asked = self._problem(operation, a, b, c, d)
                algorithm = self._algorithm(algo, asked)
            except LtRefusal as refusal:
                raise SoftwareLtError(refusal.status, refusal.why) from None
        self._write_result(result, 0, algorithm)

    def _algorithm(self, address: int, asked: Problem) -> Algorithm:
        found = Algorithm.unpack(read_host(address, real.matmul_algo_dtype.itemsize))
        if found.made_for != made_for(asked, self._device_name()):
            raise LtRefusal(NOT_SUPPORTED, "the algorithm is for other types or another device")
        if not fits_shape(found, asked):
            raise LtRefusal(NOT_SUPPORTED, f"the algorithm wants steps of {found.alignment} bytes")
        return found

    @function
    def matmul_algo_config_get_attribute(self, algo: int, attribute: int, *rest: int) -> None:
        """Read bytes of an algorithm, whatever these are."""
        try:
            data = read_host(algo, real.matmul_algo_dtype.itemsize)
            row = known_attribute(attributes(CONFIG, self.version), attribute)
        except LtRefusal as refusal:
            raise SoftwareLtError(refusal.status, refusal.why) from None
        start = CONFIG_OFFSETS[row.number]
        self.write(data[start : start + row.nbytes], *rest)

    @function
    def matmul_algo_cap_get_attribute(self, algo: int, attribute: int, *rest: int) -> None:
        values = _unpacked(algo).capabilities()
        if attribute not in values:
            raise SoftwareLtError(NOT_SUPPORTED, f"attribute {attribute} is not modelled")
        dtype = real.get_matmul_algo_cap_attribute_dtype(attribute)
        self.write(np.array(values[attribute], dtype).tobytes(), *rest)

    # -- the product ------------------------------------------------------------------------------

    @function
    def matmul(
        self,
        handle: int,
        operation: int,
        alpha: int,
        a: int,
        a_layout: int,
        b: int,
        b_layout: int,
        beta: int,
        c: int,
        c_layout: int,
        d: int,
        d_layout: int,
        algo: int,
        workspace: int,
        workspace_bytes: int,
        stream: int,
    ) -> None:
        used = self.handle(handle)
        described = self.get(operation, DESCRIPTOR)
        with Use(used, self.recorder), Use(described, self.recorder, reads=True):
            self.let_others_run()
            try:
                asked = self._problem(operation, a_layout, b_layout, c_layout, d_layout)
                if not algo:
                    raise NotImplementedError("the software cuBLASLt wants an algorithm")
                algorithm = self._algorithm(algo, asked)
                scale = tables.DTYPES[asked.scale]
                factors = [np.frombuffer(read_host(x, scale.itemsize), scale)[0] for x in (alpha, beta)]
                if c == d and c_layout != d_layout and self.version >= _ONE_LAYOUT_IN_PLACE:
                    raise LtRefusal(INVALID_VALUE, "C is D, by another descriptor")
                call = Call(asked, algorithm, *factors, a, b, c, d, used.device)
                self._check_call(call)
                self._check_workspace(algorithm, workspace, workspace_bytes)
                with self.runtime.lock:
                    self._queue(call, workspace, stream)
            except LtRefusal as refusal:
                raise SoftwareLtError(refusal.status, refusal.why) from None

    def _check_call(self, call: Call) -> None:
        x, wanted = call.problem, call.algorithm.alignment
        pointers = {"A": call.a, "B": call.b, "D": call.d}
        if call.beta != 0:
            pointers["C"] = call.c
        if x.has_bias:
            pointers["bias"] = x.bias_pointer
        for name, pointer in pointers.items():
            if not pointer:
                raise LtRefusal(INVALID_VALUE, f"{name} is null")
            if pointer % wanted:
                raise LtRefusal(INVALID_VALUE, f"{name} at {pointer:#x}: the algorithm wants multiples of {wanted}")
        if x.scale == tables.R_32I and not {int(call.alpha), int(call.beta)} <= {0, 1}:
            raise LtRefusal(NOT_SUPPORTED, "alpha and beta are 0 or 1 for integers")
        if call.beta != 0 and call.c == call.d and x.c.strides != x.d.strides:
            raise LtRefusal(INVALID_VALUE, "C is D, with another layout")
        self._check_overlap(call)

    def _check_overlap(self, call: Call) -> None:
        """Note that D overwrites what is read, which has no defined result."""
        x = call.problem
        others = [(x.a, call.a), (x.b, call.b)]
        if call.beta != 0 and call.c != call.d:
            others.append((x.c, call.c))
        d = _extent(x.d, call.d)
        for matrix, pointer in others:
            other = _extent(matrix, pointer)
            if other[0] < d[1] and d[0] < other[1] and self._shares(x.d, call.d, matrix, pointer):
                self.recorder.faults.append(f"D overlaps {matrix.name}")

    def _shares(self, d: Matrix, d_pointer: int, other: Matrix, pointer: int) -> bool:
        try:
            first = strided(self.runtime.memory, d, d_pointer, self.runtime.device)
            second = strided(self.runtime.memory, other, pointer, self.runtime.device)
            return np.shares_memory(first, second, max_work=10000)
        except (np.exceptions.TooHardError, Fault):  # a fault is told when it runs
            return False

    def _check_workspace(self, algorithm: Algorithm, address: int, nbytes: int) -> None:
        if nbytes < algorithm.workspace:
            raise LtRefusal(
                INVALID_VALUE, f"the algorithm wants {algorithm.workspace} bytes of workspace, not {nbytes}"
            )
        if algorithm.workspace and (not address or address % _WORKSPACE_ALIGNMENT):
            raise LtRefusal(INVALID_VALUE, f"the workspace at {address:#x} is not aligned to 256")

    def _queue(self, call: Call, workspace: int, stream: int) -> None:
        runtime, x = self.runtime, call.problem
        try:
            found = runtime.stream(stream, current=True)
            time_ms = self._time_ms(call)
            if call.algorithm.pack() not in self._launched:
                self._launched.add(call.algorithm.pack())
                runtime.scheduler.clock_ms += self.first_launch_ms
            if not call.algorithm.workspace or not self.workspaces_race:
                runtime.enqueue(found, "matmul", _whole(call, runtime.memory), time_ms)
                return
            halves = _Halves(call, runtime.memory, workspace, self.recorder)
            runtime.enqueue(found, "matmul", halves.begin, time_ms / 2)
            runtime.enqueue(found, "matmul, second half", halves.end, time_ms / 2)
        except Refusal as refusal:
            raise LtRefusal(EXECUTION_FAILED, f"{x.signature}: {refusal.status!r}") from None

    def _time_ms(self, call: Call) -> float:
        x, algorithm = call.problem, call.algorithm
        tile = real.MatmulTile(algorithm.tile).name.removeprefix("TILE_")
        factor = self.times.get((algorithm.id, tile), relative_time(algorithm))
        return (0.02 + x.m * x.n * x.k * x.d.batch_count / 1e10) * factor


def _unpacked(address: int) -> Algorithm:
    try:
        return Algorithm.unpack(read_host(address, real.matmul_algo_dtype.itemsize))
    except LtRefusal as refusal:
        raise SoftwareLtError(refusal.status, refusal.why) from None


def _whole(call: Call, memory: Memory) -> Any:
    return lambda: call.write(memory, call.multiply(memory))


def _extent(x: Matrix, pointer: int) -> tuple[int, int]:
    first, end = x.span()
    return pointer + first, pointer + end


_marks = itertools.count()


class _Halves:
    """A product that leaves something in its workspace and finds it later, if nobody else wrote there."""

    def __init__(self, call: Call, memory: Memory, workspace: int, recorder: Recorder) -> None:
        self._call = call
        self._memory = memory
        self._workspace = workspace
        self._recorder = recorder
        self._value: Any = None
        self._mark = 0

    def _bytes(self) -> Any:
        size = self._call.algorithm.workspace
        return self._memory.at(self._workspace, size, self._call.device, "cublasLtMatmul, workspace")

    def begin(self) -> None:
        self._value = self._call.multiply(self._memory)
        self._mark = 1 + next(_marks) % 251
        self._bytes()[:] = self._mark

    def end(self) -> None:
        if (self._bytes() == self._mark).all():
            self._call.write(self._memory, self._value)
        else:
            self._recorder.faults.append("other work wrote to the workspace of a running product")
            self._call.poison(self._memory)
        self._value = None
