"""The tests of the CUDA backend: on the GPU where there is one, else against the software cuBLASLt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import machine

from gpu import recorder
from gpu.parts import Options, Part

#: What the tests run on; their fixtures read it.
VARIABLE = "LOWPREC_TEST_DEVICE"

#: Characters of a failure's message that the report keeps, its end, and how many failures.
_MESSAGE, _FAILURES = 600, 60
_KINDS = ("passed", "failed", "skipped")


def run(part: Part, options: Options) -> None:
    """Run pytest and keep what became of each module."""
    folder = machine.ROOT / "tests" / "cuda_backend"
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "outcomes.jsonl"
        path.touch()
        environment = {
            **os.environ,
            VARIABLE: "gpu" if part.device == "gpu" else "software",
            recorder.VARIABLE: str(path),
        }
        part.fact("variable", f"{VARIABLE}={environment[VARIABLE]}")
        # Other versions of the libraries may warn of other things; that is not what is asked here.
        command = [
            sys.executable, "-m", "pytest", *files(folder), "-q", "-W", "default", "-p", "gpu.recorder",
            "-p", "no:cacheprovider", *(["-x"] if options.quick else []),
        ]  # fmt: skip
        status = _status(command, environment, options.left())
        part.fact("exit", status)
        keep(part, outcomes(path), stopped=status is None)
    if not part.rows:
        part.row(
            ok=False, module="tests/cuda_backend", message=f"no test ran; exit status {status}"
        )


def files(folder: Path) -> list[str]:
    """Return the test modules; those that use the device by the fixture `gpu` come first, as time may run out."""
    found = sorted(folder.glob("test_*.py"))
    return [str(p) for p in sorted(found, key=lambda p: "gpu: Gpu" not in p.read_text("utf-8"))]


def _status(command: list[str], environment: Mapping[str, str], limit_s: float) -> int | None:
    """Return the exit status, None for a run that had to be stopped."""
    try:
        done = subprocess.run(
            command, env=environment, cwd=machine.ROOT, check=False, timeout=max(limit_s, 1.0)
        )
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def outcomes(path: Path) -> list[dict[str, str]]:
    """Read what the plugin wrote; a line that was being written counts as none."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def keep(part: Part, found: Iterable[Mapping[str, str]], *, stopped: bool) -> None:
    """Keep one row per module, and what failed; a test that was running when all was stopped has failed."""
    # The last word on a test counts: that it has begun, what became of it, a teardown that failed.
    latest = {outcome["id"]: outcome for outcome in found}
    modules: dict[str, dict[str, int]] = {}
    failures = []
    for test, outcome in latest.items():
        kind, message = outcome["kind"], outcome["message"]
        if kind == "begun":
            kind, message = (
                "failed",
                "it was running when the tests were stopped" if stopped else "",
            )
        counts = modules.setdefault(test.partition("::")[0], dict.fromkeys(_KINDS, 0))
        counts[kind] += 1
        if kind == "failed":
            failures.append({"id": test, "message": message[-_MESSAGE:]})
    part.fact("counts", {kind: sum(c[kind] for c in modules.values()) for kind in _KINDS})
    part.fact("failures", failures[:_FAILURES])
    for module, counts in sorted(modules.items()):
        ok = False if counts["failed"] else True if counts["passed"] else None
        part.row(ok=ok, module=module, **counts)
