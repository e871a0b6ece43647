"""Warnings: at the line of the caller, and of a mode without effect on float64 once per process."""

import contextlib
import inspect
import warnings

import numpy as np
import pytest

import lowprec
from lowprec import errors
from lowprec.core import executors

WIDE = np.ones((3, 3))
NARROW = WIDE.astype(np.float32)


@pytest.fixture
def first(monkeypatch, fresh_executors):
    """As in a process that has not multiplied yet."""
    monkeypatch.setattr(errors, "_given", set())


def given(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return found


CALLS = {
    "matmul": lambda: lowprec.matmul(WIDE, WIDE, math_mode="bf16"),
    "mixed": lambda: lowprec.matmul(NARROW, WIDE, math_mode="tf32"),
    "complex128": lambda: lowprec.matmul(WIDE + 0j, WIDE, math_mode="tf32"),
    "linear": lambda: lowprec.linear(WIDE, WIDE, math_mode="bf16x3"),
    "einsum": lambda: lowprec.einsum("ij,jk->ik", WIDE, WIDE, math_mode="bf16"),
    "prepare": lambda: lowprec.prepare(WIDE, math_mode="bf16"),
    "float32": lambda: lowprec.matmul(NARROW, NARROW, math_mode="fp64_emulated"),
    "complex64": lambda: lowprec.matmul(NARROW * 1j, NARROW, math_mode="fp64_emulated"),
}
#: By call: the type to convert to, where it is not float32.
CONVERTED = {"complex128": "complex64", "float32": "float64", "complex64": "complex128"}


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_without_effect_gives_one_warning_at_the_callers_line(name, first):
    (found,) = given(lambda: [CALLS[name](), CALLS[name](), CALLS["matmul"]()])
    assert issubclass(found.category, lowprec.LowprecWarning)
    assert (found.filename, found.lineno) == (__file__, inspect.getsourcelines(CALLS[name])[1])
    assert f"convert them to {CONVERTED.get(name, 'float32')} to use the mode" in str(found.message)


def scoped():
    with lowprec.math_mode("bf16"):
        return lowprec.matmul(WIDE, WIDE)


def guarded():
    with lowprec.fp32_guard():
        return lowprec.matmul(WIDE, WIDE, math_mode="bf16")


@pytest.mark.parametrize(
    "call",
    [
        scoped,
        guarded,
        lambda: lowprec.matmul(WIDE, WIDE),
        lambda: lowprec.matmul(WIDE, WIDE, math_mode="fp64"),
        lambda: lowprec.matmul(WIDE, WIDE, math_mode="fp32"),
        lambda: lowprec.matmul(WIDE, WIDE, rtol=1e-3),
        lambda: lowprec.matmul(NARROW, NARROW, math_mode="bf16"),
        # On float64 the mode is the requested one, emulated or not.
        lambda: lowprec.matmul(WIDE, WIDE, math_mode="fp64_emulated"),
        lambda: lowprec.matmul(
            NARROW.astype(np.float16), NARROW.astype(np.float16), math_mode="fp64_emulated"
        ),
        lambda: lowprec.plan(WIDE, WIDE, math_mode="bf16"),
    ],
)
def test_other_calls_give_no_warning(call, first):
    assert given(call) == []


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_argument_gives_a_warning_after_a_scope_that_gave_none(first, library):
    if library == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")

    def product(**mode):
        if library == "numpy":
            return lowprec.matmul(WIDE, WIDE, **mode)
        x = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
        return lowprec.matmul(x, x, **mode).sum().backward()

    with lowprec.math_mode("bf16"):
        assert given(product) == []
    assert len(given(lambda: product(math_mode="bf16"))) == 1


def test_dask_warns_where_the_graph_is_made(first):
    da = pytest.importorskip("dask.array", reason="dask is not installed")
    x = da.ones((4, 4), chunks=2)
    made = []
    (found,) = given(lambda: made.append(lowprec.matmul(x, x, math_mode="bf16")))
    assert found.filename == __file__
    errors._given.clear()
    executors.clear_caches()
    assert given(lambda: made[0].compute(scheduler="sync")) == []


def test_warnings_point_past_lowprec_and_contextlib(first):
    code = "class Block:\n    def __enter__(self): warn('x')\n    def __exit__(self, *_): pass"
    inside = {"__name__": "lowprec.x", "warn": errors.warn}  # as if its code were lowprec's
    exec(code, inside)

    def enter():
        with contextlib.ExitStack() as stack:
            stack.enter_context(inside["Block"]())

    (found,) = given(enter)
    assert found.filename == __file__
