"""Run a script where only NumPy and ml_dtypes can be imported, as on a machine without the extras.

The child process skips its site-packages (`-S`) and sees one folder with links to the two packages and to lowprec. So
neither an import, nor a look at the installed distributions, nor the linker's path finds OpenBLAS's package or numba
there.
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

#: In the name of a mapped file, the sign that an extra was loaded after all.
_LIBRARIES = ("scipy_openblas64/", "llvmlite")


def visible_extras() -> list[str]:
    """Return the extras that this process could use, by import or as an installed distribution."""
    installed = machine.versions(EXTRAS)
    return [name for name in EXTRAS if name in installed or importlib.util.find_spec(name)]


def loaded_extras() -> list[str]:
    """Return the extras that this process holds in memory; where the system does not tell, those that were imported."""
    maps = Path("/proc/self/maps")
    mapped = maps.read_text(encoding="utf-8") if maps.exists() else ""
    imported = {name for name in EXTRAS if name in sys.modules}
    return sorted(imported | {name for name in _LIBRARIES if name in mapped})


def run(arguments: Sequence[str]) -> int:
    """Run Python with these arguments where no extra can be found; return its exit status."""
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
