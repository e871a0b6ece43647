"""A plugin of pytest's that writes the report format of pytest-reportlog, which a borrowed machine may not have.

One JSON object a line, on disk as soon as a test has ended: a run that is killed has a report. JUnit's file is written
at the end.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

#: Variables: the file, and the time after which no new test begins.
PATH, DEADLINE = "GPU_REPORT_LOG", "GPU_REPORT_DEADLINE"


class _ReportLog:
    def __init__(self, config: Any) -> None:
        self.config = config

    def _write(self, entry: dict[str, Any]) -> None:
        with open(os.environ[PATH], "a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str) + "\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write the setup, the call or the teardown of a test."""
        self._write(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    #: Modules that cannot be imported.
    pytest_collectreport = pytest_runtest_logreport

    def pytest_runtest_logfinish(self) -> None:
        """End the run before it is killed: a test that is slow does not count as one that hangs."""
        if time.time() > float(os.environ.get(DEADLINE, "inf")):
            self.session.shouldstop = "the time is over"

    def pytest_sessionstart(self, session: Any) -> None:
        """Keep what can be stopped."""
        self.session = session

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write that all tests have run."""
        self._write({"$report_type": "SessionFinish", "exitstatus": int(exitstatus)})


def pytest_configure(config: Any) -> None:
    """Register the plugin."""
    config.pluginmanager.register(_ReportLog(config))
