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

from lowprec.core.interception import Alone
from lowprec.core.interception_report import NO_STATISTICS
from lowprec.core.operand_statistics import SAMPLE, operand_statistics
from lowprec.core.recording import ANY_PASS, Observed, Recorder, distance, norm
from lowprec.core.rules import ALL, Rules
from lowprec.jax.lowering import OperandAxes, axes_of
from lowprec.modes import parse_mode

_OPERATOR = "dot_general"
_INTERNAL = tuple(
    str(Path(str(file)).parent) for file in (jax.__file__, np.__file__, Path(__file__).parent)
)


class Observer:
    """The products of compiled functions; callbacks run in any order and thread."""

    def __init__(self, recorder: Recorder | None, alone: Alone | None = None) -> None:
        self.records = recorder is not None
        self.recorder = recorder or Recorder()
        self._alone = alone
        self._products: list[Observed] = []
        self._module: Any = None
        self._lines: dict[str, int] = {}

    def rules_of(self, layer: str, rules: Rules) -> Rules:
        """Return the rules of a product, those of the reference if another one is alone in its mode."""
        if self._alone is None or self._alone.layer == layer:
            return rules
        return ((ALL, self._alone.reference),)

    def settle(self) -> None:
        """Wait for all callbacks, and record the products by layer."""
        jax.effects_barrier()
        self._products.sort(key=lambda x: (x.layer, x.phase))
        self.recorder.products += self._products
        self._products.clear()
        # JAX keeps the observer with compiled functions
        self.recorder = Recorder(self.recorder.reference)

    def observed(
        self, ctx: Any, layer: str, mode: str, params: Any, compute: Callable[..., Any],
        again: Callable[..., Any] | None,
    ) -> Callable[..., Any]:  # fmt: skip
        """Return the function of a product that also records it; ``again`` computes it in the reference."""
        dimensions = params["dimension_numbers"]
        contracted = dimensions[0][0]
        multiplications = prod(ctx.avals_out[0].shape) * prod(
            ctx.avals_in[0].shape[axis] for axis in contracted
        )

        def record(result: Any, reference: Any, a: Any, b: Any, *are_finite: Any) -> None:
            x = _numbers(result)
            y = _numbers(reference)
            error = distance(x, y) if mode else None
            of_operands = (NO_STATISTICS, NO_STATISTICS)
            if again is not None and self.recorder.measures_next(layer, ANY_PASS, _OPERATOR):
                with np.errstate(all="ignore"):
                    of_operands = operand_statistics(
                        _numbers(a), _numbers(b).T, parse_mode(mode), SAMPLE
                    )
            fault = _fault(x)
            if fault:
                fault += _origin(list(map(bool, are_finite)), mode, np.isfinite(y).all())
            seen = Observed(
                layer, ANY_PASS, _OPERATOR, mode, multiplications, tuple(x.shape), norm(x),
                self.recorder.sketch(x), error, norm(y), fault, *of_operands,
            )  # fmt: skip
            self._products.append(seen)

        def product(a: Any, b: Any) -> Any:
            result = compute(a, b)
            reference = result if again is None else again(a, b)
            vectors = [_vectors(x, axes_of(x, dimensions, i)) for i, x in enumerate((a, b))]
            io_callback(
                record, None, result, reference, *vectors, jnp.isfinite(a).all(),
                jnp.isfinite(b).all(),
            )  # fmt: skip
            return result

        return product

    def layer(self, ctx: Any, name: str) -> str:
        """Return the name of the next product by the path of its functions and scopes."""
        if self._module is not ctx.module_context:
            self._module = ctx.module_context
            self._lines = {}
        line = ", ".join(filter(None, [name, _line(ctx.traceback)]))
        number = self._lines[line] = self._lines.get(line, 0) + 1
        return f"{line} #{number}" if number > 1 else line


def _vectors(x: Any, axes: OperandAxes) -> Any:
    """Return some vectors of a real operand along k, those of its first rows or columns."""
    if jnp.iscomplexobj(x):
        return jnp.zeros((0, 0))
    free = (*axes.batch, *axes.free)
    most = max(1, SAMPLE // max(1, prod(x.shape[axis] for axis in axes.summed)))
    for axis in reversed(free):
        count = min(x.shape[axis], most)
        x = jax.lax.slice_in_dim(x, 0, count, axis=axis)
        most //= max(1, count)
    count = prod(x.shape[axis] for axis in free)
    return x.transpose((*free, *axes.summed)).reshape(count, -1 if x.size else 0)


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
