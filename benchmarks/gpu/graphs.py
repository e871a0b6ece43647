"""Whether a product that was captured into a CUDA graph replays bit by bit what an eager call computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu.libraries import short
from gpu.parts import Options, Part

_M, _K, _N = 384, 512, 256
_REPLAYS = 3

#: Name: element type, and arguments of the call. Which route each takes is read off its plan.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "direct, bfloat16": ("bfloat16", {}),
    "direct, tf32": ("float32", {"math_mode": "tf32"}),
    "direct, fp32": ("float32", {"math_mode": "fp32"}),
    "direct, fused bias and relu": ("bfloat16", {"bias": "own", "activation": "relu"}),
    "packed, mode bf16": ("float32", {"math_mode": "bf16"}),
    "packed and aside, mode fp16": ("float32", {"math_mode": "fp16"}),
    "packed, int8": ("int8", {}),
    "aside, bias of another type": ("bfloat16", {"bias": "float32", "activation": "gelu"}),
    "complex, mode bf16": ("complex64", {"math_mode": "bf16"}),
}


def route(plan: Any) -> str:
    """Return the way that a plan takes through the backend."""
    call = plan.call
    if call is None:
        return "none"
    words = ["packed"] if call.pack_a or call.pack_b else []
    if call.aside:
        words.append("aside")
    return " and ".join(words) or "direct"


def _draw(torch: Any, shape: tuple[int, ...], dtype: str, generator: Any) -> Any:
    kind = getattr(torch, dtype)
    if dtype == "int8":
        return torch.randint(-128, 128, shape, generator=generator, device="cuda", dtype=kind)
    drawn = kind if kind.is_complex else torch.float32
    return torch.randn(shape, generator=generator, device="cuda", dtype=drawn).to(kind)


def check(
    lowprec: Any, torch: Any, name: str, seed: int, *, warm_elsewhere: bool
) -> dict[str, Any]:
    """Return whether one captured product replays exactly, on new operands each time.

    Parameters
    ----------
    warm_elsewhere : bool
        Whether the eager call before the capture ran on the default stream, not on the stream of the capture.
    """
    dtype, asked = CASES[name]
    generator = torch.Generator("cuda").manual_seed(seed)
    a, b = (_draw(torch, s, dtype, generator) for s in ((_M, _K), (_K, _N)))
    arguments = dict(asked)
    if "bias" in arguments:
        kind = dtype if arguments["bias"] == "own" else arguments["bias"]
        arguments["bias"] = _draw(torch, (_N,), kind, generator)

    def call() -> Any:
        return lowprec.matmul(a, b, **arguments)

    def fill() -> None:
        for x in (a, b):
            x.copy_(_draw(torch, tuple(x.shape), dtype, generator))

    graph, captured = _capture(torch, call, warm_elsewhere=warm_elsewhere)
    same = []
    for _ in range(_REPLAYS):
        fill()
        captured.zero_()
        graph.replay()
        replayed = captured.clone()
        # An eager call between two replays must not disturb the graph's own memory.
        same.append(bool(torch.equal(replayed, call())))
    plan = lowprec.plan(a, b, **arguments)
    return {"route": route(plan), "replays": len(same), "ok": all(same)}


def _capture(torch: Any, call: Callable[[], Any], *, warm_elsewhere: bool) -> tuple[Any, Any]:
    stream = torch.cuda.Stream()
    if warm_elsewhere:
        call()
    else:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = call()
    return graph, captured


def run(part: Part, options: Options) -> None:
    """Capture all kinds of products."""
    import torch

    import lowprec

    for name in CASES:
        for elsewhere in (True, False):
            words = {"name": name, "warm_elsewhere": elsewhere}
            try:
                found = check(lowprec, torch, name, options.seed, warm_elsewhere=elsewhere)
            except Exception as error:  # noqa: BLE001 - one that fails is one row
                found = {"ok": False, "error": short(error)}
            part.row(**words, **found)
