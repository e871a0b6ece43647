"""Import of numba; a failure, for example of a version that does not match NumPy, is a warning, never an error.

The import takes 0.3 s. It happens with the first plan that needs a kernel, or in a background thread if a kernel only
saves time.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from contextlib import suppress

from lowprec.errors import warn
from lowprec.policy import environment
from lowprec.policy.protocol import raised_in
from lowprec.util import forking

#: The module that uses most of numba's interfaces.
NATIVE = "lowprec.backends.cpu.packed.native"

#: Held during the import; a fork waits for it.
_importing = threading.RLock()
forking.register_lock(_importing)
_begun: list[threading.Thread] = []

#: Empty before the import; then one entry: the error, or an empty string after success.
_failure: list[str] = []


def is_installed() -> bool:
    """Return whether numba and llvmlite are installed, without importing them."""
    try:
        # Not a generator, whose deallocation would swallow an exception of a signal handler.
        return None not in map(importlib.util.find_spec, ("numba", "llvmlite"))
    except ValueError as error:  # a replacement module without a spec
        if not raised_in(error, "importlib.util"):
            raise
        return False


def failure() -> str:
    """Return the error of a failed import of numba; empty after success or before the import."""
    return _failure[0] if _failure else ""


def missing() -> str:
    """Return the reason why lowprec has no kernels of its own, with the remedy; empty if it has them."""
    if not is_installed():
        return 'numba is not installed (pip install "lowprec[cpu]")'
    return failure() or ("NUMBA_DISABLE_JIT is set" if environment.numba_is_off() else "")


def is_ready() -> bool:
    """Return whether numba has been imported and can compile lowprec's kernels."""
    return _failure == [""]


def begin() -> None:
    """Import numba in a background thread, once."""
    if not _begun:
        _begun.append(threading.Thread(target=fails, name="lowprec's import of numba"))
        with suppress(RuntimeError):  # no thread available
            _begun[0].start()


def fails() -> bool:
    """Import numba, and return whether that failed; the first failure is a warning."""
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
        # Reraise an exception of a signal handler. Missing interfaces of numba raise any of these errors.
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
