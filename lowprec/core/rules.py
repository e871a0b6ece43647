"""Rules: an ordered list of patterns of layers, classes, functions or routines, each with the mode of their products.

The first rule that matches a product is used. A pattern is a name with wildcards, as of `fnmatch`, of a layer, or the
exact name of a class, function or routine. The empty pattern is that of products without a layer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from lowprec.errors import ModeError, quoted
from lowprec.modes import Mode, ModeLike, parse_mode
from lowprec.util.texts import split_at_commas

#: Pairs of a pattern and a mode.
Rules: TypeAlias = tuple[tuple[str, Mode], ...]
#: A mode of all products, or rules: a mapping, pairs, ``"head=fp32,*=nvfp4"``, or the path of a TOML file.
RulesLike: TypeAlias = (
    ModeLike | Mapping[Any, ModeLike] | Sequence[tuple[Any, ModeLike]] | str | os.PathLike[str]
)
#: (name, class or function) of each layer that a product may belong to; empty if it is unknown.
Layer: TypeAlias = tuple[tuple[str, str], ...]

ALL = "*"
#: Routines that keep their precision unless a rule names them: products of two vectors, and those inside solvers.
KEPT = frozenset(["dot", "ger", "lapack"])
_UNKNOWN: Layer = (("", ""),)

#: PATTERN=MODE; a colon is part of a format.
_ITEM = re.compile(r"\s*([^=(:]*?)\s*=(.+)", re.DOTALL)


def parse_rules(given: RulesLike, what: str = "math_mode") -> Rules:
    """Return the rules of a mode, a mapping, pairs, a text or a TOML file.

    Raises
    ------
    ModeError
        A pattern or a mode is illegal, there is no rule, or the file cannot be read; ``what`` begins the message.
    """
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".toml")):
        given = _of_file(os.fspath(given))
    elif isinstance(given, str):
        given = _of_text(given, what)
    if isinstance(given, Mapping):
        given = list(given.items())
    elif not isinstance(given, list | tuple):
        return ((ALL, parse_mode(given, what)),)  # type: ignore[arg-type]
    if not given:
        raise ModeError(f"{what} has no rule; give a mode, or patterns with their modes")
    return tuple(_rule(each) for each in given)


def _rule(pair: Any) -> tuple[str, Mode]:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise ModeError(f"a rule is a pair of a pattern and a mode, got {quoted(pair)}")
    key, mode = pair
    pattern = key if isinstance(key, str) else getattr(key, "__name__", None)
    if not isinstance(pattern, str):
        raise ModeError(
            f"the pattern of a rule is a name, a class or a function, got {quoted(key)}"
        )
    return pattern, parse_mode(mode, f"the mode of {pattern!r},")


def _of_text(text: str, what: str) -> Any:
    """Return the pairs of ``PATTERN=MODE,...``, or the text of a mode."""
    items = split_at_commas(text)
    found = [_ITEM.fullmatch(item) for item in items]
    if not any(found):
        return text
    for item, match in zip(items, found, strict=True):
        if match is None:
            raise ModeError(f"{what} {quoted(text)}: {quoted(item)} is not PATTERN=MODE")
    return [match.groups() for match in found if match]


def _of_file(path: str) -> Any:
    try:
        import tomllib
    except ImportError:
        raise ModeError(f"{path}: TOML files need Python 3.11; give PATTERN=MODE,...") from None
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModeError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    found = tables.get("rules")
    if not isinstance(found, dict):
        raise ModeError(f"{path} has no table [rules]")
    return found


def first_match(rules: Rules, layer: Layer, routine: str = "") -> Mode | None:
    """Return the mode of a product: of the first rule that matches a layer's name, its class, or the routine."""
    for pattern, mode in rules:
        if pattern == routine:
            return mode
        if routine in KEPT and not pattern.strip(ALL):
            continue
        for name, kind in layer or _UNKNOWN:
            if pattern == kind or fnmatchcase(name, pattern):
                return mode
    return None


def names(rules: Rules, routine: str) -> bool:
    """Whether a rule names a routine, or the products without a layer."""
    return any(pattern in ("", routine) for pattern, _ in rules)


def shown(rules: Rules) -> str:
    """Return rules as Python's text of a mode or a mapping."""
    found = {pattern: str(mode) for pattern, mode in rules}
    return repr(found[ALL] if list(found) == [ALL] else found)
