"""The guard over TensorFlow and Paddle, with the real packages; `.ci/run` makes an environment for them.

One process holds one of the two: loaded together, their copies of one C++ library crash each other.
"""

import importlib
import importlib.util
import sys
import warnings

import pytest

from lowprec import LowprecWarning, fp32_guard, info, math_mode
from lowprec.policy.controllers import controllers

#: By library: how its user reads and sets its switches, one pair per switch.
USERS = {
    "tensorflow": [
        (
            "config.experimental.tensor_float_32_execution_enabled",
            "config.experimental.enable_tensor_float_32_execution",
        )
    ],
    "paddle": [
        ("base.core.get_cublas_switch", "base.core.set_cublas_switch"),
        ("base.core.get_cudnn_switch", "base.core.set_cudnn_switch"),
    ],
}


class User:
    """What a user of the library does with its switches."""

    def __init__(self, name):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
        other = next(iter(USERS.keys() - {name}))
        if other in sys.modules:
            pytest.skip(f"{other} is loaded in this process, and {name} crashes next to it")
        with warnings.catch_warnings():
            # What these packages say of their own dependencies is none of our business.
            warnings.simplefilter("ignore")
            self._module = importlib.import_module(name)
        self.name = name
        self.controller = next(c for c in controllers() if c.name == name)

    def _find(self, path):
        found = self._module
        for part in path.split("."):
            found = getattr(found, part)
        return found

    def read(self):
        return [self._find(getter)() for getter, _ in USERS[self.name]]

    def write(self, values):
        for (_, setter), value in zip(USERS[self.name], values, strict=True):
            self._find(setter)(value)


@pytest.fixture(params=USERS)
def user(request):
    found = User(request.param)
    before = found.read()
    yield found
    found.write(before)


@pytest.mark.parametrize("start", [True, False])
def test_every_start_state_comes_back(user, start):
    values = [start] * len(user.read())
    for i in range(len(values)):
        mixed = [*values]
        mixed[i] = not start
        for state in (values, mixed):
            user.write(state)
            with fp32_guard() as guard:
                assert not any(user.read())
                row = next(r for r in guard.report() if r.library == user.name)
                assert (row.status, str(user.controller.tier)) == ("protected", "process")
            assert user.read() == state


def test_a_mode_sets_it_and_the_guard_takes_precedence(user):
    before = user.read()
    with math_mode("tf32", frameworks=[user.name]):
        assert all(user.read())
        with fp32_guard():
            assert not any(user.read())
        assert all(user.read())
    assert user.read() == before
    with pytest.warns(LowprecWarning, match=f"{user.name} has no switch for bf16"):
        math_mode("bf16", frameworks=[user.name]).__enter__().__exit__()


def test_info_shows_it(user):
    rows = [row for row in info()["frameworks"] if row["library"] == user.name]
    assert [row["value"] for row in rows] == user.read()
    assert {row["switch"] for row in rows} == set(user.controller.switches)
