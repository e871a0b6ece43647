"""Switches that are functions of a library: one that reads and one that writes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from lowprec.errors import BackendError, UnsupportedError
from lowprec.modes import MathMode
from lowprec.policy.protocol import Tier


def attribute(path: str, library: str) -> Any:
    """Return what stands under this dotted path in a loaded module."""
    name, attributes = path.split(".", 1)
    try:
        return attrgetter(attributes)(sys.modules[name])
    except AttributeError:
        version = getattr(sys.modules[name], "__version__", None) or "of an unknown version"
        raise UnsupportedError(
            f"{library} {version} has no {path}: it is still being imported, or its switches are not those that "
            "lowprec knows"
        ) from None


class SwitchController:
    """A library whose switches are functions: one that reads and one that writes."""

    name: str
    module: str
    label: str
    tier = Tier.PROCESS
    switches: Mapping[str, str]
    #: Per switch: where the getter and the setter stand.
    paths: Mapping[str, tuple[str, str]]
    #: Per mode: the value of every switch.
    values: Mapping[MathMode, Any]
    modes: tuple[MathMode, ...]

    def _read(self, getter: Callable[..., Any]) -> Any:
        return getter()

    def _write(self, setter: Callable[..., Any], value: Any) -> None:
        setter(value)

    def save(self) -> dict[str, Any]:
        """Return the switches as they are."""
        return {
            name: self._read(attribute(getter, self.label))
            for name, (getter, _) in self.paths.items()
        }

    def set_mode(self, mode: MathMode) -> dict[str, Any]:
        """Set every switch, and see that it took."""
        value = self.values[mode]
        for _, setter in self.paths.values():
            self._write(attribute(setter, self.label), value)
        found = self.save()
        for name, kept in found.items():
            if kept != value:
                raise BackendError(
                    f"{self.label} kept {name} = {kept!r} when it was set to {value!r}"
                )
        return found

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Write the values as they were."""
        for name, (_, setter) in self.paths.items():
            self._write(attribute(setter, self.label), saved[name])

    def describe(self) -> dict[str, Any]:
        """Return the switches as they are."""
        return self.save()
