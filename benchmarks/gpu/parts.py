"""What a section has found: facts and rows, on disk after every addition.

A section that crashes or hangs loses what it was about to find, and nothing that it had found.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: an infinity or NaN becomes None, what is no plain value its text.

    Examples
    --------
    >>> plain({"a": (1, float("inf")), 2: None})
    {'a': [1, None], '2': None}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    # NumPy's numbers.
    return plain(value.item()) if hasattr(value, "item") else str(value)


@dataclass
class Part:
    """The result of one section.

    Parameters
    ----------
    path : Path
        Of the file.
    device : str
        On what the rows are measured, "gpu" or "cpu"; each row says so.
    """

    path: Path
    device: str = "cpu"
    available: bool = True
    why: str = ""
    complete: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def fact(self, name: str, value: Any) -> None:
        """Keep one fact of the section as a whole."""
        self.facts[name] = plain(value)
        self.save()

    def row(self, *, ok: bool | None = None, **values: Any) -> None:
        """Keep one row.

        Parameters
        ----------
        ok : bool or None
            Whether what was looked at is as it should be; None where nothing says how it should be.
        """
        self.rows.append(plain({"device": self.device, **values, "ok": ok}))
        self.save()

    def unavailable(self, why: str) -> None:
        """Say that this machine cannot run the section."""
        self.available, self.why = False, why
        self.save()

    def finish(self) -> None:
        """Say that nothing is left to do."""
        self.complete = True
        self.save()

    def save(self) -> None:
        """Write the file."""
        names = ("available", "why", "complete", "facts", "rows")
        common.write_json(self.path, {name: getattr(self, name) for name in names})


def read(path: Path) -> dict[str, Any]:
    """Return what a section wrote.

    Raises
    ------
    ValueError
        If that is not the file of a part.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError("the section wrote nothing") from None
    except ValueError:
        raise ValueError("what the section wrote is no JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise ValueError("what the section wrote is no part of a report")
    return found


@dataclass(frozen=True)
class Options:
    """What every section is told.

    Parameters
    ----------
    quick : bool
        Tiny sizes: does it run?
    seed : int
    deadline : float
        On the clock of `time.monotonic`: when the section had better be done.
    """

    quick: bool
    seed: int
    deadline: float = math.inf

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.deadline - time.monotonic()
