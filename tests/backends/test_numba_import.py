"""A numba that is installed and cannot be imported: one warning, and the products are those without it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from lowprec.backends.cpu import numba_import
from support.programs import run_python

pytestmark = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")

_PROGRAM = """
import sys, warnings
import numpy as np, ml_dtypes
import lowprec

seen = []
warnings.showwarning = lambda message, *rest, **more: seen.append(str(message))
warnings.simplefilter("always")
rng = np.random.default_rng(0)
for shapes in (((300, 290), (290, 280)), ((600, 600), (600, 1)), ((8, 8), (8, 8))):
    a, b = (rng.standard_normal(s, dtype=np.float32) for s in shapes)
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        for mode in ("tf32", "bf16", "fp16"):
            x, y = a.astype(dtype), b.astype(dtype)
            got = lowprec.matmul(x, y, math_mode=mode, out_dtype=np.float32)
            exact = x.astype(np.float64) @ y.astype(np.float64)
            scale = np.linalg.norm(x.astype(np.float64)) * np.linalg.norm(y.astype(np.float64))
            plan = lowprec.plan(x, y, math_mode=mode, out_dtype=np.float32)
            assert np.linalg.norm(got - exact) <= plan.bound.relative * scale, (shapes, dtype, mode)
    i, j = (rng.integers(-128, 128, s, dtype=np.int8) for s in shapes)
    assert np.array_equal(lowprec.matmul(i, j), i.astype(np.int64) @ j.astype(np.int64))
assert "numba" not in sys.modules
kernels = {lowprec.plan(np.ones(s, np.float32), np.ones(t, np.float32), math_mode=mode).kernel
           for s, t in (((512, 512), (512, 512)), ((600, 600), (600, 1))) for mode in ("tf32", "bf16")}
print(len(seen), *seen, kernels <= {"openblas", "numpy"}, kernels)
"""


@pytest.mark.parametrize("failure", ['raise ImportError("Numba needs NumPy 1.0 or less")', "import a_missing_module"])
def test_products_fall_back_with_one_warning(tmp_path: Path, failure: str) -> None:
    package = tmp_path / "numba"
    package.mkdir()
    (package / "__init__.py").write_text(failure + "\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = run_python(_PROGRAM, PYTHONPATH=path)
    assert found.startswith("1 numba is installed but cannot be imported ("), found
    assert " True " in found, found


@pytest.mark.parametrize("lost", ["compiler.compile_extra", "registry.cpu_target", "cgutils.alloca_once"])
@pytest.mark.sampled(2)
def test_an_interface_that_numba_lacks_costs_a_warning_and_the_kernels(lost: str, tmp_path: Path) -> None:
    module, name = lost.split(".")
    program = f"""
import warnings
import numba.core.{module} as module
del module.{name}
seen = []
warnings.showwarning = lambda message, *rest, **more: seen.append(str(message))
import numpy as np, lowprec
a = np.ones((300, 300), np.float32)
for mode in ("tf32", "bf16", "bf16"):
    assert (lowprec.matmul(a, a, math_mode=mode) == 300).all()
assert lowprec.plan(a, a, math_mode="bf16").kernel in ("openblas", "numpy")
with lowprec.emulate("hopper"):
    assert (lowprec.matmul(a[:8, :8], a[:8, :8], math_mode="fp16") == 8).all()
(warning,) = seen
assert "{name}" in warning, warning
assert any("{name}" in x for x in lowprec.info()["warnings"])
"""
    run_python(program, LOWPREC_CACHE_DIR=str(tmp_path))


def test_exceptions_of_handlers_are_no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise TimeoutError("of a handler")

    monkeypatch.setattr(numba_import, "_failure", [])
    monkeypatch.setattr(numba_import.importlib, "import_module", interrupted)
    with pytest.raises(TimeoutError, match="of a handler"):
        numba_import.fails()
    assert numba_import.failure() == ""


def test_an_empty_module_named_numba_is_ignored() -> None:
    """Test suites of others insert one; it has no spec."""
    program = """
import sys, types
sys.modules["numba"] = types.ModuleType("numba")
import numpy as np, lowprec
a = np.ones((300, 300), np.float32)
for mode in ("fp32", "tf32", "bf16", "bf16x3"):
    assert (lowprec.matmul(a, a, math_mode=mode) == 300).all()
with lowprec.emulate("hopper"):
    assert (lowprec.matmul(a[:8, :8], a[:8, :8], math_mode="fp16") == 8).all()
"""
    run_python(program, warn="error")
