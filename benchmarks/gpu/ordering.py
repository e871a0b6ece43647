"""Whether lowprec and JAX wait for each other's pending work, and the results with operands that JAX gives away.

A long product is queued first: an array that depends on it is known in advance, and is in memory only much later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import lowprec
from gpu.parts import Options, Part

#: Extents and number of the products that keep the device busy: 0.1 s on an H200 in TF32, 0.7 s in FP32.
_SIDE, _STEPS = 8192, 30
_OPERAND_SIDE = 1024
#: Relative error of a float32 product of so many normal numbers; a result that came too early is far off.
_TOLERANCE = 1e-4


class Work:
    """JAX's arrays, available or pending."""

    def __init__(self, jax: Any, side: int, operand_side: int, seed: int) -> None:
        self.jax, self.shape = jax, (operand_side, operand_side)
        self._rng = np.random.default_rng(seed)
        self._long = jax.numpy.full((side, side), 1.0 / side, "float32")

        def pending(long: Any, x: Any) -> Any:
            t = jax.lax.fori_loop(0, _STEPS, lambda _, t: long @ t, long)
            # Zero times a finite number: the sum is x, and cannot be known before.
            return x + 0 * t[0, 0]

        self._pending = jax.jit(pending)
        self.pending(self.draw()).block_until_ready()
        begin = time.perf_counter()
        self.pending(self.draw()).block_until_ready()
        self.long_s = time.perf_counter() - begin

    def draw(self) -> Any:
        """Return new numbers in host memory, which no buffer of the device has."""
        return self._rng.standard_normal(self.shape, np.float32)

    def put(self, host: Any) -> Any:
        return self.jax.numpy.asarray(host).block_until_ready()

    def pending(self, host: Any) -> Any:
        """Return an array with these elements, available after a long time."""
        return self._pending(self._long, self.jax.numpy.asarray(host))

    def donated(self, x: Any) -> tuple[bool, bool]:
        """Donate an array; return whether its memory was reused, and whether it is deleted."""
        before = x.unsafe_buffer_pointer()
        after = self.jax.jit(lambda t: t * np.nan, donate_argnums=0)(x)
        return after.unsafe_buffer_pointer() == before, x.is_deleted()


def judge(result: Any, a: Any, b: Any) -> dict[str, Any]:
    """Return the relative error of a product and whether it is that of a correct one."""
    exact = a.astype(np.float64) @ b
    error = float(np.linalg.norm(np.asarray(result) - exact) / np.linalg.norm(exact))
    # False for NaN, too.
    return {"ok": bool(error <= _TOLERANCE), "relative_error": error}


def _operand_pending(work: Work, a: Any, b: Any) -> dict[str, Any]:
    x, y = work.pending(a), work.put(b)
    begin = time.perf_counter()
    result = lowprec.matmul(x, y)
    host_s = time.perf_counter() - begin
    # True: the call waits on the host, which is safe and slow.
    waits = host_s > work.long_s / 2
    return {**judge(result, a, b), "host_s": host_s, "long_s": work.long_s, "host_waits": waits}


def _result_consumed(work: Work, a: Any, b: Any) -> dict[str, Any]:
    twice = work.jax.jit(lambda c: c + c)
    return judge(np.asarray(twice(lowprec.matmul(work.pending(a), work.put(b)))) / 2, a, b)


def _operands_dropped(work: Work, a: Any, b: Any) -> dict[str, Any]:
    result = lowprec.matmul(work.pending(a), work.put(b))
    # Fills the free memory.
    for _ in range(8):
        work.jax.numpy.full(work.shape, np.nan, "float32").block_until_ready()
    return judge(result, a, b)


def _operand_donated(work: Work, a: Any, b: Any) -> dict[str, Any]:
    x, y = work.put(a), work.pending(b)
    result = lowprec.matmul(x, y)
    # False: JAX copied, because lowprec still held the operand.
    in_place, deleted = work.donated(x)
    return {**judge(result, a, b), "deleted": deleted, "in_place": in_place}


QUESTIONS: dict[str, Callable[[Work, Any, Any], dict[str, Any]]] = {
    "an operand is still being computed": _operand_pending,
    "JAX takes the result at once": _result_consumed,
    "operands are dropped at once": _operands_dropped,
    "an operand is donated at once": _operand_donated,
}


def ask(part: Part, work: Work, names: Iterable[str]) -> None:
    for name in names:
        with part.attempt(question=name):
            part.row(question=name, **QUESTIONS[name](work, work.draw(), work.draw()))


def ordering(part: Part, options: Options) -> None:
    import jax

    platform = jax.devices()[0].platform
    part.fact("platform", platform)
    if platform != "gpu":
        part.row(
            ok=None, question="JAX has a GPU", error=f"its devices are of the platform {platform}"
        )
        return
    work = Work(jax, 1024 if options.quick else _SIDE, _OPERAND_SIDE, options.seed)
    part.fact("long_s", work.long_s)
    with part.attempt(question="lowprec multiplies JAX's arrays at all"):
        # The long product must still be pending once lowprec is loaded.
        lowprec.matmul(work.put(work.draw()), work.put(work.draw())).block_until_ready()
    ask(part, work, part.in_time(QUESTIONS, options))
