"""Subinterpreters are refused, before NumPy is imported: it refuses some of them with a message of its own."""

from __future__ import annotations

import ctypes

from lowprec.errors import BackendError

# PyGILState calls deadlock in a subinterpreter.
_current, _main = (ctypes.pythonapi[f"PyInterpreterState_{name}"] for name in ("Get", "Main"))
_current.restype = _main.restype = ctypes.c_void_p
if _current() != _main():
    raise BackendError(
        "lowprec cannot be imported in a subinterpreter; import it in the main one (with mod_wsgi, "
        "WSGIApplicationGroup %{GLOBAL})"
    )
