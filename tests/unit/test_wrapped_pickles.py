"""A function that a scope wraps, in a pickle and in a pool of processes."""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lowprec import MathMode, fp32_guard, get_math_mode, math_mode


def plain(offset: int = 0) -> tuple[MathMode, int]:
    return get_math_mode(), offset


@math_mode("bf16").wrap
def renamed() -> MathMode:
    return get_math_mode()


class Holder:
    @math_mode("bf16").wrap
    def method(self) -> tuple[Any, MathMode]:
        return self, get_math_mode()


@pytest.mark.parametrize(("scope", "mode"), [(math_mode("tf32"), MathMode.TF32), (fp32_guard(), MathMode.FP32)])
def test_a_wrapped_function_reaches_another_process(
    scope: Any, mode: MathMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other process imports this module by its name, from the root of the tests.
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[__name__.count(".")]))
    wrapped = scope.wrap(plain)
    assert inspect.signature(wrapped) == inspect.signature(plain)
    assert pickle.loads(pickle.dumps(wrapped))(3) == (mode, 3)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(wrapped, offset=2).result(60) == (mode, 2)


def test_a_wrapped_name_is_pickled_as_the_name() -> None:
    assert pickle.loads(pickle.dumps(renamed)) is renamed
    assert renamed() is MathMode.BF16
    held = Holder()
    assert held.method() == (held, MathMode.BF16)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(math_mode("bf16").wrap(lambda: None))
