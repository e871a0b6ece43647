"""The tests of the CUDA backend that show features: on the GPU where there is one, else on the software CUDA.

The module is also a plugin of pytest's that writes the report format of pytest-reportlog, which a borrowed machine may
lack: one JSON object a line, on disk as soon as a test has ended, so that a run that is killed has a report.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import common

#: Tests with the marker `feature`.
FOLDER = common.ROOT / "tests" / "cuda_backend"
#: Variables: device and folder of compiled kernels, which the fixtures read; the file; the time after which no new test
#: begins.
VARIABLE, KERNELS = "LOWPREC_TEST_DEVICE", "LOWPREC_TEST_KERNELS"
PATH, DEADLINE = "GPU_REPORT_LOG", "GPU_REPORT_DEADLINE"

#: Characters of the end of a failure's message in the report, and the most failures.
_MESSAGE, _FAILURES = 600, 60


def modules() -> list[str]:
    """Return the names of the modules that show features; a part of the report each."""
    return sorted(
        p.stem for p in FOLDER.glob("test_*.py") if "mark.feature" in p.read_text("utf-8")
    )


def command(module: str, *, quick: bool) -> list[str]:
    """Return the command that runs the tests of one module that show features."""
    # Libraries of other versions may warn of other things, which is no failure of a feature.
    wanted = "feature and not sweep" if quick else "feature"
    return [
        sys.executable, "-m", "pytest", str(FOLDER / f"{module}.py"), "-q", "-m", wanted,
        "-W", "default", "-p", "gpu.tests", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=30",
    ]  # fmt: skip


# -- the plugin -----------------------------------------------------------------------------------


class _ReportLog:
    def pytest_sessionstart(self, session: Any) -> None:
        """Keep the session, which can be stopped."""
        self.session = session

    def _write(self, entry: dict[str, Any]) -> None:
        with open(os.environ[PATH], "a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str) + "\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write the setup, the call or the teardown of a test."""
        config = self.session.config
        self._write(config.hook.pytest_report_to_serializable(config=config, report=report))

    #: Modules that cannot be imported.
    pytest_collectreport = pytest_runtest_logreport

    def pytest_runtest_logfinish(self) -> None:
        """End the run before it is killed: a slow test does not count as one that hangs."""
        if time.time() > float(os.environ.get(DEADLINE, "inf")):
            self.session.shouldstop = "the time is over"

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write({"$report_type": "SessionFinish", "exitstatus": int(exitstatus)})


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(_ReportLog())


# -- its file -------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """Return the result of a run of pytest as a part of the report; a ValueError without one."""
    if not path.exists():
        raise ValueError("it wrote nothing")
    return _digest(_entries(path))


def _entries(path: Path) -> Iterable[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # it was being written
            return


def _digest(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one row per feature, and the failures; a test without an end has failed."""
    tests: dict[str, dict[str, Any]] = {}
    complete = False
    for entry in entries:
        if entry["$report_type"] == "SessionFinish":
            # 2: stopped, 3 and more: pytest itself failed, or found no test.
            complete = entry["exitstatus"] in (0, 1)
            continue
        kind, when = entry["outcome"], entry.get("when")
        if when is None and kind == "passed":
            continue
        unfinished = {"kind": "failed", "message": "it was running when the tests were stopped"}
        test = tests.setdefault(entry["nodeid"], unfinished)
        test["shows"] = entry.get("user_properties", [])
        # Of setup and teardown only failures and skips.
        if kind != "passed" or when == "call":
            test["kind"], test["message"] = kind, _message(entry["longrepr"])
    by_feature: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    measured: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for test in tests.values():
        (device,) = [value for name, value in test["shows"] if name == "device"] or ["unknown"]
        for name, value in test["shows"]:
            if name == "feature":
                by_feature[value, device][test["kind"]] += 1
                measured[value, device] += [x for key, x in test["shows"] if key == "measured"]

    def counted(kinds: Mapping[str, int]) -> dict[str, int]:
        return {kind: kinds[kind] for kind in ("passed", "failed", "skipped")}

    kinds = Counter(test["kind"] for test in tests.values())
    failed = {
        name: test["message"][-_MESSAGE:]
        for name, test in tests.items()
        if test["kind"] == "failed"
    }
    skips = Counter(test["message"] for test in tests.values() if test["kind"] == "skipped")
    rows = []
    for (feature, device), count in by_feature.items():
        ok = False if count["failed"] else True if count["passed"] else None
        values = {"measured": measured[feature, device]} if measured[feature, device] else {}
        rows.append({"feature": feature, "device": device, **counted(count), **values, "ok": ok})
    if failed and not any(row["ok"] is False for row in rows):
        rows.append({"feature": None, "device": None, **counted(kinds), "ok": False})
    failures = [{"id": name, "message": message} for name, message in failed.items()]
    facts = {"counts": counted(kinds), "failures": failures[:_FAILURES], "skips": dict(skips)}
    return {"complete": complete, "facts": facts, "rows": rows}


def _message(longrepr: Any) -> str:
    if isinstance(longrepr, Mapping):
        return str((longrepr.get("reprcrash") or {}).get("message", ""))
    return str(longrepr[-1] if isinstance(longrepr, list) else longrepr or "")
