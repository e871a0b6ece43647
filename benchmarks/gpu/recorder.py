"""A plugin of pytest's that writes each outcome to a file at once, so that a run that is stopped has a result.

JUnit's file is written at the end of a run, and a test that hangs on a GPU has none.
"""

from __future__ import annotations

import json
import os
from typing import Any

#: Names the file.
VARIABLE = "GPU_REPORT_OUTCOMES"


def _write(**outcome: str) -> None:
    with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
        file.write(json.dumps(outcome) + "\n")


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """Tell which test runs, in case it is the last one."""
    _write(id=nodeid, kind="begun", message="")


def pytest_runtest_logreport(report: Any) -> None:
    """Keep what became of a test: of its setup and teardown only what went wrong."""
    if report.when == "call" or report.outcome != "passed":
        _keep(report)


def pytest_collectreport(report: Any) -> None:
    """Keep modules that cannot be imported."""
    if report.outcome != "passed":
        _keep(report)


def _keep(report: Any) -> None:
    said = report.longrepr
    text = str(said[2]) if isinstance(said, tuple) else report.longreprtext
    _write(id=report.nodeid, kind=report.outcome, message=text[-2000:])
