"""Import of numba, which fails where numba does not fit NumPy or LLVM; a failure costs one warning, never a product.

The import takes 0.3 s. It happens with the first plan that uses a kernel, or in a thread where it only saves time.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from contextlib import suppress

from lowprec.errors import warn
from lowprec.policy.interrupts import raised_in
from lowprec.util import forking

#: The module that uses most of numba's interfaces.
NATIVE = "lowprec.backends.cpu.packed.native"

#: Held while it is imported; a fork waits for that.
_importing = threading.RLock()
forking.register_lock(_importing)
_begun: list[threading.Thread] = []

#: ReasonKind it failed, an empty string if it went well; at most one entry.
_failure: list[str] = []


def is_installed() -> bool:
    """Return whether numba and its LLVM are here; neither is imported for that."""
    try:
        # No generator: an interrupt that strikes as one is thrown away would be lost.
        return None not in map(importlib.util.find_spec, ("numba", "llvmlite"))
    except ValueError as error:  # a module that replaces it
        if not raised_in(error, "importlib.util"):
            raise
        return False


def failure() -> str:
    """Return why numba could not be imported; empty if it was imported or not tried."""
    return _failure[0] if _failure else ""


def is_ready() -> bool:
    """Return whether numba has been imported and compiles lowprec's kernels."""
    return _failure == [""]


def begin() -> None:
    """Import numba in a thread of its own, once."""
    if not _begun:
        _begun.append(threading.Thread(target=fails, name="lowprec's import of numba"))
        with suppress(RuntimeError):  # the system has no thread to give
            _begun[0].start()


def fails() -> bool:
    """Import numba, and return whether that fails; the first failure is a warning."""
    if _failure:
        return bool(_failure[0])
    with _importing:
        return bool(_failure[0]) if _failure else _import()


def _import() -> bool:
    try:
        for name in ("llvmlite.binding", "numba", NATIVE):
            importlib.import_module(name)
        sys.modules[NATIVE].try_compiler()
    except Exception as error:
        # A signal handler's exception is none of numba's, whose interfaces may be missing in any version.
        if not isinstance(error, (ImportError, AttributeError)) and not raised_in(
            error, "ctypes", "llvmlite", "numba", "lowprec.backends.cpu.packed"
        ):
            raise
        did = "cannot be imported" if name != NATIVE else "cannot compile lowprec's kernels"
        _failure[:] = [f"numba is installed but {did} ({error})"]
        warn(f"{_failure[0]}; products run without lowprec's own kernels, more slowly: repair or uninstall it")
        return True
    _failure[:] = [""]
    return False
