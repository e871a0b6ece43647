"""Exceptions that a signal handler raises while a block is entered or left."""

import pytest

from lowprec.modes import MathMode
from lowprec.policy import environment, fp32_guard, get_math_mode, math_mode, switches
from support import interrupts, synthetic_library
from support.interrupts import Late

#: The code of the libraries below counts as the policy's.
FILES = (__file__, synthetic_library.__file__)


@pytest.mark.filterwarnings("ignore::lowprec.errors.LowprecWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, Late])
@pytest.mark.parametrize("fails", [False, True])
def test_the_exception_arrives_and_the_next_block_is_right(register, error, fails):
    libraries = [register("process"), register("thread", tier="thread")]
    environment.snapshot()

    def nested():
        if fails:
            # a new one, whose frames hold the scopes
            libraries[0].fails["have set_mode"] = OSError("no driver")
        with math_mode("tf32", frameworks=True), fp32_guard():
            pass

    def check():
        libraries[0].fails.clear()
        assert all(library.is_as_before for library in libraries)
        assert not any(
            stacks.get(x)
            for stacks in (switches._process_stacks, getattr(switches._thread, "stacks", {}))
            for x in libraries
        )
        with math_mode("tf32", frameworks=True):
            assert get_math_mode() is MathMode.TF32
            assert {v for library in libraries for v in library.values.values()} == {"tf32"}

    assert interrupts.count(nested, check, error, also=FILES) > 20


def test_a_handler_that_multiplies_while_the_environment_is_read(monkeypatch):
    environment.refresh()
    read, snapshots = environment._read, []

    def interrupted():
        monkeypatch.setattr(environment, "_read", read)
        snapshots.append(environment.snapshot())
        return read()

    monkeypatch.setattr(environment, "_read", interrupted)
    snapshots.append(environment.snapshot())
    assert snapshots[0] is snapshots[1] is environment.snapshot()
