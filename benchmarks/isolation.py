"""Run a script where only NumPy and ml_dtypes can be imported, as on a machine without the extras.

The child process skips its site-packages (`-S`) and has one folder with links to the two packages and to lowprec, so
that imports, installed distributions and the linker's path do not include OpenBLAS's package and numba.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import machine

CORE = ("numpy", "ml_dtypes")
EXTRAS = ("scipy_openblas64", "numba")

#: Parts of the names of mapped files that show that an extra is loaded.
_LIBRARIES = ("scipy_openblas64/", "llvmlite")


def visible_extras() -> list[str]:
    """Return the extras available to this process, by import or as an installed distribution."""
    installed = machine.versions(EXTRAS)
    return [name for name in EXTRAS if name in installed or importlib.util.find_spec(name)]


def loaded_extras() -> list[str]:
    """Return the extras mapped into this process; where the system does not report these, the imported ones."""
    maps = Path("/proc/self/maps")
    mapped = maps.read_text(encoding="utf-8") if maps.exists() else ""
    imported = {name for name in EXTRAS if name in sys.modules}
    return sorted(imported | {name for name in _LIBRARIES if name in mapped})


def run(arguments: Sequence[str]) -> int:
    """Run Python with these arguments without the extras; return its exit status."""
    import lowprec

    with tempfile.TemporaryDirectory(prefix="lowprec-core-") as name:
        folder = Path(name)
        for distribution in map(metadata.distribution, CORE):
            site = Path(str(distribution.locate_file("")))
            for top in {f.parts[0] for f in distribution.files or ()} - {"..", "__pycache__"}:
                (folder / top).symlink_to(site / top)
        (folder / "lowprec").symlink_to(Path(lowprec.__path__[0]).resolve())
        environment = {**os.environ, "PYTHONPATH": name, "PYTHONNOUSERSITE": "1"}
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(command, env=environment, check=False).returncode
