"""Generations of NVIDIA GPUs by name, for the emulation of their tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from enum import unique
from typing import ClassVar, TypeAlias

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
    def cores(self) -> tuple[int, int]:
        """The compute capability of its tensor cores."""
        return self.capability

    @property
    def label(self) -> str:
        return str(self.value).capitalize()


@dataclass(frozen=True, kw_only=True)
class TensorCore:
    """The sums of a tensor core, also of one that does not exist.

    An ``arch`` of :func:`lowprec.emulation.mma`, and the argument of :class:`lowprec.emulate`.

    Parameters
    ----------
    group : int
        Products that are added to the accumulator at once, from 1 to 128.
    fraction_bits : int
        Bits below the largest exponent of a group that terms keep, from 1 to 35.
    result_bits : int
        Fraction bits of a sum that remain, from 1 to 23.
    least_exponent : int
        The exponent to which terms are aligned at least, from -149 to 0.
    adds_after : bool
        Whether the accumulator is not one of the terms, but is added to their sum, to nearest.

    Raises
    ------
    SettingError
        A number is out of its range.

    Examples
    --------
    >>> import numpy as np
    >>> from lowprec.emulation import TensorCore, mma
    >>> x = np.full((1, 8), 2.0**-6, np.float32)
    >>> one = np.ones((1, 1), np.float32)
    >>> [float(mma(x, x.T, one, arch=TensorCore(group=8, fraction_bits=f), format="e4m3")[0, 0]) for f in (11, 12)]
    [1.0, 1.001953125]
    """

    group: int
    fraction_bits: int
    result_bits: int = 23
    least_exponent: int = -133
    adds_after: bool = False

    def __post_init__(self) -> None:
        ranges = {
            "group": (1, 128),
            "fraction_bits": (1, 35),
            "result_bits": (1, 23),
            "least_exponent": (-149, 0),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise SettingError(
                    f"{name} of a tensor core is an integer from {low} to {high}, got {quoted(value)}"
                )

    #: Whose schedules of products modes have: those of GPUs with FP8 and without scales of blocks.
    capability: ClassVar[tuple[int, int]] = (8, 9)
    label: ClassVar[str] = "TensorCore"

    @property
    def cores(self) -> TensorCore:
        return self

    def __str__(self) -> str:
        return "tensor_core"


#: Tensor cores whose sums are known: those of a compute capability, or a model; and those that the CPU emulates.
Cores: TypeAlias = tuple[int, int] | TensorCore
Emulated: TypeAlias = Architecture | TensorCore


def parse_architecture(name: str | Emulated) -> Emulated:
    """Return the architecture of this name, in any case, or a model; raise SettingError if there is none."""
    if isinstance(name, TensorCore):
        return name
    if isinstance(name, str):
        for architecture in Architecture:
            if architecture.value == name.strip().lower():
                return architecture
    raise SettingError(
        f"the tensor cores of architecture {quoted(name)} are not emulated; choose one of: {', '.join(Architecture)}"
        f"{did_you_mean(name, map(str, Architecture))}"
    )
