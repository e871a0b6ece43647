"""Fixtures of all tests: a clean environment, seeded random numbers, and a report of skipped tests."""

import gc
import os
import signal
import zlib
from collections import defaultdict

# Before the first import of lowprec: variables of the caller's shell must not affect tests. Tests of a variable set it.
_OTHERS = {
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "CUPY_TF32",
    "MLX_ENABLE_TF32",
}
#: Kept: the variables that select the machine of the CUDA tests, and a lesser CPU for all tests.
_KEPT = {
    "LOWPREC_TEST_DEVICE",
    "LOWPREC_TEST_KERNELS",
    "LOWPREC_TEST_VECTORS",
    "LOWPREC_MAX_CPU_ISA",
}
for _name in [n for n in os.environ if n.startswith("LOWPREC_") or n in _OTHERS]:
    if _name not in _KEPT:
        del os.environ[_name]

# pytest-xdist sets this to the width of its terminal.
os.environ.pop("COLUMNS", None)

# Read at the first import of NumPy and PyTorch, here and in child processes: threads that spin after their work would
# take a core from other tests.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# A shell's background processes ignore Ctrl-C, and child processes of tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from frameworks.backends import Backend
from frameworks.conftest import load_or_skip
from lowprec.core import executors

# The same examples everywhere, so that failures are repeatable; no deadline, since the first call of a compiled kernel
# takes seconds. "explore" searches for new counterexamples.
settings.register_profile("default", derandomize=True, deadline=None)
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default")
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark most cases of a sampled test as ``sweep``.

    The others form a Latin square: every value of each parameter occurs, in different combinations.
    """
    values = defaultdict(list)
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
def cheap_collections():
    """Freeze the objects that exist before a module's tests, so that its garbage collections skip them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def rng(request):
    """A generator seeded by the test's name: repeatable, and different for each test."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def torch():
    return load_or_skip(Backend.TORCH).torch


@pytest.fixture
def jax():
    return load_or_skip(Backend.JAX).jax


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would be written."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self))
    return figures


@pytest.fixture
def fresh_executors():
    """Clear the plan and executor caches before and after the test, which simulates another machine."""
    executors.clear_caches()
    yield
    executors.clear_caches()


def pytest_configure(config):
    """List skipped tests by reason, so that a skip is not mistaken for a pass."""
    config.option.reportchars += "s"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Turn a skip without a reason into a failure."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        _, _, reason = report.longrepr
        if reason.removeprefix("Skipped: ").strip() in ("", "Skipped", "unconditional skip"):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped without a reason"
    return report
