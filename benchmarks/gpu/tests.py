"""The tests of the CUDA backend: on the GPU where there is one, else against the software cuBLASLt."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import machine
from gpu.parts import Options, Part

#: Characters of a failure's message that the report keeps, and how many failures.
_MESSAGE, _FAILURES = 600, 60


def run(part: Part, options: Options) -> None:
    """Run pytest and keep what became of each module."""
    folder = machine.ROOT / "tests" / "cuda"
    if not any(folder.glob("test_*.py")):
        part.unavailable("there are no tests in tests/cuda")
        return
    environment = {**os.environ, "LOWPREC_TEST_DEVICE": "gpu" if part.device == "gpu" else "software"}
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "junit.xml"
        command = [
            sys.executable, "-m", "pytest", str(folder), "-q", f"--junitxml={path}", "-p", "no:cacheprovider",
            "-o", "addopts=--import-mode=importlib", *_timeout(options), *(["-x"] if options.quick else []),
        ]  # fmt: skip
        done = subprocess.run(command, env=environment, cwd=machine.ROOT, check=False)
        part.fact("exit", done.returncode)
        part.fact("variable", environment["LOWPREC_TEST_DEVICE"])
        if not path.exists():
            part.row(module="tests/cuda", ok=False, message="pytest wrote no results")
            return
        keep(part, cases(path))


def _timeout(options: Options) -> list[str]:
    """Have pytest end by itself before the section is stopped, where it can."""
    from importlib.util import find_spec

    return [f"--session-timeout={options.left():.0f}"] if find_spec("pytest_timeout") else []


def keep(part: Part, found: Iterable[dict[str, str]]) -> None:
    """Keep one row per module, and what failed."""
    modules: dict[str, dict[str, int]] = {}
    failures = []
    for case in found:
        counts = modules.setdefault(case["module"], {"passed": 0, "failed": 0, "skipped": 0})
        counts[case["kind"]] += 1
        if case["kind"] == "failed":
            failures.append({"id": case["id"], "message": case["message"][:_MESSAGE]})
    total = {kind: sum(c[kind] for c in modules.values()) for kind in ("passed", "failed", "skipped")}
    part.fact("counts", total)
    part.fact("failures", failures[:_FAILURES])
    for module, counts in sorted(modules.items()):
        ok = False if counts["failed"] else True if counts["passed"] else None
        part.row(ok=ok, module=module, **counts)


def cases(path: Path) -> list[dict[str, str]]:
    """Read a JUnit file as pytest writes it."""
    return [_case(element) for element in ET.parse(path).getroot().iter("testcase")]


def _case(element: Any) -> dict[str, str]:
    name, parent = element.get("name", ""), element.get("classname", "")
    kind, message = "passed", ""
    for tag, meaning in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        said = element.find(tag)
        if said is not None:
            kind, message = meaning, f"{said.get('message', '')}\n{said.text or ''}"
            break
    # A module that cannot be imported, or is skipped as a whole, has no class: its name is the module's.
    words = (parent or name).split(".")
    at = next((i for i, word in enumerate(words) if word.startswith("test_")), len(words) - 1)
    module = "/".join(words[: at + 1]) + ".py"
    return {"module": module, "id": f"{parent}::{name}", "kind": kind, "message": message.strip()}
