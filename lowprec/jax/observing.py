"""Observations of intercepted products, for the comparison of two runs, by a function of the compiled library.

On other processors than the CPU, and on several devices, callbacks of the host call it.

The layer of a product is the path of its functions and scopes, and the line of the program that multiplies. Further
products of a line have a number, in the order in which they are compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from lowprec.core.interception_report import NO_STATISTICS
from lowprec.core.operand_statistics import SAMPLE, operand_statistics
from lowprec.core.recording import ANY_PASS, Kind, Recorder, Site, observe, xla_handler
from lowprec.core.rules import ALL, Rules
from lowprec.jax.lowering import axes_of
from lowprec.modes import Mode, parse_mode
from lowprec.util.strides import Shape

_TARGET = "lowprec_observe"
_INTERNAL = tuple(
    str(Path(str(file)).parent) for file in (jax.__file__, np.__file__, Path(__file__).parent)
)
_NUMBERS = ("float32", "float64", "complex64", "complex128")


class Observer:
    """The products of compiled functions, which JAX keeps with it; these run in any order and thread."""

    def __init__(
        self, records: bool, reference: Mode | None, alone: tuple[str, Mode] | None
    ) -> None:
        self.records = records
        self.reference = reference
        self._alone = alone
        self._sites: dict[tuple[Kind, Shape], Site] = {}
        self._module: Any = None
        self._lines: dict[str, int] = {}

    def rules_of(self, layer: str, rules: Rules) -> Rules:
        """Return the rules of a product, those of the reference if another one is alone in its mode."""
        if self._alone is None:
            return rules
        only, reference = self._alone
        return rules if layer == only else ((ALL, reference),)

    def settle(self, recorder: Recorder) -> None:
        """Wait for all products, and record them by layer."""
        jax.effects_barrier()
        for array in jax.live_arrays():
            if not array.is_deleted():
                array.block_until_ready()
        for (kind, shape), site in sorted(self._sites.items()):
            records = site.take()
            order = np.zeros(sum(x.calls for x in records), int)
            first = recorder.add_steps([(*kind[:3], shape)], order)
            for sums in records:
                of_operands = (NO_STATISTICS, NO_STATISTICS)
                if sums.sampled:
                    a, b = sums.sampled
                    of_operands = operand_statistics(a, b.T, parse_mode(kind.mode), SAMPLE)
                recorder.add_sums(kind, sums, first - records[0].begin, of_operands)

    def observed(
        self, ctx: Any, layer: str, mode: str, params: Any, inner: int, compute: Callable[..., Any],
        again: Callable[..., Any] | None,
    ) -> Callable[..., Any]:  # fmt: skip
        """Return the function of a product that also records it; ``again`` computes it in the reference.

        The operands of a convolution, which are no matrices, are not sampled.
        """
        out = ctx.avals_out[0]
        multiplications = out.size * inner
        key = Kind(layer, ANY_PASS, ctx.primitive.name, mode), tuple(out.shape)
        site = self._sites.get(key) or self._sites.setdefault(key, Site())
        words: list[int] = []
        is_product = ctx.primitive is jax.lax.dot_general_p
        if again is not None and is_product and multiplications and jnp.isrealobj(out):
            for number, x in enumerate(ctx.avals_in):
                words += _words(x, axes_of(x, params["dimension_numbers"], number))
        head = [site.handle, multiplications, int(again is not None)]

        def product(a: Any, b: Any) -> Any:
            result = compute(a, b)
            reference = result if again is None else again(a, b)
            operands = [_numbers(x) for x in (result, reference, a, b)]
            context = ctx.module_context
            is_single = getattr(context.axis_context, "num_devices", 0) == 1
            if is_single and tuple(context.platforms) == ("cpu",) and _is_registered():
                done = jax.ShapeDtypeStruct((1,), np.float32)
                call = jax.ffi.ffi_call(_TARGET, done, has_side_effect=True)
                call(*operands, words=np.array([*head, *words], np.int64))
            else:
                record = functools.partial(observe, site, *head[1:], words)
                io_callback(record, None, *operands)
            return result

        return product

    def layer(self, ctx: Any, name: str, is_gradient: bool) -> str:
        """Return the name of the next product by the path of its functions and scopes."""
        if self._module is not ctx.module_context:
            self._module = ctx.module_context
            self._lines = {}
        line = ", ".join(filter(None, [name, _line(ctx.traceback)]))
        if is_gradient:
            line += " (gradient)"
        number = self._lines[line] = self._lines.get(line, 0) + 1
        return f"{line} #{number}" if number > 1 else line


@functools.cache
def _is_registered() -> bool:
    """Whether XLA calls the compiled library's function."""
    try:
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(xla_handler()), platform="cpu")
    except Exception:  # noqa: BLE001 - a later XLA may have another interface
        return False
    return True


def _words(x: Any, axes: Any) -> list[int]:
    """Return the description of some vectors along k of an operand, for ``lp_site_observe``."""
    strides = [prod(x.shape[axis + 1 :]) for axis in range(x.ndim)]
    across = (*axes.batch, *axes.free)
    k = prod(x.shape[axis] for axis in axes.summed)
    count = prod(x.shape[axis] for axis in across)
    length = min(k, SAMPLE)
    words = [min(count, SAMPLE // length), length, len(across), len(axes.summed)]
    for axis in (*across, *axes.summed):
        words += [x.shape[axis], strides[axis]]
    return words


def _line(traceback: Any) -> str:
    """Return file and line of the innermost frame outside of JAX, NumPy and lowprec."""
    for frame in getattr(traceback, "frames", ()):
        if not frame.file_name.startswith(_INTERNAL):
            return f"{Path(frame.file_name).name}:{frame.line_num}"
    return ""


def _numbers(x: Any) -> Any:
    return x if x.dtype.name in _NUMBERS else x.astype(np.float32)
