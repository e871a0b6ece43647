"""Whether captured products are right when a graph is replayed between products outside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lowprec
from gpu.parts import Options, Part

#: Products in place, packed, in parts, and scaled.
MODES = ("fp32", "tf32", "bf16", "fp16", "bf16x3", "fp16x3")
_SIDE, _REPLAYS = 128, 4

#: Captures what a function queues, after it has run once; the result replays it.
Capture = Callable[[Callable[[], Any]], Callable[[], None]]


def torch_capture(torch: Any, *, warm: bool) -> Capture:
    """Return the capture by `torch.cuda.graph`, on a stream that has run the function before or on one of its own."""

    def capture(function: Callable[[], Any]) -> Callable[[], None]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream if warm else torch.cuda.current_stream()):
            function()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, **({"stream": stream} if warm else {})):
            function()
        replay: Callable[[], None] = graph.replay
        return replay

    return capture


def replayed(torch: Any, mode: str, capture: Capture, device: str, seed: int) -> dict[str, Any]:
    """Replay a product with new operands, each time next to another product; whole numbers make all sums exact."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw() -> Any:
        drawn = torch.randint(-3, 4, (_SIDE, _SIDE), generator=generator, device=device)
        return drawn.to(torch.float32)

    def exact(x: Any, y: Any) -> Any:
        return (x.double() @ y.double()).to(torch.float32)

    a, b, out = draw(), draw(), torch.zeros((_SIDE, _SIDE), device=device)
    held: dict[str, Any] = {}

    def both() -> None:
        lowprec.matmul(a, b, out=out, math_mode=mode)
        held["result"] = lowprec.matmul(out, b, math_mode="fp32")

    replay = capture(both)
    wrong = []
    for number in range(_REPLAYS):
        a.copy_(draw())
        replay()
        x, y = draw(), draw()
        eager = lowprec.matmul(x, y, math_mode=mode)
        found = {
            "out": (out, exact(a, b)),
            "result": (held["result"], exact(exact(a, b), b)),
            "eager": (eager, exact(x, y)),
        }
        wrong += [f"{name} of replay {number}" for name, (got, want) in found.items() if not torch.equal(got, want)]
    return {"ok": not wrong, "wrong": wrong}


def run(part: Part, options: Options) -> None:
    """Replay a product of each mode."""
    import torch

    for warm in (True, False):
        for mode in part.in_time(MODES, options):
            # A cold stream may be refused; a wrong result never is right.
            with part.attempt(ok=False if warm else None, mode=mode, warm_stream=warm):
                found = replayed(torch, mode, torch_capture(torch, warm=warm), "cuda", options.seed)
                part.row(mode=mode, warm_stream=warm, **found)
