"""``search_modes``: the cheapest mode of each layer with which a result stays close to FP32's.

The change of the result when one layer alone is lowered is the sensitivity of that layer. The changes of several layers
are added in squares, as those of independent roundings; the sum is corrected by the change that is measured with all
modes together.
"""

from __future__ import annotations

import glob
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lowprec import plotting
from lowprec.core.rules import RulesLike
from lowprec.errors import SettingError, quoted
from lowprec.modes import MathMode, Mode, ModeLike, parse_mode
from lowprec.report import Report
from lowprec.torch.interception import intercept
from lowprec.util.progress import progress
from lowprec.util.tables import Table

_FULL = MathMode.FP32


@dataclass(frozen=True)
class LayerModes(Mapping[str, str], Report):
    """Modes by layer, which :class:`intercept` accepts; ``print`` shows the layers, the most sensitive one first."""

    modes: Mapping[str, str]  #: By name pattern, the last one ``"*"``.
    change: float  #: Relative change of the result with these modes.
    #: By layer and mode, with that layer alone.
    sensitivity: Mapping[str, Mapping[str, float]] = field(repr=False)
    shares: Mapping[str, float] = field(repr=False)  #: Part of the multiplications, by layer.

    def __getitem__(self, pattern: str) -> str:
        return self.modes[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self.modes)

    def __len__(self) -> int:
        return len(self.modes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the modes to a TOML file, which :class:`intercept` and ``lowprec run --mode`` read."""
        lines = [
            f"{json.dumps(pattern)} = {json.dumps(mode)}" for pattern, mode in self.modes.items()
        ]
        Path(path).write_text("\n".join(["[rules]", *lines, ""]), encoding="utf-8")

    def figure(self) -> Any:
        names, note = plotting.first(list(self.sensitivity))
        figure, ((panel,),) = plotting.figure(1.6 + 0.22 * len(names))
        modes = self.sensitivity[names[0]]
        alone = {
            f"{mode} alone": [self.sensitivity[name][mode] for name in names] for mode in modes
        }
        plotting.dots(
            panel,
            [f"{name or '(no layer)'}: {self.modes[glob.escape(name)]}" for name in names],
            alone,
        )
        panel.axvline(
            self.change, color=plotting.INK, linestyle="--", label="all layers in their modes"
        )
        panel.set(xlabel="relative change of the result", title=f"sensitivity of layers{note}")
        plotting.legend(figure, panel)
        return figure

    def tables(self) -> list[Table]:
        rows = []
        for name, changes in self.sensitivity.items():
            shown = [
                f"{self.shares[name]:.1%}",
                self.modes[glob.escape(name)],
                *(f"{x:.1e}" for x in changes.values()),
            ]
            rows.append([name or "(no layer)", *shown])
        modes = next(iter(self.sensitivity.values()), {})
        title = f"modes by layer: the result changes by {self.change:.1e}"
        return [
            Table(title, ["layer", ">share", "mode", *(f">{mode} alone" for mode in modes)], rows)
        ]


def search_modes(
    run: Callable[[], Any], *, rtol: float, modes: Sequence[ModeLike] = ("bf16", "tf32")
) -> LayerModes:
    """Return the cheapest mode of each layer with which the result of ``run`` stays within ``rtol`` of FP32's.

    ``run`` is called once for each layer and mode, and a few times more. In a terminal a line shows the current step.

    Parameters
    ----------
    run : callable
        Returns a tensor, an array, a number, or a collection of these, such as a loss or logits. It must be
        reproducible: PyTorch's random numbers are the same in each call, the parameters must not change.
    rtol : float
        Largest accepted change: the Euclidean norm of the difference, relative to that of FP32's result.
    modes : sequence of str, MathMode or Recipe
        Candidates, the cheapest one first. FP32 is used for the layers that none suits.

    Returns
    -------
    LayerModes
        Modes by layer for :class:`intercept`.

    Raises
    ------
    SettingError
        ``rtol`` is not positive, ``run`` has no product or is not reproducible, or its result is not finite.
    ModeError
        A mode is unknown.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> found = search_modes(lambda: model(torch.ones(4, 8)), rtol=0.1)
    >>> dict(found)
    {'0': 'bf16', '2': 'bf16', '*': 'fp32'}
    >>> with intercept(found):
    ...     y = model(torch.ones(4, 8))
    """
    if not rtol > 0:
        raise SettingError(f"rtol must be positive, got {rtol}")
    candidates = [parse_mode(mode) for mode in modes]
    seen, full = _result(run, _FULL)
    layers = _shares(seen)
    if not layers:
        raise SettingError("search_modes: the function has no product that a mode acts on")
    if not 0 < full.norm() < math.inf:
        raise SettingError("search_modes: the result in FP32 is zero or not finite")

    def change(chosen: RulesLike) -> float:
        found = _result(run, chosen)[1]
        each = float((found - full).norm() / full.norm()) if found.shape == full.shape else math.inf
        return math.inf if math.isnan(each) else each

    with progress("search", 1 + len(layers) * len(candidates)) as step:
        step("fp32")
        if (noise := change(_FULL)) > rtol:
            raise SettingError(
                f"search_modes: two calls of the function in FP32 differ by {noise:.1e}; make it reproducible"
            )
        changes: dict[str, list[float]] = {}
        for name in layers:
            changes[name] = []
            for mode in candidates:
                step(name, mode)
                changes[name].append(change({glob.escape(name): mode, "*": _FULL}))
        chosen, total = _choose(
            changes, layers, rtol, lambda chosen: change(_patterns(chosen, candidates))
        )
    ranked = sorted(layers, key=lambda name: changes[name], reverse=True)
    sensitivity = {
        name: dict(zip(map(str, candidates), changes[name], strict=True)) for name in ranked
    }
    patterns = {pattern: str(mode) for pattern, mode in _patterns(chosen, candidates).items()}
    return LayerModes(patterns, total, sensitivity, layers)


def _result(run: Callable[[], Any], modes: RulesLike) -> tuple[intercept, torch.Tensor]:
    """Return the report and the numbers of a call in these modes, with the current state of the random numbers."""
    with torch.random.fork_rng(), intercept(modes) as seen:
        leaves = [_numbers(x) for x in tree_leaves(run())]
    return seen, torch.cat(leaves or [torch.zeros(0)])


def _numbers(x: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(x).detach().double().cpu().flatten()
    except (RuntimeError, TypeError, ValueError):
        raise SettingError(
            f"search_modes: the function returned {quoted(x)}; return tensors or numbers"
        ) from None


def _shares(seen: intercept) -> dict[str, float]:
    found: dict[str, int] = {}
    for p in seen.report().taken:
        for name in p.layer.split("|"):
            found[name] = found.get(name, 0) + p.multiplications
    total = sum(found.values()) or 1
    return {name: count / total for name, count in found.items()}


def _choose(
    changes: Mapping[str, Sequence[float]], shares: Mapping[str, float], rtol: float,
    measure: Callable[[Mapping[str, int]], float],
) -> tuple[dict[str, int], float]:  # fmt: skip
    """Return the index of each layer's mode, len(modes) means FP32, and the change with all of them.

    While the change is too large, the layer whose next mode removes most of it per multiplication is raised.
    """
    chosen = dict.fromkeys(changes, 0)
    correction = 1.0
    squares = {name: [*(x * x for x in each), 0.0] for name, each in changes.items()}

    def gain(name: str) -> float:
        mode = chosen[name]
        before = squares[name][mode]
        if math.isinf(before):
            return math.inf
        return (before - squares[name][mode + 1]) / max(shares[name], 1e-9)

    while True:
        raisable = [name for name in changes if chosen[name] < len(changes[name])]
        expected = math.sqrt(sum(squares[name][i] for name, i in chosen.items()))
        if raisable and not expected * correction <= rtol:
            chosen[max(raisable, key=gain)] += 1
            continue
        measured = measure(chosen)
        if measured <= rtol or not raisable:
            return chosen, measured
        correction = math.inf
        if expected:
            correction = 1.01 * measured / expected


def _patterns(chosen: Mapping[str, int], candidates: Sequence[Mode]) -> dict[str, Mode]:
    modes = [*candidates, _FULL]
    return {**{glob.escape(name): modes[i] for name, i in chosen.items()}, "*": _FULL}
