"""Generations of NVIDIA GPUs by name, for the emulation of their tensor cores."""

from __future__ import annotations

from enum import unique

from lowprec.errors import SettingError, did_you_mean, quoted
from lowprec.util.plain import StrEnum


@unique
class Architecture(StrEnum):
    """Generations whose tensor cores can be emulated; ``Architecture.HOPPER`` equals the string ``"hopper"``.

    Each member is a row: its name, and the first compute capability of the generation (CUDA C++ Programming Guide,
    *Compute Capabilities*).
    """

    VOLTA = ("volta", (7, 0))
    AMPERE = ("ampere", (8, 0))
    ADA = ("ada", (8, 9))
    HOPPER = ("hopper", (9, 0))
    BLACKWELL = ("blackwell", (10, 0))

    capability: tuple[int, int]

    def __new__(cls, name: str, capability: tuple[int, int]) -> Architecture:
        member = str.__new__(cls, name)
        member._value_ = name
        member.capability = capability
        return member

    @property
    def label(self) -> str:
        return str(self.value).capitalize()


def parse_architecture(name: str | Architecture) -> Architecture:
    """Return the architecture of this name, in any case; raise SettingError if there is none."""
    if isinstance(name, str):
        for architecture in Architecture:
            if architecture.value == name.strip().lower():
                return architecture
    raise SettingError(
        f"the tensor cores of architecture {quoted(name)} are not emulated; choose one of: {', '.join(Architecture)}"
        f"{did_you_mean(name, map(str, Architecture))}"
    )
