"""What ``lowprec run`` has Python do before the program: watch for libraries that have switches of their own.

Python imports it because its folder leads ``PYTHONPATH``. It runs in every Python process below ``lowprec run``, also
of other versions and environments, so it needs nothing but the interpreter. It is light: lowprec itself is imported
only once such a library has come, whose own import takes longer by far.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # The typing module is not loaded for it.
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

#: The modules for which ``lowprec.cli.switches`` knows switches. A copy, which a test compares: looking them up
#: would import lowprec, and NumPy with it, in front of every program.
LIBRARIES = ("torch", "jax", "tensorflow", "cupy", "paddle")


class Watcher:
    """A finder that finds nothing itself, and sees to it that a library's switches are set right after its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return what the other finders return, prepared."""
        # A target means importlib.reload: the switches are set, or the program has changed them since.
        if name not in LIBRARIES or target is not None:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec: ModuleSpec | None = finder.find_spec(name, path, target)
                if spec is not None:
                    # A folder that merely bears the name has no origin.
                    if spec.loader is not None and spec.origin is not None:
                        _call_after_exec(spec.loader, name)
                    return spec
        return None


def _call_after_exec(loader: Any, name: str) -> None:
    exec_module = loader.exec_module

    def exec_and_set(module: Any) -> None:
        exec_module(module)
        # A loader may serve several modules, as that of a zip file does.
        if module.__name__ == name:
            _set_switches(name)

    # Under the name of the import system's own file Python leaves it out of the tracebacks of a failed import.
    exec_and_set.__code__ = exec_and_set.__code__.replace(co_filename=_IMPORTLIB)
    loader.exec_module = exec_and_set


_IMPORTLIB = "<frozen importlib._bootstrap>"


def _set_switches(name: str) -> None:
    try:
        from lowprec.cli.switches import set_switches
    except Exception as error:  # noqa: BLE001 - whatever it is, the program's import must not fail by it
        _tell(name, f"lowprec cannot be imported here: {error}")
        return
    for reason in set_switches(name):
        _tell(name, reason)


def _tell(name: str, reason: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"lowprec run: {name} keeps its own switches: {reason}\n")


def _import_the_users() -> None:
    """Import the ``sitecustomize`` that would have been imported without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if folder != here]
    own = sys.modules.pop(__name__)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = own


sys.meta_path.insert(0, Watcher())
_import_the_users()
