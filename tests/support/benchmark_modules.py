"""Modules of `benchmarks/` and `docs/`, imported for one test."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

Load = Callable[[str], ModuleType]


@contextmanager
def imports(*folders: Path) -> Iterator[Load]:
    """Put `benchmarks/` and other folders on the path; forget their modules and variable at the end."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_THREAD_TIMEOUT", os.environ.get("OPENBLAS_THREAD_TIMEOUT", "4"))
        for folder in (BENCHMARKS, *folders):
            patch.syspath_prepend(folder)
        yield importlib.import_module
    own = {path.stem for folder in (BENCHMARKS, *folders) for path in folder.glob("*.py")} | {"gpu"}
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in own:
            del sys.modules[name]
            package, _, module = name.rpartition(".")
            # of a run by the report itself, which has imported it before
            if package in sys.modules:
                vars(sys.modules[package]).pop(module, None)
