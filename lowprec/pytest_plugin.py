"""The option ``--lowprec-require`` of pytest, which imports this module where it is given."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from lowprec.auditing import Audit, AuditRow, audit
from lowprec.policy.controllers import controllers
from lowprec.policy.protocol import attempt

#: Extent of the matrices of a measurement.
_SIZE = 128


class RequiredPrecision:
    """Fail tests at whose beginning or end a loaded library multiplies float32 in less than this precision.

    Each state of the libraries' switches is measured once.
    """

    def __init__(self, precision: str) -> None:
        Audit((), {}).below(precision)  # raises for an unknown one
        self._precision = precision
        self._measured: dict[str, tuple[AuditRow, ...]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        self._check("beginning")
        yield
        self._check("end")

    def _check(self, when: str) -> None:
        state = str(
            [(c.name, attempt(c, c.describe)) for c in controllers() if c.module in sys.modules]
        )
        if state not in self._measured:
            self._measured[state] = audit(sizes=(_SIZE,)).below(self._precision)
        found = ", ".join(
            f"{row.library}'s {row.operation} is in {row.precision}"
            for row in self._measured[state]
        )
        if found:
            pytest.fail(
                f"--lowprec-require {self._precision}: at the {when} of the test {found}",
                pytrace=False,
            )
