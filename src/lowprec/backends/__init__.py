"""Where plans are executed."""

from __future__ import annotations

from lowprec.backends.execution import Arguments, Backend, Executor, Ran, Stopwatch, Timed
from lowprec.backends.registry import backend_of

__all__ = ["Arguments", "Backend", "Executor", "Ran", "Stopwatch", "Timed", "backend_of"]
