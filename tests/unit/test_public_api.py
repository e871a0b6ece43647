"""The public names, their docstrings and examples."""

import importlib
import inspect

import pytest

import lowprec
from support.programs import run_python

NAMES = lowprec.__all__

ERRORS = [name for name in NAMES if name.endswith("Error")]


def test_the_names_are_sorted_and_all_there():
    """`test_torch_uncompiled` lists them."""
    assert sorted(NAMES) == NAMES
    assert dir(lowprec) == sorted([*NAMES, "dask", "jax", "numpy", "torch"])
    assert all(hasattr(lowprec, name) for name in NAMES)
    extra = {
        n for n, v in vars(lowprec).items() if not n.startswith("_") and not inspect.ismodule(v)
    }
    assert extra - set(NAMES) <= {"annotations"}


@pytest.mark.parametrize("name", ["amp", "dask", "emulation", "jax", "numpy", "testing", "torch"])
def test_dir_shows_the_public_names(name):
    if name in {"dask", "jax", "torch"}:
        pytest.importorskip(name)
    module = importlib.import_module(f"lowprec.{name}")
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, each) for each in module.__all__)


@pytest.mark.parametrize("module", ["", ".amp", ".checking", ".emulation", ".linalg", ".profiling"])
def test_first_lines_are_short_and_examples_shown(module):
    public = importlib.import_module(f"lowprec{module}")
    items = {
        name: getattr(public, name) for name in public.__all__ if callable(getattr(public, name))
    }
    # The examples run with those of the documentation.
    assert {name for name, x in items.items() if ">>> " not in (inspect.getdoc(x) or "")} == set()
    for name, item in list(items.items()):
        if inspect.isclass(item):
            items |= {
                f"{name}.{key}": x
                for key, x in vars(item).items()
                if not key.startswith("_") and x.__doc__
            }
    long = {
        name for name, x in items.items() if len((inspect.getdoc(x) or "").partition("\n")[0]) >= 80
    }
    assert long == set()


@pytest.mark.parametrize("name", ["matmul", "plan", "check", "conv", "quantize"])
def test_every_parameter_is_documented(name):
    text = inspect.getdoc(getattr(lowprec, name)) or ""
    for parameter in inspect.signature(getattr(lowprec, name)).parameters:
        assert parameter in text, f"{name} does not say what {parameter} is"


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_caught_by_either_name(name):
    kind = getattr(lowprec, name)
    assert issubclass(kind, lowprec.LowprecError)
    if kind is not lowprec.LowprecError:
        builtin = (TypeError, ValueError, RuntimeError, NotImplementedError)
        assert issubclass(kind, builtin)


def test_parts_are_imported_when_they_are_used():
    """What each statement adds to the modules that are loaded, and that no thread is started."""
    code = """
        import sys, threading, numpy, lowprec
        loaded = lambda *names: [f"lowprec.{name}" in sys.modules for name in names]
        before = set(sys.modules)
        print(*loaded("linalg", "core.plan_call", "profiling"), "linalg" in dir(lowprec))
        lowprec.matmul(numpy.ones((2, 2), numpy.float32), numpy.ones((2, 2), numpy.float32), math_mode="bf16")
        print(set(sys.modules) - before)
        lowprec.profile()
        print(*loaded("profiling", "linalg"))
        print(lowprec.linalg is sys.modules["lowprec.linalg"])
        from lowprec import *
        print(matmul.__name__, threading.active_count())
    """
    found = ["False False False True", "set()", "True False", "True", "matmul 1"]
    assert run_python(code).splitlines() == found


def test_a_misspelt_name_is_an_error():
    with pytest.raises(AttributeError, match="matmull"):
        _ = lowprec.matmull
    with pytest.raises(TypeError, match="math_mod"):
        lowprec.matmul(1, 1, math_mod="tf32")


@pytest.mark.parametrize(
    "name", ["matmul", "plan", "autotune", "linear", "conv", "einsum", "tensordot", "vecdot"]
)
def test_signatures_show_each_argument(name):
    function = getattr(lowprec, name)
    shown = inspect.signature(function)
    assert "math_mode: 'ModeLike | None' = None" in str(shown)
    assert all(
        parameter.kind is not parameter.VAR_KEYWORD for parameter in shown.parameters.values()
    )
    with pytest.raises(
        TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'math_mod'"
    ):
        function("ij,j", None, math_mod="bf16")
