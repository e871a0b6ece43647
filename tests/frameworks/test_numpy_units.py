"""Libraries with units of their own, imported in a block: the functions of NumPy are theirs, inside and after it."""

import importlib.util
import sys

import pytest

from lowprec.backends.cpu import library
from support.programs import run_python

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or library.library() is None,
    reason="interception needs Linux and the compiled kernels",
)

ARRAYS = {
    "astropy": "from astropy import units; x = np.full((2, 2), 1.5) * units.m",
    "unyt": "import unyt; x = unyt.unyt_array(np.full((2, 2), 1.5), 'm')",
    "pint": "import pint; x = pint.UnitRegistry().Quantity(np.full((2, 2), 1.5), 'm')",
    "dask": "import dask.array; x = dask.array.ones((2, 2), chunks=1) * 1.5",
    "pandas": "import pandas; x = pandas.DataFrame(np.full((2, 2), 1.5))",
}
FUNCTIONS = """
functions = {
    "@": lambda x: x @ x, "dot": lambda x: np.dot(x, x), "ndarray.dot": lambda x: x.dot(x),
    "matmul": lambda x: np.matmul(x, x), "inner": lambda x: np.inner(x, x), "vdot": lambda x: np.vdot(x, x),
    "tensordot": lambda x: np.tensordot(x, x), "einsum": lambda x: np.einsum("ij,jk->ik", x, x),
    "einsum of one": lambda x: np.einsum("ii", x), "outer": lambda x: np.outer(x, x), "kron": lambda x: np.kron(x, x),
    "solve": lambda x: np.linalg.solve(x + x[::-1] * np.eye(2), x), "norm": np.linalg.norm, "cov": np.cov,
}

def results():
    found = {}
    for name, function in functions.items():
        try:
            y = function(x)
            y = y.compute() if hasattr(y, "compute") else y
            found[name] = f"{type(y).__name__} {y!r}"
        except Exception as error:
            found[name] = repr(error)
    return found
"""


@pytest.mark.parametrize("name", ARRAYS)
def test_functions_of_numpy_are_those_of_the_library(name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    run_python(
        f"""import warnings
import numpy as np
import lowprec.numpy
warnings.simplefilter("ignore")
{FUNCTIONS}
with lowprec.numpy.intercept("fp32", cast=True) as seen:
    {ARRAYS[name]}
    inside = results()
assert inside == results(), (inside, results())
assert seen.report().taken
"""
    )


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
def test_numba_compiles_in_a_block():
    code = """
        import numpy as np
        import lowprec.numpy
        x = np.full((4, 4), 1 + 2.0**-9, np.float32)
        with lowprec.numpy.intercept("bf16"):
            import numba
            function = numba.njit(lambda x: (x @ x, np.dot(x, x), np.linalg.inv(x + np.eye(4, dtype=x.dtype))))
            print(*(y[0, 0] for y in function(x)[:2]))
        print(function(x)[0][0, 0] > 4)
    """
    assert run_python(code).split() == ["4.0", "4.0", "True"]
