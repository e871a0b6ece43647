"""``autotune``: the fastest of a library's algorithms for a product, measured and stored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

from lowprec import plotting
from lowprec.backends import AlgorithmTiming, Arguments
from lowprec.core import streams
from lowprec.core.call import bind
from lowprec.core.executors import look_up
from lowprec.core.keywords import OF_PRODUCTS, ProductOptions, refuse_unknown, shows
from lowprec.core.tolerance import mode_of
from lowprec.errors import ArrayError, SettingError, quoted
from lowprec.planning.rendering import title
from lowprec.report import Report
from lowprec.util.tables import Table
from lowprec.util.tracing import uncompiled

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: cuBLASLt rarely returns more distinct algorithms.
MOST_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class AutotuneResult(Report):
    """The result of :func:`autotune`; ``print`` shows it as a table."""

    product: str  #: Element types and shapes.
    device: str
    #: The measured algorithms, the selected one first: ``rank`` in the library's order, ``median_ms`` of one product,
    #: and ``algorithm``, a description. Empty where there is only one.
    timed: tuple[AlgorithmTiming, ...]

    @property
    def _first_choice(self) -> AlgorithmTiming:
        return min(self.timed, key=lambda entry: entry.rank)

    @property
    def speedup(self) -> float:
        """Time of the library's first choice over that of the selected algorithm."""
        if not self.timed:
            return 1.0
        return self._first_choice.median_ms / self.timed[0].median_ms

    def tables(self) -> list[Table]:
        title = f"{self.product} on {self.device}"
        if not self.timed:
            return [Table(f"{title}: nothing to choose, the device has one algorithm", ())]
        first = self._first_choice.median_ms
        columns = (">rank", ">time / first choice", "algorithm")
        rows = []
        for entry in self.timed:
            ratio = entry.median_ms / first
            rows.append([str(entry.rank), f"{ratio:.3f}", entry.algorithm])
        rows[0][-1] += "  (chosen)"
        return [Table(title, columns, rows)]

    def figure(self) -> Any:
        names = [f"{entry.rank}: {entry.algorithm}" for entry in self.timed]
        times = {"median of one product": [entry.median_ms for entry in self.timed]}
        return plotting.bar_figure(f"{self.product} on {self.device}", names, times, "ms")

    def to_dict(self) -> dict[str, Any]:
        return {**Report.to_dict(self), "speedup": self.speedup}


@uncompiled
@shows(ProductOptions)
def autotune(
    a: Any,
    b: Any,
    /,
    *,
    candidates: int = 32,
    progress: Callable[[int, int], None] | None = None,
    **keywords: Unpack[ProductOptions],
) -> AutotuneResult:
    """Measure cuBLASLt's algorithms for a product; later products use the fastest.

    The choice is stored on disk for later processes on the same model of GPU with the same driver and cuBLAS, in
    ``LOWPREC_CACHE_DIR``; without a cache it lasts for this process, and a warning gives the reason. An algorithm
    replaces the library's first choice only if it was faster in two comparisons. Results are written to temporary
    memory, not to ``out``. On a CPU there is nothing to choose.

    Parameters
    ----------
    a, b, out, c, alpha, beta, bias, activation, out_dtype, math_mode, rtol, bound, k_chunk, scale_a, scale_b
        As for :func:`lowprec.matmul`. ``out`` is not written; its strides matter.
    backward_mode
        Ignored.
    candidates : int
        Number of algorithms to try, from 1 to 256.
    progress : callable, optional
        Called after each measurement with the number of measurements done and in total.

    Returns
    -------
    AutotuneResult

    Raises
    ------
    LowprecError
        As for ``matmul``; if no algorithm runs, the first one's error.
    SettingError
        ``candidates`` is out of range.
    TypeError
        ``candidates`` is not an integer.

    Examples
    --------
    >>> import numpy as np
    >>> import lowprec
    >>> a = np.ones((64, 64), np.float32)
    >>> lowprec.autotune(a, a).speedup
    1.0
    """
    if isinstance(candidates, bool) or not 1 <= index(candidates) <= MOST_CANDIDATES:
        raise SettingError(
            f"candidates must be from 1 to {MOST_CANDIDATES}, got {quoted(candidates)}"
        )
    refuse_unknown("autotune", keywords, OF_PRODUCTS)
    call = bind(a, b, **keywords)
    resolved, _ = mode_of(
        call, keywords.get("math_mode"), keywords.get("rtol"), keywords.get("bound")
    )
    if call.delegate is not None:
        raise ArrayError(call.delegate.why)
    library = call.library
    x = call.x
    y = call.y
    options = call.options
    entry = look_up(resolved, x, y, options, observed=False)
    backend = entry.backend
    timed: list[AlgorithmTiming] = []

    def measure(arguments: Arguments) -> None:
        timed.extend(
            backend.tune(entry.execute, arguments, candidates=candidates, progress=progress)
        )

    stream = library.current_stream(x.device) or 0
    with ExitStack() as stack:
        target = options.out
        if target is None:
            result = backend.temporary(entry.out_shape, entry.out_dtype, x.device, stream)
            target = stack.enter_context(result)
        arguments = options.arguments(x, y, target, stream)
        if x.device.is_host:
            measure(arguments)
        else:
            streams.run(measure, arguments, library, (call.a, call.b, *call.others))
    capabilities = entry.plan.capabilities
    return AutotuneResult(
        title(entry.plan), f"{capabilities.device}: {capabilities.name}", tuple(timed)
    )
