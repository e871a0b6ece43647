"""What all parts of the software CUDA share: calls are counted, any of them can be made to fail, misuse is noted."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


class Fault(Exception):
    """Work on a device did what the hardware would not let pass, for example used memory that is not allocated."""


class Recorder:
    """The calls that were made, in order, and those that are to fail.

    Attributes
    ----------
    calls : list of str
        ``"part.function"``, for example ``"cublas_lt.matmul"``.
    faults : list of str
        What was done wrong, in words. A test that provokes a fault empties the list.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.faults: list[str] = []
        self._plans: list[_Failure] = []

    @contextlib.contextmanager
    def fail(self, function: str, *, at: int = 1, status: Any = None) -> Iterator[_Failure]:
        """Have the ``at``-th call from now on report an error instead of acting.

        Parameters
        ----------
        function : str
            With or without the part before the dot; "*" counts all calls.
        at : int
        status : enumeration member or int, optional
            By default one that fits the function.

        Yields
        ------
        object
            Its ``happened`` tells whether the call came.
        """
        plan = _Failure(function, at, status)
        self._plans.append(plan)
        try:
            yield plan
        finally:
            self._plans.remove(plan)

    def called(self, part: str, function: str) -> _Failure | None:
        """Note a call; return the failure that it is to have."""
        name = f"{part}.{function}"
        self.calls.append(name)
        for plan in self._plans:
            if plan.is_due(name, function):
                return plan
        return None


class _Failure:
    def __init__(self, function: str, at: int, status: Any) -> None:
        self.function = function
        self.status = status
        self.happened = False
        self._left = at

    def is_due(self, name: str, function: str) -> bool:
        if self.function not in ("*", name, function):
            return False
        self._left -= 1
        self.happened |= self._left == 0
        return self._left == 0


class Part:
    """Stands for one module: its functions are those that are marked, its enumerations and types the real ones.

    Parameters
    ----------
    name : str
        For the recorder.
    real : module
    recorder : Recorder
    """

    #: Functions of the real module that need no driver.
    harmless: frozenset[str] = frozenset()

    def __init__(self, name: str, real: Any, recorder: Recorder) -> None:
        self.__name__ = real.__name__
        self.part = name
        self.real = real
        self.recorder = recorder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "real":
            raise AttributeError(name)
        found = getattr(self.real, name)
        if isinstance(found, type) or not callable(found) or name in self.harmless:
            return found
        raise AttributeError(f"the software {self.part} has no {name}")

    def failed(self, function: str, status: Any) -> Any:
        """Report an error as this module does."""
        raise NotImplementedError


def gives_back(function: str) -> bool:
    """Whether a function acts even where it reports an error, which is that of earlier work then."""
    return function == "cudaFree" or function.lower().endswith("destroy")


def function(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method as a function of the module: it is recorded, and it can be made to fail."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Part, *arguments: Any, **keywords: Any) -> Any:
        plan = self.recorder.called(self.part, name)
        if plan is None:
            return method(self, *arguments, **keywords)
        if gives_back(name):
            method(self, *arguments, **keywords)
        return self.failed(name, plan.status)

    return call
