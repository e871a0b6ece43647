"""The products, epilogues, stream handles and kernels that cuBLASLt and the driver accept, and their results."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import lowprec
from gpu import raw
from gpu.arrays import TorchArrays, numpy_dtype
from gpu.parts import Options, Part, short
from gpu.raw import LtProduct, described
from lowprec.backends.cuda import compiling, runtime
from lowprec.backends.cuda.libraries import libraries
from lowprec.backends.cuda.packing import prepare_packing
from lowprec.formats import DType
from lowprec.planning import MatrixStack
from lowprec.planning.cublaslt.calls import Packing

# -- epilogues by element types; lowprec's are tested ---------------------------------------------

EPILOGUES = ("DEFAULT", "RELU", "GELU", "BIAS", "RELU_BIAS", "GELU_BIAS")


class Pair(NamedTuple):
    """Element types of operands and result, with compute type, scale type and tolerance."""

    a: str
    b: str
    out: str
    compute: str
    scale: str
    tolerance: float


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
PAIRS = (
    Pair("float32", "float32", "float32", "COMPUTE_32F", "float32", 1e-5),
    Pair("float32", "float32", "float32", "COMPUTE_32F_FAST_TF32", "float32", 2e-3),
    Pair("bfloat16", "bfloat16", "bfloat16", "COMPUTE_32F", "float32", 1e-2),
    Pair("bfloat16", "bfloat16", "float32", "COMPUTE_32F", "float32", 1e-5),
    Pair("float16", "float16", "float16", "COMPUTE_32F", "float32", 2e-3),
    Pair("float16", "float16", "float32", "COMPUTE_32F", "float32", 1e-5),
    Pair("float64", "float64", "float64", "COMPUTE_64F", "float64", 1e-13),
    Pair("complex64", "complex64", "complex64", "COMPUTE_32F", "complex64", 1e-5),
    Pair("int8", "int8", "int32", "COMPUTE_32I", "int32", 0.0),
    Pair("int8", "int8", "float32", "COMPUTE_32F", "float32", 1e-6),
    Pair(E4M3, E4M3, "bfloat16", "COMPUTE_32F", "float32", 1e-2),
    Pair(E4M3, E4M3, "float16", "COMPUTE_32F", "float32", 2e-3),
    Pair(E4M3, E4M3, "float32", "COMPUTE_32F", "float32", 1e-3),
    Pair(E4M3, E5M2, "float32", "COMPUTE_32F", "float32", 1e-3),
    Pair(E5M2, E5M2, "float32", "COMPUTE_32F", "float32", 1e-3),
)


def _with_epilogue(product: Any, epilogue: str, bias: Any) -> Any:
    """Return an exact product with an epilogue; GELU by its tanh form."""
    x = product + bias.astype(product.dtype) if "BIAS" in epilogue else product
    if "RELU" in epilogue:
        return np.maximum(x, 0)
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) if "GELU" in epilogue else x


def try_epilogue(
    pair: Pair, epilogue: str, scales: tuple[float, ...], seed: int, *, nan: bool = False
) -> dict[str, Any]:
    """Return cuBLASLt's answer to one combination; `ok` is False where it accepts it and computes something else.

    With `nan`, the first row of a is NaN, and the question is whether that of the result is.
    """
    rng = np.random.default_rng(seed)
    a, b = (
        (rng.integers(-10, 11, shape) if dtype == "int8" else rng.standard_normal(shape)).astype(numpy_dtype(dtype))
        for shape, dtype in (((128, 64), pair.a), ((64, 128), pair.b))
    )
    is_float8 = "float8" in pair.a
    # The library's table has this type of bias for FP8 with a float32 result.
    kind = "bfloat16" if is_float8 and pair.out == "float32" else pair.out
    bias = rng.integers(-8, 9, 128).astype(numpy_dtype(kind))
    row = {**pair._asdict(), "epilogue": epilogue, "scales": list(scales), "nan": nan, "ok": None}
    if nan:
        a[0] = np.nan
    try:
        bare = LtProduct(
            a, b, compute=pair.compute, out_dtype=pair.out, scale_dtype=pair.scale, epilogue=epilogue,
            bias=bias if "BIAS" in epilogue else None, scales=scales, inner_contiguous=pair.a == "int8" or is_float8,
        )  # fmt: skip
        offered = bare.algorithms(1)
        if not offered:
            return {**row, "accepted": False}
        result = bare.run(offered[0])
    except Exception as error:  # noqa: BLE001 - a refusal is an answer
        return {**row, "accepted": False, "error": short(error)}
    row |= {"accepted": True, **described(offered[0])}
    if nan:
        return {**row, "keeps_nan": bool(np.isnan(result[0].astype(np.float64)).all())}
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    exact = _with_epilogue(a.astype(wide) @ b.astype(wide) * np.prod(scales), epilogue, bias)
    error = float(np.linalg.norm(result.astype(wide) - exact) / np.linalg.norm(exact))
    return {**row, "ok": error <= pair.tolerance, "relative_error": error}


def epilogues(part: Part, options: Options) -> None:
    for pair, epilogue in product(PAIRS, EPILOGUES):
        for scales in [(), (0.5, 4.0)] if "float8" in pair.a else [()]:
            part.row(**try_epilogue(pair, epilogue, scales, options.seed))
    for pair, epilogue in product(PAIRS[:5], ("RELU", "GELU")):
        part.row(**try_epilogue(pair, epilogue, (), options.seed, nan=True))


# -- extents --------------------------------------------------------------------------------------

#: (m, n, k): on Hopper TF32 was seen from m = 16 and min(n, k) = 512 on; the last ones differ in n and k.
_TF32 = (
    *((m, side, side) for side, m in product((64, 128, 256, 512, 1024), (1, 8, 16, 32, 64, 128, 256, 512))),
    *((m, n, k) for m in (16, 512) for n, k in ((256, 1024), (1024, 256), (16, 512), (512, 16))),
)
#: PyTorch pads int8 operands of up to 16 rows to 32.
_INT8_ROWS = (1, 2, 4, 8, 12, 16, 17, 20, 24, 31, 32, 48, 64)
#: Element type of operands, and of c and d.
_IN_PLACE = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))


def extents(part: Part, options: Options) -> None:
    """Ask for TF32's units and int8's results by extents, and whether d may have the memory of c."""
    step = 8 if options.quick else 1
    rng = np.random.default_rng(options.seed)
    for m, n, k in part.in_time(_TF32[::-step], options):
        words = {"question": "TF32 by extents", "m": m, "n": n, "k": k}
        with part.attempt(ok=None, **words):
            a, b = np.zeros((m, k), np.float32), np.zeros((k, n), np.float32)
            offered = LtProduct(a, b, compute="COMPUTE_32F_FAST_TF32").algorithms(1)
            part.row(**words, accepted=bool(offered), **(described(offered[0]) if offered else {}))
    for m in part.in_time(_INT8_ROWS[::step], options):
        words = {"question": "int8 by rows", "m": m, "n": 256, "k": 256}
        with part.attempt(ok=None, **words):
            a, b = (rng.integers(-128, 128, (rows, 256), np.int8) for rows in (m, 256))
            bare = LtProduct(a, b, compute="COMPUTE_32I", out_dtype="int32", scale_dtype="int32", inner_contiguous=True)
            for algorithm in (offered := bare.algorithms(1)):
                right = np.array_equal(bare.run(algorithm), a.astype(np.int32) @ b.astype(np.int32))
                part.row(ok=bool(right), **words, accepted=True, **described(algorithm))
            if not offered:
                part.row(**words, accepted=False)
    for (dtype, out), two in part.in_time(product(_IN_PLACE, (False, True)), options):
        words = {"question": "c in the memory of d", "dtype": dtype, "out_dtype": out, "descriptors": 1 + two}
        # lowprec passes one descriptor, so that it must be accepted.
        with part.attempt(ok=None if two else False, **words):
            # Small whole numbers: every sum is exact.
            a, b, c = (rng.integers(-1, 2, (512, 512)) for _ in range(3))
            bare = LtProduct(*(x.astype(numpy_dtype(dtype)) for x in (a, b)), out_dtype=out, two_layouts=two)
            (algorithm,) = bare.algorithms(1)
            result = bare.run_in_place(algorithm, c.astype(numpy_dtype(out))).astype(np.float64)
            part.row(ok=bool(np.array_equal(result, a @ b + c)), **words, **described(algorithm))


# -- handles of the default streams ---------------------------------------------------------------

#: 2 is a stream of its own in each thread.
HANDLES = {"legacy default": 1, "default of the thread": 2}


def _numbers(seed: int) -> Any:
    """Return small whole numbers: sums and roundings are exact."""
    return np.random.default_rng(seed).integers(-3, 4, (2, 64, 64)).astype(np.float32)


def _copy(stream: int, seed: int) -> bool:
    (a, _), back = _numbers(seed), np.zeros((64, 64), np.float32)
    address = raw.upload(np.zeros_like(a))
    for target, source in ((address, a.ctypes.data), (back.ctypes.data, address)):
        runtime.copy_async(target, source, a.nbytes, stream)
    event = runtime.create_event()
    runtime.call("cudaEventRecord", event, stream)
    runtime.wait_for_event(event)
    runtime.call("cudaEventDestroy", event)
    return bool(np.array_equal(a, back))


def _kernel(stream: int, seed: int) -> bool:
    a, _ = _numbers(seed)
    address = runtime.allocate(a.nbytes // 2)
    packing = Packing(MatrixStack.of(DType.FLOAT32, 64, 64, 64, 1), DType.BFLOAT16, 64, 64)
    prepare_packing(packing, 0)(raw.upload(a), address, 0, stream)
    raw.synchronize(stream)
    return bool(np.array_equal(raw.download(address, a.shape, numpy_dtype("bfloat16")).astype(a.dtype), a))


def _product(stream: int, seed: int) -> bool:
    a, b = _numbers(seed)
    bare = LtProduct(a, b)
    return bool(np.array_equal(bare.run(bare.algorithms(1)[0], stream=stream), a @ b))


def _lowprec(stream: int, seed: int) -> bool:
    """A packed product and its temporary memory, on PyTorch's current stream."""
    arrays = TorchArrays()
    a, b = _numbers(seed)
    with arrays.torch.cuda.stream(arrays.torch.cuda.ExternalStream(stream)):
        result = arrays.get(lowprec.matmul(arrays.put(a), arrays.put(b), math_mode="bf16"))
    return bool(np.array_equal(result, a @ b))


STEPS: dict[str, Callable[[int, int], bool]] = {
    "copy and event": _copy, "kernel": _kernel, "cublasLtMatmul": _product, "lowprec.matmul": _lowprec,
}  # fmt: skip


def streams(part: Part, options: Options) -> None:
    for (stream, handle), (step, run) in product(HANDLES.items(), STEPS.items()):
        with part.attempt(stream=stream, step=step):
            part.row(ok=run(handle, options.seed), stream=stream, step=step)


# -- `cuLaunchKernel` with a `CUkernel` in place of a `CUfunction`, as lowprec passes it ----------


def _launched(as_function: bool) -> bool:
    """Round the numbers of one run by the kernel `pack_elements`, and return whether they are right."""
    macros = dict.fromkeys(("PAIRS", "ROTATED", "SCALED", "SUMMED", "TF32"), 0) | {
        "SOURCE": "float", "TARGET": "Half", "PARTS": 1, "PART_FACTOR": 1, "KERNEL_pack_elements": 1,
    }  # fmt: skip
    constants = (1, 64, 64, 1, 1, 64, 64, 64, 64, 1, 1, 1, 0, 0, 0)
    launch = compiling.Launch("pack_elements", "pack.cu", macros, 0, 1, (64,), 2, constants)
    launch._load()
    if as_function:
        driver = libraries().driver
        status, launch._function = driver.cuKernelGetFunction(driver.CUkernel(int(launch._kernel.handle)))
        if status != 0:
            raise RuntimeError(status.name)
    numbers, target = np.arange(64, dtype=np.float32), raw.upload(np.zeros(64, np.float16))
    launch(raw.STREAM, raw.upload(numbers), target)
    raw.synchronize()
    return bool(np.array_equal(raw.download(target, (64,), np.float16), numbers))


def launch(part: Part, options: Options) -> None:
    """Launch a kernel both ways; the second is the alternative if the first fails."""
    for as_function, handle in enumerate(("the CUkernel itself", "the result of cuKernelGetFunction")):
        with part.attempt(ok=None if as_function else False, handle=handle):
            part.row(ok=_launched(bool(as_function)), handle=handle)
