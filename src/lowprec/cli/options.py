"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from lowprec.errors import LowprecError
from lowprec.formats import OPERAND_DTYPES, DType, dtype_from_name
from lowprec.modes import ALIASES, MathMode, available_modes, mode_names, parse_mode

__all__ = [
    "add_budget",
    "add_dtype",
    "add_json",
    "add_mode",
    "add_operands",
    "add_rtol",
    "add_seed",
    "count",
    "did_you_mean",
    "dtype",
    "listed",
    "mode",
    "shape",
]

T = TypeVar("T")

#: Numbers beyond this fit into no 64-bit integer.
_MOST_DIGITS = 18


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """Return a question to be added to a message; empty where no name is like the text.

    Examples
    --------
    >>> did_you_mean("chek", ["check", "bench"])
    "; did you mean 'check'?"
    """
    similar = difflib.get_close_matches(text.lower(), names, n=1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def mode(text: str) -> MathMode:
    """Read a math mode or an alias."""
    try:
        return parse_mode(text, what="mode")
    except LowprecError as error:
        similar = did_you_mean(text, [*map(str, available_modes()), *ALIASES])
        raise argparse.ArgumentTypeError(f"{error}{similar}") from None


def dtype(text: str) -> DType:
    """Read an element type."""
    try:
        return dtype_from_name(text)
    except LowprecError as error:
        similar = did_you_mean(text, map(str, OPERAND_DTYPES))
        raise argparse.ArgumentTypeError(f"{error}{similar}") from None


def shape(text: str) -> tuple[int, ...]:
    """Read a shape.

    Examples
    --------
    >>> shape("8x128x64"), shape("16")
    ((8, 128, 64), (16,))
    """
    words = text.lower().split("x")
    return tuple(_whole(word, text, "a shape; write one as 1024x512") for word in words)


def count(text: str) -> int:
    """Read a number of at least one."""
    what = "a whole number of at least 1"
    number = _whole(text, text, what)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return number


def _seed(text: str) -> int:
    return _whole(text, text, "a whole number of at least 0")


def _whole(word: str, text: str, what: str) -> int:
    """Read a number without a sign, which is a part of the text that a message shows."""
    if not (word.isascii() and word.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    if len(word) > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"a number of {len(word)} digits is too large")
    return int(word)


def _rtol(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number; a relative tolerance is written as 1e-3"
        ) from None


def listed(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return the reader of a list with commas.

    Examples
    --------
    >>> listed(count)("256,1024")
    (256, 1024)
    """

    def read_all(text: str) -> tuple[T, ...]:
        words = [word.strip() for word in text.split(",")]
        # In order, each once.
        return tuple(dict.fromkeys(read(word) for word in words))

    return read_all


def add_operands(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add ``A.npy B.npy``."""
    for name, role in (("a", "left"), ("b", "right")):
        parser.add_argument(
            name,
            metavar=f"{name.upper()}.npy",
            nargs=None if required else "?",
            help=f"{role} operand, as numpy.save writes it",
        )


def add_mode(parser: argparse.ArgumentParser) -> None:
    """Add ``--mode``."""
    parser.add_argument(
        "--mode",
        type=mode,
        help=f"math mode for float32 and complex64 operands ({mode_names()}; default: the one in force)",
    )


def add_rtol(parser: argparse.ArgumentParser) -> None:
    """Add ``--rtol``."""
    parser.add_argument(
        "--rtol",
        type=_rtol,
        metavar="TOLERANCE",
        help="take the cheapest mode whose guaranteed error, relative to |A||B|, is within this",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add ``--dtype``."""
    parser.add_argument(
        "--dtype",
        type=dtype,
        help="element type of the operands: convert to it, or take a file's raw elements as it (bfloat16)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def add_seed(parser: argparse.ArgumentParser) -> None:
    """Add ``--seed``."""
    parser.add_argument("--seed", type=_seed, default=0, help="of the random operands (default: 0)")


def add_budget(parser: argparse.ArgumentParser, default: float, what: str) -> None:
    """Add ``--budget``."""
    parser.add_argument(
        "--budget",
        type=_budget,
        default=default,
        metavar="SECONDS",
        help=f"begin no new round of samples of a {what} after this, once three are done (default: {default:g})",
    )


def _budget(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value
