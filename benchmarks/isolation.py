"""Run a script where only NumPy and ml_dtypes can be imported, as on a machine without the extras.

The child process skips its site-packages (`-S`) and sees one folder with links to the two packages and to lowprec. So
neither an import, nor a look at the installed distributions, nor the linker's path finds MKL or numba there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CORE = ("numpy", "ml_dtypes")
EXTRAS = ("mkl", "numba")

#: In the name of a mapped file, the sign that an extra was loaded after all.
_LIBRARIES = ("libmkl", "llvmlite", "mkl_rt")


def visible_extras() -> list[str]:
    """Return the extras that this process could use, by import or as an installed distribution."""
    return [name for name in EXTRAS if importlib.util.find_spec(name) or _is_distribution(name)]


def _is_distribution(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def loaded_extras() -> list[str]:
    """Return the extras that this process holds in memory; where the system does not tell, those that were imported."""
    found = {name for name in EXTRAS if name in sys.modules}
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return sorted(found)
    return sorted(found | {name for name in _LIBRARIES if name in maps})


def _links(folder: Path) -> None:
    for name in CORE:
        distribution = importlib.metadata.distribution(name)
        site = Path(str(distribution.locate_file("")))
        for top in {f.parts[0] for f in distribution.files or ()} - {"..", "__pycache__"}:
            (folder / top).symlink_to(site / top)
    spec = importlib.util.find_spec("lowprec")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("lowprec is not installed here: pip install -e .")
    (folder / "lowprec").symlink_to(Path(spec.submodule_search_locations[0]).resolve())


def run(arguments: Sequence[str]) -> int:
    """Run Python with these arguments where no extra can be found; return its exit status."""
    with tempfile.TemporaryDirectory(prefix="lowprec-core-") as name:
        _links(Path(name))
        environment = {**os.environ, "PYTHONPATH": name, "PYTHONNOUSERSITE": "1"}
        return subprocess.run(
            [sys.executable, "-S", *arguments], env=environment, check=False
        ).returncode
