"""``compare``: a run in a mode and one in a reference mode; the change of the result, and the layers behind it."""

from __future__ import annotations

import glob
import math
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from lowprec.core.printed import compare_lines
from lowprec.core.recording import ANY_PASS, NO_LAYER, Kind, Recorder, Run, distance, norm
from lowprec.core.rules import RulesLike, shown
from lowprec.core.run_report import LayerError, RunComparison, compared
from lowprec.errors import SettingError, quoted
from lowprec.interception import intercept
from lowprec.modes import Mode, ModeLike, parse_mode, row
from lowprec.util.atomic import write_file
from lowprec.util.tracing import uncompiled

__all__ = ["LayerError", "RunComparison", "compare"]


@uncompiled
def compare(
    function: Callable[[], Any],
    math_mode: RulesLike,
    against: ModeLike = "fp32",
    blame: bool = False,
) -> RunComparison:
    """Return the change of a function's result in a mode, and the layers behind it.

    The function runs in the mode and in a reference.

    Parameters
    ----------
    function : callable
        Returns arrays or numbers, also in dictionaries, lists and tuples. It must be reproducible, and change no
        parameters: it is called several times, each time with the same state of PyTorch's random numbers.
    math_mode : str, MathMode, Recipe, or mapping
        As in :class:`lowprec.intercept`.
    against : str, MathMode or Recipe
        The mode of all products of the reference.
    blame : bool
        Whether to run the function again for each layer, with that layer alone in its mode. The squared change of the
        result, relative to that with all layers, is the layer's blame; these sum to about 1.

    Returns
    -------
    RunComparison
        The verdict, and for each layer and pass its own error, its drift and its share.

    Raises
    ------
    ModeError
        A mode is unknown.
    SettingError
        The function returned no arrays and no numbers.
    UnsupportedError
        lowprec was built without kernels.

    Examples
    --------
    >>> import torch
    >>> import lowprec
    >>> layer = torch.nn.Linear(64, 4)
    >>> found = lowprec.compare(lambda: layer(torch.ones(8, 64)), "bf16")
    >>> [(x.layer, x.phase, x.mode) for x in found.layers]
    [('Linear', 'forward', 'bf16')]
    """
    reference = parse_mode(against, what="against")
    recorder = Recorder(reference)
    scope = intercept(math_mode)
    run, result = _recorded(function, scope, recorder)
    other, expected = _recorded(function, intercept(reference), Recorder())
    change = _change(result, expected)
    parts = {}
    if blame and change and math.isfinite(change):
        for layer, alone in _alone(run, reference).items():
            _, found = _recorded(function, intercept(alone), None)
            parts[layer or NO_LAYER] = ((_change(found, expected) or 0.0) / change) ** 2
        for layer in _of_calls(run, reference):
            single = intercept(scope.rules)
            single.alone = (layer, reference)
            _, found = _recorded(function, single, None)
            parts[layer] = ((_change(found, expected) or 0.0) / change) ** 2
    notes = [] if change is not None else ["The results of the two runs have other shapes."]
    return compared(shown(scope.rules).strip("'"), str(reference), run, other, change, parts, notes)


def _alone(run: Run, reference: Mode) -> dict[str, dict[str, Mode]]:
    """Return the modes of each layer alone; of a layer with products in two modes, a quantising one."""
    modes: dict[str, Mode] = {}
    for x in _kinds(run):
        if x.phase == ANY_PASS:
            continue
        mode = parse_mode(x.mode or reference)
        for layer in x.layer.split("|"):
            if mode != reference and (layer not in modes or row(mode).quantizes):
                modes[layer] = mode
    return {layer: {glob.escape(layer): mode, "*": reference} for layer, mode in modes.items()}


def _of_calls(run: Run, reference: Mode) -> list[str]:
    """Return the layers of JAX and NumPy in another mode: functions and lines, for which there are no rules."""
    found = [x for x in _kinds(run) if x.phase == ANY_PASS and x.mode not in ("", str(reference))]
    return list(dict.fromkeys(x.layer for x in found))


def _kinds(run: Run) -> list[Kind]:
    return list(dict.fromkeys(x.kind for x in run.observed))


def _recorded(
    function: Callable[[], Any], scope: intercept, recorder: Recorder | None
) -> tuple[Run, list[Any]]:
    """Return the products and the numbers of a call."""
    scope.recorder = recorder
    with _same_random_numbers(), scope:
        numbers = list(_numbers(function()))
    if recorder is None:
        return Run(), numbers
    for part in scope.parts:
        part.complete_records()
    return recorder.run(), numbers


def _same_random_numbers() -> AbstractContextManager[Any]:
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.random.fork_rng()


def _numbers(x: Any) -> Iterator[Any]:
    """Yield the numbers of each array of a result."""
    if isinstance(x, Mapping):
        x = x.values()
    if isinstance(x, Iterable) and not hasattr(x, "shape") and not isinstance(x, (str, bytes)):
        for each in x:
            yield from _numbers(each)
        return
    if hasattr(x, "detach"):  # of PyTorch
        x = x.detach().cpu()
        x = (x if x.is_complex() else x.double()).numpy()
    numbers = np.asarray(x)
    if numbers.dtype.kind not in "biufcV" or numbers.dtype.names:
        raise SettingError(f"compare: the function returned {quoted(x)}; return arrays or numbers")
    yield numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)


def _change(found: list[Any], expected: list[Any]) -> float | None:
    """Return the norm of the difference, relative to that of the expected numbers; None for other shapes."""
    if [x.shape for x in found] != [x.shape for x in expected]:
        return None
    difference = math.hypot(*(distance(x, y) for x, y in zip(found, expected, strict=True)))
    size = math.hypot(*map(norm, expected))
    if not size:
        return math.inf if difference else 0.0
    return difference / size


# -- programs -------------------------------------------------------------------------------------


def recorder_against(reference: str) -> Recorder:
    """Return the recorder of a process of ``lowprec run --against``; ``reference`` is empty in the reference."""
    return Recorder(parse_mode(reference) if reference else None)


def write_record(path: str, recorder: Recorder) -> None:
    write_file(path, pickle.dumps(recorder.run()))


def read_record(path: str) -> Run | None:
    """Return the record of a process; None if it ended without writing it."""
    file = Path(path)
    if not file.exists():
        return None
    run: Run = pickle.loads(file.read_bytes())
    return run


def compare_programs(
    mode: str,
    against: str,
    runs: Sequence[Run | None],
    found: Sequence[str],
    expected: Sequence[str],
) -> RunComparison:
    """Return the report of two runs of a program, of their products and printed lines, the reference's last."""
    run, reference = (each or Run() for each in runs)
    lines, change, parting = compare_lines(found, expected)
    notes = list(filter(None, [parting]))
    return compared(mode, against, run, reference, change, notes=notes, lines=lines)
