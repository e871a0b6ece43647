"""Sizes beyond 16 and 32 bits: batches above 65,535, large leading dimensions, matrices of 2^31 elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lowprec
from gpu.parts import Options, Part


def _whole(torch: Any, shape: tuple[int, ...], device: str, seed: int) -> Any:
    """Return bfloat16 whole numbers from -3 to 3."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator, device=device).to(torch.bfloat16)


def batch(torch: Any, device: str, count: int, seed: int) -> bool:
    """Multiply so many small matrices."""
    a, b = (_whole(torch, (count, *shape), device, seed) for shape in ((8, 16), (16, 8)))
    found = lowprec.matmul(a, b, out_dtype="float32")
    return bool(torch.equal(found, (a.float()[:, :, :, None] * b.float()[:, None]).sum(2)))


def leading_dimension(torch: Any, device: str, length: int, seed: int) -> bool:
    """Multiply columns of a matrix with rows of this length."""
    a, b = torch.zeros((256, length), dtype=torch.bfloat16, device=device)[:, -64:], _whole(torch, (64, 32), device, 0)
    a.copy_(_whole(torch, (256, 64), device, seed))
    found = lowprec.matmul(a, b, out_dtype="float32")
    return bool(torch.equal(found, a.float() @ b.float()))


def elements_of_a(torch: Any, device: str, rows: int, seed: int) -> bool:
    """Multiply a matrix of so many rows of 2^15 elements, of which the last row and few others are not zero."""
    a, b = torch.zeros((rows, 1 << 15), dtype=torch.bfloat16, device=device), _whole(torch, (1 << 15, 8), device, 0)
    kept = [0, rows // 2, rows - 1]
    a[kept] = _whole(torch, (3, 1 << 15), device, seed)
    found = lowprec.matmul(a, b, out_dtype="float32")
    want = torch.zeros_like(found)
    want[kept] = (a[kept].double() @ b.double()).float()
    return bool(torch.equal(found, want))


def elements_of_result(torch: Any, device: str, rows: int, seed: int) -> bool:
    """Compute a result of so many rows of 2^15 elements."""
    a, b = _whole(torch, (rows, 16), device, seed), _whole(torch, (16, 1 << 15), device, seed)
    found = lowprec.matmul(a, b)
    kept = [0, rows // 2, rows - 1]
    return bool(torch.equal(found[kept].float(), a[kept].float() @ b.float()))


#: Question, by increasing need of memory (the last two: 4.3 GB), and its sizes.
QUESTIONS: tuple[tuple[Callable[[Any, str, int, int], bool], tuple[int, ...]], ...] = (
    (batch, (65535, 65536, 131073)),
    (leading_dimension, (1 << 16, 1 << 20, (1 << 23) + 8)),
    (elements_of_a, ((1 << 16) + 8,)),
    (elements_of_result, ((1 << 16) + 8,)),
)


def run(part: Part, options: Options) -> None:
    """Ask all of them; in a quick run the smaller sizes alone."""
    import torch

    for question, sizes in QUESTIONS[: 2 if options.quick else None]:
        for size in part.in_time(sizes, options):
            words = {"question": question.__name__, "size": size}
            with part.attempt(**words):
                part.row(ok=question(torch, "cuda", size, options.seed), **words)
            torch.cuda.empty_cache()
