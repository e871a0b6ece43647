"""Whether results are right on each library's own streams, from threads, and on several devices.

Operands are whole numbers whose sums are exact in every mode, so each result has one right bit pattern; and they are
written by work that is still running when lowprec is called, so a product that does not wait for it is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu import libraries
from gpu.parts import Options, Part

_SIDE = 512
_THREADS, _ROUNDS = 8, 20
_MODES = ("fp32", "tf32", "bf16", "fp16")
#: Cycles for which a stream is kept busy before it writes the operands: about 5 ms.
_BUSY = 10_000_000


def torch_threads(lowprec: Any, torch: Any, seed: int) -> bool:
    """Multiply in threads, each on a stream and in a mode of its own."""

    def work(number: int) -> bool:
        generator = torch.Generator("cuda").manual_seed(seed + number)
        stream = torch.cuda.Stream()
        mode = _MODES[number % len(_MODES)]
        fine = True
        with torch.cuda.stream(stream):
            for _ in range(_ROUNDS):
                a, b = (
                    torch.randint(-4, 5, (_SIDE, _SIDE), generator=generator, device="cuda").float()
                    for _ in range(2)
                )
                got = lowprec.matmul(a, b, math_mode=mode)
                fine = fine and bool((got.double() == a.double() @ b.double()).all())
        return fine

    with ThreadPoolExecutor(_THREADS) as pool:
        return all(pool.map(work, range(_THREADS)))


def torch_late_operands(lowprec: Any, torch: Any, seed: int) -> bool:
    """Multiply on a side stream what that stream has yet to write, in each mode."""
    generator = torch.Generator("cuda").manual_seed(seed)
    fine = True
    for mode in _MODES:
        stream = torch.cuda.Stream()
        a, b = torch.zeros((2, _SIDE, _SIDE), device="cuda")
        late = torch.randint(-4, 5, (2, _SIDE, _SIDE), generator=generator, device="cuda").float()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_BUSY)
            a.copy_(late[0])
            b.copy_(late[1])
            got = lowprec.matmul(a, b, math_mode=mode)
        stream.synchronize()
        fine = fine and bool((got.double() == late[0].double() @ late[1].double()).all())
    return fine


def torch_memory_reuse(lowprec: Any, torch: Any, seed: int) -> bool:
    """Drop operands right after the call, and have their memory written anew by later work on the stream."""
    generator = torch.Generator("cuda").manual_seed(seed)
    a, b = torch.randint(-4, 5, (2, _SIDE, _SIDE), generator=generator, device="cuda").float()
    exact = a.double() @ b.double()
    results = []
    for _ in range(_ROUNDS):
        x, y = a.clone(), b.clone()
        results.append(lowprec.matmul(x, y, math_mode="bf16"))
        del x, y
        torch.full((2, _SIDE, _SIDE), float("nan"), device="cuda")
    return all(bool((got.double() == exact).all()) for got in results)


def cupy_stream(lowprec: Any, torch: Any, seed: int) -> bool:
    """Multiply on a stream of CuPy's what that stream has yet to write."""
    cupy = libraries.optional("cupy")
    rng = cupy.random.default_rng(seed)
    late = [rng.integers(-4, 5, (_SIDE, _SIDE)).astype("float32") for _ in range(2)]
    exact = late[0].astype("float64") @ late[1].astype("float64")
    a, b = (cupy.zeros((_SIDE, _SIDE), "float32") for _ in range(2))
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(10):
            # Some milliseconds of work in front.
            cupy.sort(cupy.zeros(1 << 22, "float32"))
        a[...] = late[0]
        b[...] = late[1]
        got = lowprec.matmul(a, b, math_mode="tf32")
    stream.synchronize()
    return isinstance(got, cupy.ndarray) and bool((got.astype("float64") == exact).all())


def jax_arrays(lowprec: Any, torch: Any, seed: int) -> bool:
    """Multiply what JAX is still computing, and go on computing with the result."""
    jax = libraries.optional("jax")
    key = jax.random.key(seed)
    fine = True
    for mode in _MODES:
        key, first, second = jax.random.split(key, 3)
        a, b = (
            jax.random.randint(k, (_SIDE, _SIDE), -4, 5).astype("float32") for k in (first, second)
        )
        # Transposed twice by compiled code, so that the operands are fresh results.
        a, b = (jax.jit(lambda x: (x.T + 0).T)(x) for x in (a, b))
        got = jax.jit(lambda x: x + 1)(lowprec.matmul(a, b, math_mode=mode))
        with jax.default_matmul_precision("highest"):
            exact = jax.numpy.matmul(a, b) + 1
        fine = fine and isinstance(got, jax.Array) and bool((got == exact).all())
    return fine


def torch_with_cupy(lowprec: Any, torch: Any, seed: int) -> bool:
    """Multiply a tensor on a side stream of torch's with an array of CuPy's default stream."""
    cupy = libraries.optional("cupy")
    generator = torch.Generator("cuda").manual_seed(seed)
    a, b = torch.randint(-4, 5, (2, _SIDE, _SIDE), generator=generator, device="cuda").float()
    exact = a.double() @ b.double()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_BUSY)
        late = a.clone()
        got = lowprec.matmul(late, cupy.from_dlpack(b))
    stream.synchronize()
    return isinstance(got, torch.Tensor) and bool((got.double() == exact).all())


def several_devices(lowprec: Any, torch: Any, seed: int) -> bool:
    """Multiply on the second device while the first is current; refuse operands on two."""
    a, b = torch.randint(-4, 5, (2, _SIDE, _SIDE), device="cuda:1").float()
    got = lowprec.matmul(a, b)
    fine = got.device.index == 1 and bool((got.double() == a.double() @ b.double()).all())
    try:
        lowprec.matmul(a.to("cuda:0"), b)
    except lowprec.DeviceError:
        return fine
    return False


#: Name: (library without which it cannot run, function).
CHECKS: dict[str, tuple[str, Callable[[Any, Any, int], bool]]] = {
    "torch, streams in threads": ("torch", torch_threads),
    "torch, operands still being written": ("torch", torch_late_operands),
    "torch, operands dropped at once": ("torch", torch_memory_reuse),
    "cupy, a stream of its own": ("cupy", cupy_stream),
    "jax": ("jax", jax_arrays),
    "torch with cupy": ("cupy", torch_with_cupy),
    "several devices": ("torch", several_devices),
}


def obstacle(name: str, torch: Any) -> str:
    """Return why a check cannot run here, empty if it can."""
    library, _ = CHECKS[name]
    if libraries.optional(library) is None:
        return f"{library} is not installed"
    if name == "several devices" and torch.cuda.device_count() < 2:
        return "there is one device"
    if name == "jax" and not any(d.platform == "gpu" for d in libraries.optional("jax").devices()):
        return "JAX sees no GPU"
    return ""


def run(part: Part, options: Options) -> None:
    """Run all checks."""
    import torch

    import lowprec

    for name, (_, check) in CHECKS.items():
        try:
            why = obstacle(name, torch)
            if why:
                part.row(name=name, why=why)
                continue
            part.row(ok=check(lowprec, torch, options.seed), name=name)
        except Exception as error:  # noqa: BLE001 - one that fails is one row
            part.row(ok=False, name=name, error=libraries.short(error))
