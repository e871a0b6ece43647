"""lowprec's own copy of OpenBLAS, from the package ``scipy-openblas64``, called through CBLAS.

Its symbols have a prefix, so it does not interfere with the copies of NumPy and SciPy. It runs single-threaded in
lowprec's threads, which share the panels of a product; the bits do not depend on their number. ``OPENBLAS_CORETYPE`` is
set while the library is loaded, so that neither the user's value nor an old release selects slower kernels.

Source: OpenBLAS's documentation, "Runtime variables"; the reference CBLAS, ``cblas.h``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
import threading
from pathlib import Path

import numpy as np

from lowprec.backends.cpu import cpuinfo, threads
from lowprec.backends.cpu.blas_calls import OpenBlas
from lowprec.policy import environment
from lowprec.policy.protocol import raised_in
from lowprec.util.lock import locked

_PACKAGE = "scipy_openblas64"

#: Kernels for AVX-512, and older kernels that an OpenBLAS may select on a newer processor.
AVX512 = "SkylakeX"
BELOW_AVX512 = ("Haswell", "Zen", "Sandybridge", "Nehalem", "Prescott", "Katmai")

#: Instruction sets required by the kernels of each name.
_CORE_TYPES = (
    (AVX512, frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})),
    ("Haswell", frozenset({"avx2", "fma"})),
)

#: Kernels if AVX2 is hidden.
_BELOW_AVX2 = "Nehalem"

#: Address space for loading the library, and for each thread of a product (buffer, stack and arena of a new thread). A
#: failed allocation in OpenBLAS ends the process.
_LIBRARY_BYTES, _THREAD_BYTES = 144 << 20, 112 << 20


def core_type(flags: frozenset[str]) -> str | None:
    """Return the name of the best kernels for a processor with these flags; None if OpenBLAS chooses.

    Examples
    --------
    >>> core_type(frozenset({"avx2", "fma", "sse2"})), core_type(frozenset({"asimd"}))
    ('Haswell', None)
    """
    return next((name for name, needed in _CORE_TYPES if needed <= flags), None)


def library_path() -> str | None:
    """Return the path of the package's library, without importing the package."""
    # On macOS NumPy uses Apple's Accelerate, which is faster than OpenBLAS.
    if sys.platform == "darwin":
        return None
    try:
        spec = importlib.util.find_spec(_PACKAGE)
    except ValueError as error:  # the module is blocked
        if not raised_in(error, "importlib.util"):
            raise
        return None
    folders = (spec and spec.submodule_search_locations) or []
    names = ("libscipy_openblas64_.so", "libscipy_openblas64_.dll")
    paths = [Path(folder, "lib", name) for folder in folders for name in names]
    found = [os.path.realpath(path) for path in paths if path.is_file()]
    return found[0] if found else None


#: The library by path, None if it is unavailable.
_opened: dict[str, OpenBlas | None] = {}
#: Paths of libraries that lowprec has loaded, or started to load, in this process.
_ours: set[str] = set()


class _Local(threading.local):
    is_unlimited = False  # determined at the thread's first product


_local = _Local()


def has_memory(nbytes: int | None = None) -> bool:
    """Whether the process may use so much more address space, by default that of a product."""
    if nbytes is None and _local.is_unlimited:
        return True
    if not _is_limited():
        _local.is_unlimited = True
        return True
    try:
        # Reserved and released without touching a page.
        np.empty(_THREAD_BYTES * threads.num_threads() if nbytes is None else nbytes, np.uint8)
    except MemoryError:
        return False
    return True


def _is_limited() -> bool:
    if sys.platform == "win32":
        return False
    try:
        import resource  # fails if memory is too limited to load it
    except ImportError:
        return True
    limits = map(resource.getrlimit, (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return any(soft != resource.RLIM_INFINITY for soft, _ in limits)


def _load(path: str) -> OpenBlas | None:
    # A library that another package loaded, such as a NumPy built with it, may have other threads and kernels.
    if (path not in _ours and threads.loaded(path)) or not has_memory(_LIBRARY_BYTES):
        return None
    # Its single thread does not limit the threads of a product.
    threads.ignore_library(path)
    variables = {"OPENBLAS_NUM_THREADS": "1"}
    best = core_type(cpuinfo.cpu_flags())
    if best is None and cpuinfo.hidden_flags():
        best = _BELOW_AVX2
    if best is not None:
        variables["OPENBLAS_CORETYPE"] = best
    _ours.add(path)
    with environment.c_variables(variables):
        library = ctypes.CDLL(path)
    return OpenBlas(library, path)


@functools.cache
def openblas() -> OpenBlas | None:
    """Return the library, opened once; ``None`` if it is not available."""
    path = library_path()
    if path is None:
        return None
    return locked(_open, path)  # a fork waits until the environment variables are restored


def _open(path: str) -> OpenBlas | None:
    if path not in _opened:
        _opened[path] = _load(path)
    return _opened[path]


def loaded_openblas() -> OpenBlas:
    """Return the library for a plan that requires it."""
    library = openblas()
    assert library is not None
    return library
