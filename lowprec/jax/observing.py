"""Observations of intercepted products, for the comparison of two runs: callbacks of compiled functions.

The layer of a product is the path of its functions and scopes, and the line of the program that multiplies. Further
products of a line have a number, in the order in which they are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from lowprec.core.recording import ANY_PASS, Observed, Recorder, distance, norm

_INTERNAL = tuple(
    str(Path(str(file)).parent) for file in (jax.__file__, np.__file__, Path(__file__).parent)
)


class Observer:
    """The products of compiled functions; callbacks run in any order and thread."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._products: list[Observed] = []
        self._module: Any = None
        self._lines: dict[str, int] = {}

    def settle(self) -> None:
        """Wait for all callbacks, and record the products by layer."""
        jax.effects_barrier()
        self._products.sort(key=lambda x: (x.layer, x.phase))
        self.recorder.products += self._products
        self._products.clear()
        # JAX keeps the observer with compiled functions
        self.recorder = Recorder(self.recorder.reference)

    def observed(
        self, ctx: Any, name: str, mode: str, params: Any, compute: Callable[..., Any],
        again: Callable[..., Any] | None,
    ) -> Callable[..., Any]:  # fmt: skip
        """Return the function of a product that also records it; ``again`` computes it in the reference.

        ``name`` is the path of its functions and scopes.
        """
        layer = self._layer(ctx, name)
        contracted = params["dimension_numbers"][0][0]
        multiplications = prod(ctx.avals_out[0].shape) * prod(
            ctx.avals_in[0].shape[axis] for axis in contracted
        )

        def record(result: Any, reference: Any, *are_finite: Any) -> None:
            x = _numbers(result)
            y = _numbers(reference)
            error = distance(x, y) if mode else None
            fault = _fault(x)
            if fault:
                fault += _origin(list(map(bool, are_finite)), mode, np.isfinite(y).all())
            shape = tuple(x.shape)
            sketched = self.recorder.sketch(x)
            seen = Observed(
                layer, ANY_PASS, "dot_general", mode, multiplications, shape, norm(x), sketched, error, norm(y), fault
            )  # fmt: skip
            self._products.append(seen)

        def product(a: Any, b: Any) -> Any:
            result = compute(a, b)
            reference = result if again is None else again(a, b)
            io_callback(
                record, None, result, reference, jnp.isfinite(a).all(), jnp.isfinite(b).all()
            )
            return result

        return product

    def _layer(self, ctx: Any, name: str) -> str:
        if self._module is not ctx.module_context:
            self._module = ctx.module_context
            self._lines = {}
        line = ", ".join(filter(None, [name, _line(ctx.traceback)]))
        number = self._lines[line] = self._lines.get(line, 0) + 1
        return f"{line} #{number}" if number > 1 else line


def _line(traceback: Any) -> str:
    """Return file and line of the innermost frame outside of JAX, NumPy and lowprec."""
    for frame in getattr(traceback, "frames", ()):
        if not frame.file_name.startswith(_INTERNAL):
            return f"{Path(frame.file_name).name}:{frame.line_num}"
    return ""


def _numbers(x: Any) -> Any:
    numbers = np.asarray(x)
    return numbers.astype(np.float32) if numbers.dtype.itemsize == 2 else numbers


def _fault(x: Any) -> str:
    if np.isfinite(x).all():
        return ""
    return "NaN" if np.isnan(x).any() else "Inf"


def _origin(are_finite: list[bool], mode: str, is_finite_again: Any) -> str:
    for name, is_finite in zip(("first", "second"), are_finite, strict=True):
        if not is_finite:
            return f": its {name} operand is not finite"
    if mode and is_finite_again:
        return f": by {mode}; the product is finite in the reference"
    return ": its operands are finite"
