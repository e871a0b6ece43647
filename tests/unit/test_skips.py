"""What the last step of `.ci/run` makes of skips: units are lacking only where the processor lacks them."""

import importlib
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest

from support.cpu_units import NO_AMX
from support.tensor_core_vectors import ABSENT

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "check_skips.py"
NO_LIBRARY = "libcublasLt is not installed (nvidia-cublas, 400 MB and more)"
TORCH_IS_MISSING = "torch is not installed"

pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason=".ci is not part of this checkout")


@pytest.fixture
def checker(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("check_skips")


def results(folder, name, skips):
    """Write what an environment made of these tests, and of one that passed."""
    cases = "".join(
        f'<testcase classname="tests.x" name={quoteattr(test)}>'
        f"<skipped type='pytest.skip' message={quoteattr(reason)}/></testcase>"
        for test, reason in skips.items()
    )
    passed = '<testcase classname="tests.x" name="passes"/>'
    path = folder / f"{name}.xml"
    path.write_text(f"<testsuites><testsuite>{passed}{cases}</testsuite></testsuites>")
    return str(path)


@pytest.mark.parametrize(
    ("full", "minimal", "flags", "is_fair"),
    [
        (NO_AMX, NO_AMX, {"avx512_bf16"}, True),
        (NO_AMX, NO_AMX, {"avx512_bf16", "amx_bf16"}, False),
        (TORCH_IS_MISSING, TORCH_IS_MISSING, set(), False),
        (f"not this machine's fault: {NO_AMX}", NO_AMX + " at all", {"amx_bf16"}, False),
        (ABSENT, "numba is not installed", set(), True),
        (f"perhaps {ABSENT}", "numba is not installed", set(), False),
        (NO_LIBRARY, "nvmath is not installed", set(), True),
        ("CuPy needs a GPU", "nvmath is not installed", set(), True),
    ],
)
def test_tests_skipped_everywhere(checker, monkeypatch, tmp_path, full, minimal, flags, is_fair):
    monkeypatch.setattr(checker, "processor_flags", lambda: frozenset(flags))
    files = [results(tmp_path, "full", {"t": full}), results(tmp_path, "minimal", {"t": minimal})]
    assert checker.main(files) == (0 if is_fair else 1)


def test_tests_executed_in_one_environment_count(checker, tmp_path):
    executed = tmp_path / "other.xml"
    executed.write_text('<testsuites><testcase classname="tests.x" name="t"/></testsuites>')
    assert checker.main([results(tmp_path, "full", {"t": "not here"}), str(executed)]) == 0


def test_the_flags_are_the_processor_s(checker, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: amx_bf16 inside\nflags\t\t: fpu avx2\nbugs\t\t: amx_tile\n")
    assert checker.processor_flags(cpuinfo) == {"fpu", "avx2"}
    assert checker.processor_flags(tmp_path / "none") == frozenset()
