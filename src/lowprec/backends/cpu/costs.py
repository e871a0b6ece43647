"""What the kernels cost on this very machine, as it was measured and is kept on disk; built-in figures until then.

Costs decide between modes that are all exact enough, and between kernels that compute the same. A wrong one makes a
choice slower, and no result wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from lowprec import disk
from lowprec._version import __version__
from lowprec.backends.cpu import threads
from lowprec.backends.cpu.cpuinfo import cpu_identity
from lowprec.backends.cpu.openblas import openblas
from lowprec.planning import KernelRow
from lowprec.policy import environment

FILE = "cpu_costs.json"
_FORMAT = 1

#: What a figure may be; a kernel beyond it was not measured but disturbed.
_LARGEST_PER_FLOP, _LARGEST_PER_ELEMENT = 1e3, 1e6


class Cost(NamedTuple):
    """What a kernel costs."""

    per_flop: float  # time of one flop; 1 is FP32 on this machine
    #: Time of reading, rounding and packing one element of an operand, in the same unit.
    per_element: float


#: What this process has measured, by machine; the disk may be full.
_measured: dict[str, dict[str, Cost]] = {}


def limited(per_flop: float, per_element: float) -> Cost:
    """Return a cost within the limits of what is read back."""
    return Cost(min(per_flop, _LARGEST_PER_FLOP), min(per_element, _LARGEST_PER_ELEMENT))


def machine_key() -> str:
    """Return all that the costs depend on, as one line."""
    library = openblas()
    blas = "NumPy's BLAS" if library is None else f"OpenBLAS {library.core_type}"
    return f"{cpu_identity()}; {threads.num_threads()} threads, {blas}, lowprec {__version__}"


def stored() -> dict[str, Cost]:
    """Return the costs that were measured on this machine, by kernel; none where LOWPREC_AUTOTUNE is 0."""
    if environment.autotune() is False:
        return {}
    if _measured:
        return _measured.get(machine_key(), {})
    if not disk.exists(FILE):
        return {}
    return _costs(_machines().get(machine_key()))


def remember(measured: Mapping[str, Cost]) -> None:
    """Keep costs for later processes, beside those of other machines that share the folder."""
    _measured[machine_key()] = dict(measured)
    machines = _machines() if disk.exists(FILE) else {}
    machines[machine_key()] = {name: cost._asdict() for name, cost in measured.items()}
    disk.write_json(FILE, {"format": _FORMAT, "machines": machines})


def applied(
    rows: tuple[KernelRow, ...], measured: Mapping[str, Cost]
) -> tuple[tuple[KernelRow, ...], frozenset[str]]:
    """Return kernels' rows with the costs that were measured, and the names of those."""
    with_costs = tuple(
        row._replace(cost_per_flop=cost.per_flop, cost_per_element=cost.per_element)
        if (cost := measured.get(row.name))
        else row
        for row in rows
    )
    return with_costs, frozenset(row.name for row in rows if row.name in measured)


def _machines() -> dict[str, Any]:
    read = disk.read_json(FILE)
    machines = read.get("machines") if read.get("format") == _FORMAT else None
    return machines if isinstance(machines, dict) else {}


def _costs(entry: Any) -> dict[str, Cost]:
    """Return what an entry of the file holds; all or nothing, since costs are ratios of each other."""
    if not isinstance(entry, dict):
        return {}
    found = {}
    for name, figures in entry.items():
        if not isinstance(figures, dict) or figures.keys() != set(Cost._fields):
            return {}
        cost = Cost(**figures)
        if not (_is_within(cost.per_flop, _LARGEST_PER_FLOP) and cost.per_flop):
            return {}
        if not _is_within(cost.per_element, _LARGEST_PER_ELEMENT):
            return {}
        found[name] = cost
    return found


def _is_within(value: Any, largest: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 <= value <= largest
