"""Each feature once, on torch tensors, against float64: a quick look that everything is there and right."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from gpu.libraries import short
from gpu.parts import Options, Part

#: Relative errors that rounding to each type explains, with sums over up to 300 terms.
_TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}
_MODE_TOLERANCE = {"fp32": 2e-6, "tf32": 1e-3, "bf16": 8e-3, "fp16": 1e-3}


class Setup:
    """What the checks work with.

    Parameters
    ----------
    lowprec, torch : module
    device : str
        torch's word for it.
    seed : int
    """

    def __init__(self, lowprec: Any, torch: Any, device: str, seed: int) -> None:
        self.lowprec, self.torch, self.device = lowprec, torch, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: str = "float32") -> Any:
        """Return normal numbers."""
        kind = getattr(self.torch, dtype)
        drawn = kind if kind.is_complex or dtype == "float64" else self.torch.float32
        made = self.torch.randn(shape, generator=self._generator, device=self.device, dtype=drawn)
        return made.to(kind)

    def near(self, got: Any, exact: Any, tolerance: float) -> bool:
        """Whether a result is within a relative error of an exact one, in shape too."""
        wide = self.torch.complex128 if exact.is_complex() else self.torch.float64
        off = (got.to(wide) - exact.to(wide)).abs().square().sum().sqrt()
        limit = tolerance * exact.to(wide).abs().square().sum().sqrt()
        return got.shape == exact.shape and bool(off <= limit)


def strides(s: Setup) -> bool:
    """Transposed, sliced and broadcast views, as they lie."""
    a, b = s.normal(64, 96), s.normal(96, 48)
    pairs = [
        (a, b), (b.T, a.T), (a[::2], b), (a[:, ::3], b[::3]), (a[:, 5:], b[5:]),
        (s.normal(96, 64).T, b), (s.normal(1, 96).expand(64, 96), b),
    ]  # fmt: skip
    return all(s.near(s.lowprec.matmul(x, y), x.double() @ y.double(), 2e-6) for x, y in pairs)


def batches(s: Setup) -> bool:
    """Batches, broadcast ones included, and one dimension."""
    shapes = [
        ((5, 32, 40), (5, 40, 24)), ((5, 1, 32, 40), (3, 40, 24)), ((32, 40), (5, 40, 24)),
        ((5, 32, 40), (40, 24)), ((40,), (40, 24)), ((5, 32, 40), (40,)), ((40,), (40,)),
    ]  # fmt: skip
    pairs = [(s.normal(*x), s.normal(*y)) for x, y in shapes]
    return all(s.near(s.lowprec.matmul(x, y), x.double() @ y.double(), 2e-6) for x, y in pairs)


def empty(s: Setup) -> bool:
    """Dimensions of size zero."""
    fine = s.lowprec.matmul(s.normal(0, 8), s.normal(8, 4)).shape == (0, 4)
    return fine and bool((s.lowprec.matmul(s.normal(3, 0), s.normal(0, 4)) == 0).all())


def odd_pointers(s: Setup) -> bool:
    """Extents and addresses that are multiples of nothing."""
    fine = True
    for dtype in ("float32", "bfloat16", "float16"):
        a = s.normal(33 * 37 + 1, dtype=dtype)[1:].view(33, 37)
        b = s.normal(37 * 29 + 3, dtype=dtype)[3:].view(37, 29)
        exact = a.double() @ b.double()
        fine = fine and s.near(s.lowprec.matmul(a, b), exact, _TOLERANCE[dtype])
    return fine


def addends(s: Setup) -> bool:
    """alpha, beta, c of other strides and types, out, and out as c."""
    a, b, c = s.normal(64, 96), s.normal(96, 48), s.normal(64, 48)
    exact = 2 * (a.double() @ b.double()) - 0.5 * c.double()
    fine = True
    for addend in (c, c.T.contiguous().T, c.to(s.torch.float16).to(s.torch.float32)):
        wanted = 2 * (a.double() @ b.double()) - 0.5 * addend.double()
        got = s.lowprec.matmul(a, b, c=addend, alpha=2.0, beta=-0.5)
        fine = fine and s.near(got, wanted, 2e-6)
    out = c.clone()
    returned = s.lowprec.matmul(a, b, c=out, out=out, alpha=2.0, beta=-0.5)
    row = s.normal(48)
    broad = s.lowprec.matmul(a, b, c=row, beta=1.0)
    fine = fine and s.near(broad, a.double() @ b.double() + row.double(), 2e-6)
    return fine and returned is out and s.near(out, exact, 2e-6)


def overlapping_out(s: Setup) -> bool:
    """An out that is an operand."""
    a, b = s.normal(64, 64), s.normal(64, 64)
    exact = a.double() @ b.double()
    s.lowprec.matmul(a, b, out=a)
    return s.near(a, exact, 2e-6)


def epilogues(s: Setup) -> bool:
    """Bias and activations, fused and aside."""
    functional = s.torch.nn.functional
    fine = True
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        a, b, bias = (s.normal(*x, dtype=dtype) for x in ((64, 96), (96, 48), (48,)))
        exact = a.double() @ b.double() + bias.double()
        relu = s.lowprec.matmul(a, b, bias=bias, activation="relu")
        gelu = s.lowprec.matmul(a, b, bias=bias, activation="gelu")
        fine = fine and s.near(relu, functional.relu(exact), _TOLERANCE[dtype])
        curved = functional.gelu(exact, approximate="tanh")
        fine = fine and s.near(gelu, curved, 2 * _TOLERANCE[dtype])
    return fine


def modes(s: Setup) -> bool:
    """Each mode, real and complex; that bf16 rounds its operands and does nothing else."""
    fine = True
    for dtype in ("float32", "complex64"):
        a, b = s.normal(128, 256, dtype=dtype), s.normal(256, 64, dtype=dtype)
        wide = s.torch.complex128 if a.is_complex() else s.torch.float64
        for mode, tolerance in _MODE_TOLERANCE.items():
            got = s.lowprec.matmul(a, b, math_mode=mode)
            fine = fine and s.near(got, a.to(wide) @ b.to(wide), tolerance)
    a, b = s.normal(128, 256), s.normal(256, 64)
    rounded = a.bfloat16().double() @ b.bfloat16().double()
    return fine and s.near(s.lowprec.matmul(a, b, math_mode="bf16"), rounded, 2e-6)


def mode_scopes(s: Setup) -> bool:
    """A scope, a guard inside it, and rtol."""
    a, b = s.normal(128, 256), s.normal(256, 64)
    exact = a.double() @ b.double()
    with s.lowprec.math_mode("bf16"):
        scoped = s.lowprec.matmul(a, b)
        with s.lowprec.fp32_guard():
            guarded = s.lowprec.matmul(a, b, math_mode="bf16")
    close = s.lowprec.matmul(a, b, rtol=1e-2)
    return (
        not s.near(scoped, exact, 1e-4)
        and s.near(guarded, exact, 2e-6)
        and s.near(close, exact, 1.0e-2)
    )


def fp16_range(s: Setup) -> bool:
    """Mode fp16 on a GPU scales rows and columns by powers of two: nothing overflows."""
    if s.device == "cpu":
        return True
    a, b = s.normal(64, 96) * 2.0**40, s.normal(96, 48) * 2.0**-60
    return s.near(s.lowprec.matmul(a, b, math_mode="fp16"), a.double() @ b.double(), 1e-3)


def no_numbers(s: Setup) -> bool:
    """NaN and Inf stay what they are, where they are."""
    fine = True
    for mode in _MODE_TOLERANCE:
        a, b = s.normal(64, 96), s.normal(96, 48)
        a[3, 5], a[7, 2] = float("nan"), float("inf")
        got = s.lowprec.matmul(a, b, math_mode=mode)
        others = [i for i in range(64) if i not in (3, 7)]
        fine = fine and bool(got[3].isnan().all()) and bool(got[others].isfinite().all())
        fine = fine and bool((~got[7].isfinite()).all())
    return fine


def mixed_types(s: Setup) -> bool:
    """Promotion of operands of two types."""
    a, b = s.normal(64, 96, dtype="bfloat16"), s.normal(96, 48, dtype="float16")
    got = s.lowprec.matmul(a, b)
    return got.dtype == s.torch.float32 and s.near(got, a.double() @ b.double(), 2e-6)


def integers(s: Setup) -> bool:
    """int8 gives exact int32, whatever the extents."""
    fine = True
    for m, k, n in ((64, 96, 48), (33, 37, 29), (1, 1, 1)):
        a, b = (
            s.torch.randint(-128, 128, shape, device=s.device, dtype=s.torch.int8)
            for shape in ((m, k), (k, n))
        )
        got = s.lowprec.matmul(a, b)
        fine = fine and got.dtype == s.torch.int32
        fine = fine and bool((got.double() == a.double() @ b.double()).all())
    return fine


def float8(s: Setup) -> bool | None:
    """FP8 with scales as numbers and in memory of the device."""
    if s.device == "cpu":
        return None
    a = s.normal(64, 96).to(s.torch.float8_e4m3fn)
    b = s.normal(96, 48).to(s.torch.float8_e4m3fn)
    exact = a.double() @ b.double()
    plain = s.lowprec.matmul(a, b)
    numbers = s.lowprec.matmul(a, b, scale_a=0.5, scale_b=4.0, out_dtype="float32")
    scales = [s.torch.full((1,), x, device=s.device) for x in (0.5, 4.0)]
    arrays = s.lowprec.matmul(a, b, scale_a=scales[0], scale_b=scales[1], out_dtype="float32")
    return (
        plain.dtype == s.torch.bfloat16
        and s.near(plain, exact, 1e-2)
        and s.near(numbers, 2 * exact, 1e-3)
        and s.near(arrays, 2 * exact, 1e-3)
    )


class _OnlyDLPack:
    """A tensor behind DLPack and nothing else."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._tensor.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def dlpack(s: Setup) -> bool:
    """Arrays that are known by DLPack alone."""
    a, b = s.normal(64, 96), s.normal(96, 48)
    got = s.torch.from_dlpack(s.lowprec.matmul(_OnlyDLPack(a), _OnlyDLPack(b)))
    return got.device == a.device and s.near(got, a.double() @ b.double(), 2e-6)


def plans(s: Setup) -> bool | None:
    """The plan names the algorithm and its units, and info lists the device."""
    a = s.normal(256, 256)
    plan = s.lowprec.plan(a, a, math_mode="tf32")
    if s.device == "cpu":
        return None
    named = any(d["device"] == "cuda:0" for d in s.lowprec.info()["devices"])
    return named and {"algorithm", "units"} <= set(dict(plan.algorithm)) and "cuda" in str(plan)


def autotune(s: Setup) -> bool:
    """Measuring leaves results right, and says what it measured."""
    from lowprec.tuning import autotune as tune

    a, b = s.normal(256, 256, dtype="bfloat16"), s.normal(256, 256, dtype="bfloat16")
    found = tune(a, b, candidates=4)
    fine = s.near(s.lowprec.matmul(a, b), a.double() @ b.double(), 1e-2)
    return fine and (s.device == "cpu" or len(found.timed) > 0) and found.speedup >= 0.99


def autotune_on_disk(s: Setup) -> bool | None:
    """The choice is on disk."""
    if s.device == "cpu":
        return None
    folder = os.environ.get("LOWPREC_CACHE_DIR", "")
    return any("autotune" in name for _, _, files in os.walk(folder) for name in files)


def profile(s: Setup) -> bool:
    """Products are recorded with their times and units."""
    a, b = s.normal(256, 256), s.normal(256, 256)
    s.lowprec.matmul(a, b, math_mode="tf32")
    with s.lowprec.profile() as found:
        for _ in range(5):
            s.lowprec.matmul(a, b, math_mode="tf32")
    records = found.records
    timed = all(r.elapsed_ms is not None and r.elapsed_ms > 0 for r in records)
    return len(records) == 5 and timed and (s.device == "cpu" or records[0].units_used is True)


def cublas_handles(s: Setup) -> bool | None:
    """The guard sets the math mode of lowprec's cuBLAS handle and puts it back."""
    if s.device == "cpu":
        return None
    bindings = importlib.import_module("lowprec.backends.cuda.bindings")
    handle = importlib.import_module("lowprec.backends.cuda.cublas").cublas_handle()
    bindings.set_math_mode(handle, 3)
    with s.lowprec.fp32_guard():
        inside = bindings.math_mode(handle)
    after = bindings.math_mode(handle)
    bindings.set_math_mode(handle, 0)
    return (inside, after) == (0, 3)


def refusals(s: Setup) -> bool | None:
    """Operands on two devices, and a tensor that requires grad, are refused."""
    if s.device == "cpu":
        return None
    a = s.normal(8, 8)
    refused = []
    for x, y, kind in (
        (a, a.cpu(), s.lowprec.DeviceError),
        (a.clone().requires_grad_(), a, s.lowprec.ArrayError),
        (a, s.normal(9, 8), s.lowprec.ShapeError),
    ):
        try:
            s.lowprec.matmul(x, y)
        except kind:
            refused.append(kind)
    return len(refused) == 3


def memory(s: Setup) -> bool | None:
    """A thousand products of changing kinds leave the free memory of the device where it was."""
    if s.device == "cpu":
        return None

    def work() -> None:
        for n in (64, 128, 192):
            a = s.normal(n, n)
            for mode in _MODE_TOLERANCE:
                s.lowprec.matmul(a, a, math_mode=mode)

    for _ in range(3):
        work()
    s.torch.cuda.synchronize()
    before = s.torch.cuda.mem_get_info()[0]
    for _ in range(80):
        work()
    s.torch.cuda.synchronize()
    return bool(before - s.torch.cuda.mem_get_info()[0] <= 4 << 20)


CHECKS: dict[str, Callable[[Setup], bool | None]] = {
    check.__name__: check
    for check in (
        strides, batches, empty, odd_pointers, addends, overlapping_out, epilogues, modes, mode_scopes,
        fp16_range, no_numbers, mixed_types, integers, float8, dlpack, plans, autotune, autotune_on_disk,
        profile, cublas_handles, refusals, memory,
    )
}  # fmt: skip


def run(part: Part, options: Options) -> None:
    """Run all checks."""
    import torch

    import lowprec

    setup = Setup(lowprec, torch, "cuda" if part.device == "gpu" else "cpu", options.seed)
    for name, check in CHECKS.items():
        try:
            part.row(ok=check(setup), name=name)
        except Exception as error:  # noqa: BLE001 - one that fails is one row
            part.row(ok=False, name=name, error=short(error))
