"""What the tests of the CUDA backend show: on the GPU where there is one, else against the software CUDA."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import common

#: Where the tests are that bear the marker `feature`.
FOLDER = common.ROOT / "tests" / "cuda_backend"
#: What they run on; their fixtures read it.
VARIABLE = "LOWPREC_TEST_DEVICE"

#: Characters of a failure's message that the report keeps, its end, and how many failures.
_MESSAGE, _FAILURES = 600, 60
_KINDS = ("passed", "failed", "skipped")
_STOPPED = "it was running when the tests were stopped"


def modules() -> list[str]:
    """Return the names of the modules that show features; a part of the report each."""
    found = [p for p in FOLDER.glob("test_*.py") if "mark.feature" in p.read_text("utf-8")]
    return sorted(p.stem for p in found)


def command(module: str, *, quick: bool) -> list[str]:
    """Return how to run the tests of one module that show features."""
    # Other versions of the libraries may warn of other things; that is not what is asked here.
    wanted = "feature and not sweep" if quick else "feature"
    return [
        sys.executable, "-m", "pytest", str(FOLDER / f"{module}.py"), "-q", "-m", wanted,
        "-W", "default", "-p", "gpu.reportlog", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=30",
    ]  # fmt: skip


def read(path: Path) -> dict[str, Any]:
    """Return what a run of pytest left behind, as a part of the report; a ValueError if that is nothing."""
    if not path.exists():
        raise ValueError("it wrote nothing")
    return digest(_entries(path))


def _entries(path: Path) -> Iterable[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # it was being written
            return


def digest(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one row per feature, and what failed; a test that has no end has failed."""
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
        test = tests.setdefault(entry["nodeid"], {"kind": "failed", "message": _STOPPED})
        test["shows"] = entry.get("user_properties", [])
        # Of setup and teardown only what went wrong.
        if kind != "passed" or when == "call":
            test["kind"], test["message"] = kind, _message(entry["longrepr"])
    by_feature: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for test in tests.values():
        shown = [value for name, value in test["shows"] if name == "feature"]
        (device,) = [value for name, value in test["shows"] if name == "device"] or ["unknown"]
        for feature in shown:
            by_feature[feature, device][test["kind"]] += 1

    def counted(count: Mapping[str, int]) -> dict[str, int]:
        return {kind: count[kind] for kind in _KINDS}

    kinds = Counter(test["kind"] for test in tests.values())
    failures = [
        {"id": name, "message": test["message"][-_MESSAGE:]} for name, test in tests.items() if test["kind"] == "failed"
    ]
    skips = Counter(test["message"] for test in tests.values() if test["kind"] == "skipped")
    rows = []
    for (feature, device), count in by_feature.items():
        ok = False if count["failed"] else True if count["passed"] else None
        rows.append({"feature": feature, "device": device, **counted(count), "ok": ok})
    if failures and not any(row["ok"] is False for row in rows):
        rows.append({"feature": None, "device": None, **counted(kinds), "ok": False})
    told = {"counts": counted(kinds), "failures": failures[:_FAILURES], "skips": dict(skips)}
    return {"complete": complete, "facts": told, "rows": rows}


def _message(longrepr: Any) -> str:
    """Return what pytest says of a failure or a skip."""
    if isinstance(longrepr, Mapping):
        crash = longrepr.get("reprcrash") or {}
        return str(crash.get("message", ""))
    return str(longrepr[-1] if isinstance(longrepr, list) else longrepr or "")
