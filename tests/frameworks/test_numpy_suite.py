"""NumPy's own tests of ``numpy.matmul``, run on ``lowprec.matmul``.

The class comes from the installed NumPy, with every module-level use of ``np.matmul`` replaced and
the element types restricted to those that both libraries have. Tests that cannot apply are in
``EXCLUDED`` with its reason, and have to fail.
"""

import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import lowprec

test_multiarray = pytest.importorskip(
    "numpy._core.tests.test_multiarray", reason="this NumPy was installed without its tests"
)

#: Tests of NumPy's that cannot hold here, and why.
EXCLUDED = {
    "test_out_arg": "casts float64 results into a complex128 out, and expects the words of a ufunc for int32",
    "test_empty_out": "expects NumPy's word non-broadcastable for an out of another shape",
    "test_matmul_object": "multiplies Python objects",
    "test_matmul_object_type_scalar": "multiplies Python objects",
    "test_matmul_empty": "multiplies Python objects, if none",
    "test_matmul_bool": "multiplies bool and nothing else",
}


class Calls:
    """``numpy.matmul`` as NumPy's tests call it: ``out`` by position, and a few steps with bool on the side."""

    def __init__(self, *, accept_bool):
        self.count = 0
        self._accept_bool = accept_bool

    def matmul(self, a, b, out=None):
        if self._accept_bool and a.dtype == b.dtype == bool:
            return np.matmul(a, b, out=out)
        result = lowprec.matmul(a, b, out=out)
        self.count += 1
        return result


class NumPyWith(types.ModuleType):
    """NumPy with another ``matmul``."""

    def __init__(self, calls):
        super().__init__("numpy")
        self.matmul = calls.matmul

    def __getattr__(self, name):
        return getattr(np, name)


class TestNumPysMatmul(test_multiarray.TestMatmul):
    # The tests leave out the first type, bool in the original, where its results differ.
    types = "e" + "efdFD"

    @pytest.fixture(autouse=True)
    def in_place_of_numpys(self, request, monkeypatch):
        name = request.node.originalname
        calls = Calls(accept_bool=name not in EXCLUDED)
        monkeypatch.setattr(test_multiarray, "np", NumPyWith(calls))
        self.matmul = calls.matmul
        yield
        exceptions_alone = {
            "test_exceptions",
            "test_matmul_exception_multiply",
            "test_matmul_exception_add",
        }
        assert calls.count or name in exceptions_alone | EXCLUDED.keys(), (
            "lowprec computed nothing in this test"
        )


for _name, _why in EXCLUDED.items():
    _fails = pytest.mark.xfail(
        reason=_why, raises=(lowprec.LowprecError, AssertionError), strict=True
    )
    setattr(TestNumPysMatmul, _name, _fails(getattr(test_multiarray.TestMatmul, _name)))


#: NumPy's test files that multiply, and the tests that take long.
FILES = ["numpy.linalg.tests.test_linalg", "numpy.matrixlib", "numpy._core.tests.test_einsum"]
DESELECTED = "not openblas_threading and not slow"


@pytest.mark.sweep
def test_numpys_test_files_pass_inside_the_block(tmp_path):
    options = ["-q", "-p", "numpy_scope", "-p", "no:cacheprovider", "-c", "/dev/null"]
    options += ["--rootdir", str(tmp_path), "-k", DESELECTED, "-m", "not slow", "--pyargs", *FILES]
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    code = (
        f"import sys; sys.path[:0] = {paths!r}; import pytest; sys.exit(pytest.main({options!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 400
    assert int(re.search(r"taken: (\d+)", done.stdout)[1]) > 500
