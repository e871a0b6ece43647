"""Parsers of option values, and the options that several commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from lowprec.core.rules import Rules, parse_rules
from lowprec.errors import LowprecError, did_you_mean
from lowprec.formats import OPERAND_DTYPES, DType, dtype_from_name
from lowprec.modes import Mode, mode_names, parse_mode
from lowprec.planning.gpus import model_names, parse_capability, parse_model
from lowprec.planning.selection import BOUNDS
from lowprec.util.strides import Shape

T = TypeVar("T")

#: A number with more digits may exceed a 64-bit integer.
_MOST_DIGITS = 18


def _named(read: Callable[[str], T], known: Collection[str] = ()) -> Callable[[str], T]:
    def named(text: str) -> T:
        try:
            return read(text)
        except LowprecError as error:
            raise argparse.ArgumentTypeError(f"{error}{did_you_mean(text, known)}") from None

    return named


def _device(text: str) -> str:
    if text == "cpu" or parse_capability(text):
        return text
    return parse_model(text).key


mode: Callable[[str], Mode] = _named(lambda text: parse_mode(text, what="mode"))
rules: Callable[[str], Rules] = _named(lambda text: parse_rules(text, what="mode"))
dtype: Callable[[str], DType] = _named(dtype_from_name, [str(x) for x in OPERAND_DTYPES])
#: The CPU, or the name of a GPU, present or not.
device: Callable[[str], str] = _named(_device)


def shape(text: str) -> Shape:
    words = text.lower().split("x")
    return tuple(_whole(word, text, "a shape; write one as 1024x512") for word in words)


def extents(text: str) -> Shape:
    """Read the extents of a product: N, or MxKxN."""
    extent = shape(text)
    if len(extent) not in (1, 3) or 0 in extent:
        what = "one extent (1024) or three (MxKxN, as 512x4096x512), of at least 1"
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return extent


def count(text: str) -> int:
    return _whole(text, text, "a whole number of at least 1", least=1)


def _whole(word: str, text: str, what: str, least: int = 0) -> int:
    is_number = word.isascii() and word.isdigit()
    if is_number and len(word) > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"a number of {len(word)} digits is too large")
    if not is_number or int(word) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(word)


def budget(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def listed(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return the parser of a list with commas, which keeps each value once."""
    return lambda text: tuple(dict.fromkeys(read(word.strip()) for word in text.split(",")))


#: Arguments of argparse's ``add_argument``, by option.
_SHARED: dict[str, dict[str, Any]] = {
    "--mode": {"type": mode, "help": f"math mode ({mode_names()}; default: the one in force)"},
    "--rtol": {
        "type": float,
        "metavar": "TOLERANCE",
        "help": "take the cheapest mode whose guaranteed error, relative to |A||B|, is within this",
    },
    "--bound": {
        "choices": BOUNDS,
        "metavar": "BOUND",
        "help": "error that --rtol limits: guaranteed (default), or probable: met with a probability of 0.999",
    },
    "--k-chunk": {
        "type": count,
        "metavar": "LENGTH",
        "help": "sum the product in pieces of the inner dimension of this length (default: the plan chooses)",
    },
    "--dtype": {
        "type": dtype,
        "help": "element type of the operands: convert to it, or take a file's raw elements as it (bfloat16)",
    },
    "--out-dtype": {"type": dtype, "metavar": "DTYPE", "help": "element type of the result"},
    "--seed": {
        "type": lambda text: _whole(text, text, "a whole number of at least 0"),
        "default": 0,
        "metavar": "N",
        "help": "of the random operands (default: 0)",
    },
    "--device": {
        "type": device,
        "metavar": "DEVICE",
        "help": f"plan for the CPU or an NVIDIA GPU, present or not: cpu, {model_names()}",
    },
    "--json": {"action": "store_true", "help": "print one JSON document instead"},
}


def add_shared(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add options that several commands share, by their names."""
    for name in names:
        parser.add_argument(name, **_SHARED[name])


def add_operands(parser: argparse.ArgumentParser) -> None:
    for name, role in (("a", "left"), ("b", "right")):
        words = f"{role} operand, as numpy.save writes it"
        parser.add_argument(name, metavar=f"{name.upper()}.npy", nargs="?", help=words)
