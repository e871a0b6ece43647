"""The option ``--lowprec-require`` of pytest, which registers this module where it is given.

Tests fail at whose beginning or end a loaded library multiplies float32 in less than this precision. Each state of the
libraries' switches is measured once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import pytest

from lowprec.auditing import Audit, AuditRow, audit
from lowprec.policy.controllers import controllers
from lowprec.policy.protocol import attempt

#: Extent of the matrices of a measurement.
_SIZE = 128


def pytest_configure(config: pytest.Config) -> None:
    Audit((), {}).below(config.getoption("lowprec_require"))  # raises for an unknown one


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    precision = item.config.getoption("lowprec_require")
    _check(precision, "beginning")
    yield
    _check(precision, "end")


def _check(precision: str, when: str) -> None:
    state = str(
        [(c.name, attempt(c, c.describe)) for c in controllers() if c.module in sys.modules]
    )
    found = ", ".join(
        f"{row.library}'s {row.operation} is in {row.precision}"
        for row in _measured(precision, state)
    )
    if found:
        pytest.fail(
            f"--lowprec-require {precision}: at the {when} of the test {found}", pytrace=False
        )


@functools.cache
def _measured(precision: str, state: str) -> tuple[AuditRow, ...]:
    """Return the operations below a precision in a state of the switches."""
    return audit(sizes=(_SIZE,)).below(precision)
