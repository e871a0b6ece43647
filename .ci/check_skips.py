"""Fail if a test was skipped in every environment in which it ran; print the count of all of them.

usage: check_skips.py RESULTS.xml...

A test may be skipped where a library is missing, if another environment executes it; an expected failure counts as
executed. Tests that need units that this machine lacks, data outside the checkout, or a library too large for these
environments are listed, but are no failure. The last line is the count over all environments.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """Result of one test in one environment: passed, failed or skipped."""

    environment: str
    test: tuple[str, str]
    kind: str
    message: str


def outcomes(path: Path) -> list[Outcome]:
    """Read a JUnit XML file as pytest writes it."""
    found = []
    for case in ET.parse(path).getroot().iter("testcase"):
        test = (case.get("classname", ""), case.get("name", ""))
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            kind, message = "failed", ""
        elif skipped is not None and skipped.get("type") != "pytest.xfail":
            kind, message = "skipped", skipped.get("message", "")
        else:
            kind, message = "passed", ""
        found.append(Outcome(path.stem, test, kind, message))
    return found


def covers(executed: tuple[str, str], skipped: tuple[str, str]) -> bool:
    """Whether the executed test is the skipped one, or one of the skipped module.

    A module that is skipped as a whole appears as a single case without a class name.
    """
    if executed == skipped:
        return True
    classname, module = skipped
    return not classname and (executed[0] == module or executed[0].startswith(f"{module}."))


def skipped_everywhere(results: list[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """Return the tests that no environment executed, with the results by environment."""
    executed = {r.test for r in results if r.kind != "skipped"}
    modules = [r.test for r in results if r.kind == "skipped" and not r.test[0]]
    covered = executed | {m for m in modules if any(covers(e, m) for e in executed)}
    never: dict[tuple[str, str], list[Outcome]] = {}
    for result in results:
        if result.test not in covered:
            never.setdefault(result.test, []).append(result)
    return never


#: Beginnings of the reasons in `tests/support/cpu_units.py`, and the processor's flag for the missing units.
UNITS = {
    "this machine has no AMX units": "amx_bf16",
    "this machine has no AVX512-BF16 units": "avx512_bf16",
    "this machine has no AVX512-VNNI units": "avx512_vnni",
    "this machine has no AVX-VNNI units": "avx_vnni",
    "this machine has no AVX-512": "avx512f",
    "this machine has no AVX2": "avx2",
}


#: Beginnings of reasons that apply in every environment here, and what these tests need. A sample of the vectors is
#: tested everywhere (`tests/support/tensor_core_vectors.py`).
ABSENT = {
    "the vectors of real tensor cores are not next to this checkout": "data that is no part of the checkout",
    "libcublasLt is not installed ": "a library that is too large for these environments",
    "CuPy needs a GPU": "a GPU",
}


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the processor's flags; empty where the system does not report them."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return frozenset(
        word
        for line in lines
        if line.startswith("flags")
        for word in line.partition(":")[2].split()
    )


def lacks_units(said: list[Outcome], flags: frozenset[str]) -> bool:
    """Whether any environment skipped a test for units that a processor with these flags lacks.

    The reasons of other environments, such as a missing library, are ignored then.
    """
    return any(
        r.message.startswith(reason) and flag not in flags
        for r in said
        for reason, flag in UNITS.items()
    )


def lacks(said: list[Outcome], reason: str) -> bool:
    """Whether a test was skipped for something that no environment here has."""
    return any(r.message.startswith(reason) for r in said)


def main(arguments: list[str]) -> int:
    """Report on the result files; return 1 if a test was executed nowhere, or failed."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    results: list[Outcome] = []
    complete = True
    for path in map(Path, arguments):
        found = outcomes(path) if path.is_file() else []
        if not any(r.kind == "passed" for r in found):
            print(f"{path}: no test passed in this environment")
            complete = False
        results += found
    never = skipped_everywhere(results)
    flags = processor_flags()
    excused = [test for test, said in never.items() if lacks_units(said, flags)]
    if excused:
        print(f"{len(excused)} tests need units that this machine's processor does not have")
        never = {test: said for test, said in never.items() if test not in excused}
    for reason, what in ABSENT.items():
        absent = [test for test, said in never.items() if lacks(said, reason)]
        if absent:
            print(f"{len(absent)} tests need {what}")
            never = {test: said for test, said in never.items() if test not in absent}
    for (classname, name), said in sorted(never.items()):
        reasons = "; ".join(f"{r.environment}: {r.message}" for r in said)
        print(f"skipped everywhere: {'.'.join(filter(None, (classname, name)))} ({reasons})")
    count = {kind: sum(r.kind == kind for r in results) for kind in ("passed", "failed", "skipped")}
    print(", ".join(f"{number} {kind}" for kind, number in count.items()))
    return 0 if complete and not never and not count["failed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
