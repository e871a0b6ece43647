"""Results of lowprec on a GPU against exact products: types and modes, and extreme sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import lowprec
from gpu import arrays
from gpu.parts import Options, Part, short
from lowprec.checking.accuracy import Reference
from lowprec.modes import available_modes, row

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


# -- every element type and mode, within the bound ------------------------------------------------

MODES = ("fp32", "fp32_pedantic", "tf32", "bf16", "fp16")
#: Those of several products, and float64: on real matrices alone.
MORE_MODES = tuple(
    str(mode) for mode in available_modes() if str(mode) not in MODES and not row(mode).quantizes
)
#: (first operand, second operand, out_dtype).
FLOAT8 = (
    (E4M3, E4M3, None),
    (E4M3, E4M3, "float32"),
    (E4M3, E5M2, "float32"),
    (E5M2, E4M3, "float16"),
)


class Case(NamedTuple):
    """One product to check."""

    dtypes: tuple[str, str]
    distribution: str
    k: int
    mode: str | None = None
    out_dtype: str | None = None


def cases(inner: tuple[int, ...]) -> Iterator[Case]:
    """Yield all products, those that share operands in sequence; those of the claims first."""
    for k, distribution in product(inner, ("normal", "uniform")):
        for dtype, mode in product(("float32", "complex64"), MODES):
            yield Case((dtype, dtype), distribution, k, mode)
        for dtype in ("float64", "complex128", "float16", "bfloat16", "int8"):
            yield Case((dtype, dtype), distribution, k)
        for first, second, out in FLOAT8:
            yield Case((first, second), distribution, k, None, out)
    # Whole rows and columns far beyond float16.
    yield from (
        Case((dtype, dtype), "scaled", k, "fp16")
        for k, dtype in product(inner, ("float32", "complex64"))
    )
    for k, distribution, mode in product(inner, ("normal", "uniform"), MORE_MODES):
        yield Case(("float32", "float32"), distribution, k, mode)


def _draw(rng: np.random.Generator, shape: tuple[int, int], distribution: str, axis: int) -> Any:
    """Return float64 numbers of a distribution; `axis` is that of the rows of a (0) or the columns of b (1)."""
    if distribution == "uniform":
        return rng.random(shape)
    values = rng.standard_normal(shape)
    if distribution == "scaled":
        values = np.ldexp(
            values, rng.integers(-30, 31, (shape[0], 1) if axis == 0 else (1, shape[1]))
        )
    return values


@functools.lru_cache(maxsize=1)
def operands(
    dtypes: tuple[str, str], distribution: str, k: int, side: int, seed: int
) -> tuple[Any, Any]:
    rng = np.random.default_rng([seed, k, *distribution.encode()])

    def operand(shape: tuple[int, int], axis: int) -> Any:
        dtype = dtypes[axis]
        if dtype == "int8":
            return rng.integers(-128 if distribution == "normal" else 0, 128, shape, dtype=np.int8)
        values = _draw(rng, shape, distribution, axis)
        if dtype.startswith("complex"):
            values = values + 1j * _draw(rng, shape, distribution, axis)
        return values.astype(arrays.numpy_dtype(dtype))

    return operand((side, k), 0), operand((k, side), 1)


def check(device: Any, case: Case, side: int, seed: int) -> dict[str, Any]:
    """Return the row of a product of arrays that `device.put` creates and `device.get` reads."""
    words = {**case._asdict(), "dtypes": list(case.dtypes)}
    a, b = operands(case.dtypes, case.distribution, case.k, side, seed)
    asked = {"math_mode": case.mode, "out_dtype": case.out_dtype}
    try:
        x, y = device.put(a), device.put(b)
        plan = lowprec.plan(x, y, **asked)
        result = device.get(lowprec.matmul(x, y, **asked))
    except Exception as error:  # noqa: BLE001 - a product that fails is one row
        # A device without FP8 is no failure, a missing algorithm is one.
        lacks = isinstance(error, lowprec.UnsupportedError) and "compute capability" in str(error)
        return {**words, "ok": None if lacks else False, "refused": short(error)}
    algorithm, errors = dict(plan.algorithm), Reference(a, b).compare(result, plan)
    # None where the plan does not name the units that multiply.
    units = algorithm.get("units")
    return {
        **words,
        "error": errors.normalised,
        "relative_error": errors.relative,
        "bound": errors.bound,
        # False for NaN, too.
        "ok": errors.normalised <= errors.bound,
        "kernel": str(plan.kernel),
        "compute_type": plan.compute_type,
        "algorithm": algorithm,
        "tensor_cores": None if units is None else "no tensor cores" not in units,
    }


def accuracy(part: Part, options: Options) -> None:
    """Check all products; on Hopper cuBLAS was seen to run TF32 on tensor cores from these extents on."""
    # The software CUDA takes minutes for the others.
    inner = (512,) if options.quick or arrays.software else (512, 2048, 16384)
    for case in part.in_time(cases(inner), options):
        part.row(**check(arrays, case, 512, options.seed))


# -- sizes beyond 16 and 32 bits ------------------------------------------------------------------


def _whole(torch: Any, shape: tuple[int, ...], device: str, seed: int) -> Any:
    """Return bfloat16 whole numbers from -3 to 3."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator, device=device).to(torch.bfloat16)


def leading_dimension(torch: Any, device: str, length: int, seed: int) -> bool:
    """Multiply columns of a matrix with rows of this length."""
    a, b = (
        torch.zeros((256, length), dtype=torch.bfloat16, device=device)[:, -64:],
        _whole(torch, (64, 32), device, 0),
    )
    a.copy_(_whole(torch, (256, 64), device, seed))
    return bool(torch.equal(lowprec.matmul(a, b, out_dtype="float32"), a.float() @ b.float()))


def elements_of_a(torch: Any, device: str, rows: int, seed: int) -> bool:
    """Multiply a matrix of so many rows of 2^15 elements, of which the last row and few others are not zero."""
    a, b = (
        torch.zeros((rows, 1 << 15), dtype=torch.bfloat16, device=device),
        _whole(torch, (1 << 15, 8), device, 0),
    )
    few = [0, rows // 2, rows - 1]
    a[few] = _whole(torch, (3, 1 << 15), device, seed)
    result = lowprec.matmul(a, b, out_dtype="float32")
    want = torch.zeros_like(result)
    want[few] = (a[few].double() @ b.double()).float()
    return bool(torch.equal(result, want))


def elements_of_result(torch: Any, device: str, rows: int, seed: int) -> bool:
    """Compute a result of so many rows of 2^15 elements."""
    a, b = _whole(torch, (rows, 16), device, seed), _whole(torch, (16, 1 << 15), device, seed)
    result = lowprec.matmul(a, b)
    few = [0, rows // 2, rows - 1]
    return bool(torch.equal(result[few].float(), a[few].float() @ b.float()))


#: Question, by increasing need of memory (the last two: 4.3 GB), and its sizes.
QUESTIONS: tuple[tuple[Callable[[Any, str, int, int], bool], tuple[int, ...]], ...] = (
    (leading_dimension, (1 << 16, 1 << 20, (1 << 23) + 8)),
    (elements_of_a, ((1 << 16) + 8,)),
    (elements_of_result, ((1 << 16) + 8,)),
)


def limits(part: Part, options: Options) -> None:
    """Ask all of them; in a quick run the smaller sizes alone."""
    import torch

    for question, sizes in QUESTIONS[: 1 if options.quick else None]:
        for size in part.in_time(sizes, options):
            words = {"question": question.__name__, "size": size}
            with part.attempt(**words):
                part.row(ok=question(torch, "cuda", size, options.seed), **words)
            torch.cuda.empty_cache()
