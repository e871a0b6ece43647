"""What every test shares: a clean environment, seeded randomness, and a report of what was skipped."""

from __future__ import annotations

import gc
import os
import signal
import zlib
from collections import defaultdict
from collections.abc import Iterator

# Before lowprec is imported anywhere: a variable set in the caller's shell must not decide what a
# test sees. Tests that are about a variable set it themselves.
_OTHERS = {
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "CUPY_TF32",
    "MLX_ENABLE_TF32",
}
#: What the tests of the CUDA backend run on is not lowprec's variable but theirs; and all may run on a lesser CPU.
_KEPT = {"LOWPREC_TEST_DEVICE", "LOWPREC_TEST_VECTORS", "LOWPREC_MAX_CPU_ISA"}
for _name in [n for n in os.environ if n.startswith("LOWPREC_") or n in _OTHERS]:
    if _name not in _KEPT:
        del os.environ[_name]

# pytest-xdist passes the width of its terminal on.
os.environ.pop("COLUMNS", None)

# Read when NumPy and PyTorch are first imported, here and in the programs that tests start: threads that spin after
# their work take a core from the tests beside them.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# A shell lets what it runs in the background ignore Ctrl-C, which the programs that tests start would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from lowprec.core import executors

# The same examples everywhere, so that a failure seen once can be seen again; no deadline, because
# the first call of a compiled kernel takes seconds. "explore" looks for new counterexamples.
settings.register_profile("default", derandomize=True, deadline=None)
settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most cases of a sampled test to the sweep.

    Those that stay are as in a Latin square: each value of a parameter is among them, with others each time.
    """
    values: dict[tuple[str, str], list[object]] = defaultdict(list)
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is None:
            continue
        total = 0
        for name, value in item.callspec.params.items():
            known = values[item.nodeid.partition("[")[0], name]
            if not any(x is value for x in known):
                known.append(value)
            total += next(i for i, x in enumerate(known) if x is value)
        if total % sampled.args[0]:
            item.add_marker(pytest.mark.sweep)


@pytest.fixture(scope="module", autouse=True)
def cheap_collections() -> None:
    """What there is before a module's tests, all that were collected among it, no collection of theirs looks at."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's own name: repeatable, and different from test to test."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def fresh_executors() -> Iterator[None]:
    """Plans and executors are made anew in the test, and after it: those of the test are for what it pretends."""
    executors.clear_caches()
    yield
    executors.clear_caches()


_NO_REASON = frozenset({"", "Skipped", "unconditional skip"})


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ").strip()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was skipped by reason, so that nobody takes a silent skip for a pass."""
    skipped: dict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        skipped[_reason(report)].append(report.nodeid)
    if not skipped:
        return
    total = sum(map(len, skipped.values()))
    terminalreporter.section(f"skipped: {total}")
    for reason, nodeids in sorted(skipped.items()):
        files = sorted({nodeid.split("::")[0] for nodeid in nodeids})
        terminalreporter.write_line(f"{len(nodeids):5d}  {reason}  ({', '.join(files)})")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Turn a skip that gives no reason into a failure."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and _reason(report) in _NO_REASON:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped without a reason"
    return report
