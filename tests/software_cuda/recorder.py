"""Shared by all parts of the software CUDA: calls are recorded, any call can be made to fail, misuse is noted."""

import contextlib
import functools
from typing import Any

from software_cuda.switches import Switches


class Fault(Exception):
    """Work on a device that the hardware stops, for example an access to memory that is not allocated."""


class Refusal(Exception):
    """A library refuses a call with this status; real libraries do not give the reason."""

    def __init__(self, status, reason=""):
        super().__init__(status, reason)
        self.status = status
        self.reason = reason


class Recorder:
    """The calls in order, as ``"part.function"``, those that are to fail, and the faults: misuse in words.

    A test that provokes a fault empties the list. ``log`` has the function and arguments of the runtime's calls.
    """

    def __init__(self, switches=None):
        self.switches = switches or Switches()
        self.calls: list[str] = []
        self.log: list[tuple[Any, ...]] = []
        self.faults: list[str] = []
        self._plans: list[_Failure] = []

    @contextlib.contextmanager
    def fail(self, function, *, at=1, status=None):
        """Make the ``at``-th call from now on report an error instead of acting.

        ``function`` is a name with or without the part before the dot, "*" for all calls; ``status`` is by default one
        that fits the function. The value's ``happened`` is whether the call was made.
        """
        plan = _Failure(function, at, status)
        self._plans.append(plan)
        try:
            yield plan
        finally:
            self._plans.remove(plan)

    def called(self, part, function):
        """Record a call; return the failure planned for it."""
        name = f"{part}.{function}"
        self.calls.append(name)
        for plan in self._plans:
            if plan.is_due(name, function):
                return plan
        return None


class _Failure:
    def __init__(self, function, at, status):
        self.function = function
        self.status = status
        self.happened = False
        self._left = at

    def is_due(self, name, function):
        if self.function not in ("*", name, function):
            return False
        self._left -= 1
        self.happened |= self._left == 0
        return self._left == 0


class Part:
    """Replaces one module: functions are the marked methods, enumerations and types those of the real module."""

    #: Functions of the real module that need no driver.
    harmless: frozenset[str] = frozenset()

    def __init__(self, name, real, recorder):
        self.__name__ = real.__name__
        self.part = name
        self.real = real
        self.recorder = recorder

    def __getattr__(self, name):
        if name.startswith("_") or name == "real":
            raise AttributeError(name)
        found = getattr(self.real, name)
        if isinstance(found, type) or not callable(found) or name in self.harmless:
            return found
        raise AttributeError(f"the software {self.part} has no {name}")


def function(method):
    """Make a method a function of the module: it is recorded, can be made to fail, and raises the module's error.

    ``self.error`` returns that from a status, None where any will do, and a reason.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(self, *arguments, **keywords):
        plan = self.recorder.called(self.part, name)
        try:
            if plan is None:
                return method(self, *arguments, **keywords)
            if name.endswith("destroy"):  # whose error is one of earlier work
                method(self, *arguments, **keywords)
        except Refusal as refusal:
            raise self.error(refusal.status, refusal.reason) from None
        raise self.error(plan.status, f"{name} was made to fail")

    return call
