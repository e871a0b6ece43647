"""Machine code of kernels on disk: a later process compiles nothing, and a damaged file is replaced."""

from __future__ import annotations

import gc
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowprec.backends.cpu import casting
from lowprec.errors import LowprecWarning
from support import interrupts
from support.programs import run_python

pytestmark = pytest.mark.skipif(not casting.has_kernels(), reason="numba is not installed, or switched off")

_ROUND = """
import warnings
warnings.simplefilter("always")
import numpy as np
from lowprec.backends.cpu import casting
from lowprec.backends.cpu.rounding import round_float32
from lowprec.formats import TF32

x = np.random.default_rng(0).standard_normal((300, 301), dtype=np.float32)
want, got = np.empty_like(x), np.empty_like(x)
round_float32(x.reshape(-1), TF32, want.reshape(-1))
assert casting.can_compile()
casting.cast([(x, got)], TF32)
assert (got == want).all()
from lowprec.backends.cpu.packed import compilation
print(len(compilation.compiled_here))
"""

#: numba's runtime is not in this process, so what refers to it cannot be linked: LLVM ends the process.
_LINK = """
import sys
import llvmlite.binding as binding
binding.initialize_native_target()
binding.initialize_native_asmprinter()
machine = binding.Target.from_default_triple().create_target_machine(jit=True)
module = binding.parse_assembly("")
module.triple = machine.triple
engine = binding.create_mcjit_compiler(module, machine)
engine.add_object_file(binding.ObjectFileRef.from_data(open(sys.argv[1], "rb").read()[32:]))
engine.finalize_object()
assert engine.get_function_address("lowprec_kernel")
assert "numba" not in sys.modules
"""


def test_a_later_process_compiles_nothing(tmp_path: Path) -> None:
    cache = str(tmp_path)
    assert run_python(_ROUND, LOWPREC_CACHE_DIR=cache) == "2"  # with the one that tries the compiler
    assert run_python(_ROUND, LOWPREC_CACHE_DIR=cache) == "0"
    file, _ = (tmp_path / "kernels").iterdir()
    run_python(_LINK, str(file))
    file.write_bytes(file.read_bytes()[:-100])
    again = run_python(_ROUND, LOWPREC_CACHE_DIR=cache)
    assert again.startswith("1")
    assert "it is damaged; it is kept as" in again


@pytest.mark.sweep
def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    found = run_python(_ROUND, LOWPREC_CACHE_DIR=str(tmp_path / "file"))
    assert found.startswith("2")
    assert "lowprec cannot write to its cache" in found


# -- which file is taken --------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Yield a function that returns where the code of a kernel came from, in a process that has loaded none."""
    from lowprec.backends.cpu.packed import stored_code

    monkeypatch.setenv("LOWPREC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(stored_code, "_link", lambda code: (code, 0))

    def source(name: str = "kernel", *, fresh: bool = True) -> str:
        if fresh:
            monkeypatch.setattr(stored_code, "_loaded", {})
        stored_code._maker.cache_clear()
        compiled: list[bool] = []
        code = b"code of " + name.encode()
        stored_code.address(name, lambda: bool(compiled.append(True)) or code)
        assert stored_code._loaded[name][0] == code
        return "compiled" if compiled else "read"

    yield source
    stored_code._maker.cache_clear()


def test_code_is_read_by_the_name_of_its_kernel(kept: Callable[..., str]) -> None:
    assert [kept(), kept(), kept("another"), kept("another"), kept()] == [
        "compiled", "read", "compiled", "read", "read",
    ]  # fmt: skip


def test_code_of_another_compiler_or_processor_is_not_read(
    kept: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowprec.backends.cpu.packed import stored_code

    numba, llvmlite = stored_code.numba, stored_code.llvmlite
    assert kept() == "compiled"
    for owner, name, value in (
        (numba, "__version__", "0.1"),
        (llvmlite, "__version__", "0.1"),
        (numba.config, "OPT", 1),
        (numba.config, "CPU_NAME", "generic"),
        (numba.config, "CPU_FEATURES", "+sse2"),
        (llvmlite.binding, "get_host_cpu_name", lambda: "k8"),
        (llvmlite.binding, "get_host_cpu_features", lambda: llvmlite.binding.FeatureMap(avx=True)),
        (sys, "version_info", (3, 99, 0)),
        (sys, "platform", "another"),
    ):
        with monkeypatch.context() as patch:
            if name.startswith("get_host"):
                patch.setattr(numba.config, "CPU_FEATURES", None)
                patch.setattr(numba.config, "CPU_NAME", None)
                kept()
            patch.setattr(owner, name, value)
            assert (name, kept()) == (name, "compiled")
        assert kept() == "read"


def test_a_change_of_any_source_changes_every_key(
    kept: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowprec.backends.cpu.packed import stored_code

    package = tmp_path / "lowprec"
    shutil.copytree(stored_code._PACKAGE, package)
    digest = stored_code.sources_digest.__wrapped__
    users = [
        file
        for file in package.rglob("*.py")
        if re.search(r"^(from|import) (numba|llvmlite)", file.read_text(), re.MULTILINE)
    ]
    assert {"casting_kernels.py", "macro_kernel.py"} <= {x.name for x in users}
    seen = {digest(package)}
    for file in users:
        file.write_text(file.read_text() + "#")
        seen.add(digest(package))
    assert len(seen) == 1 + len(users)
    # And the digest is in the key of the cache.
    assert [kept(), kept()] == ["compiled", "read"]
    monkeypatch.setattr(stored_code, "sources_digest", lambda: "another")
    assert kept() == "compiled"


@pytest.mark.parametrize("damage", ["cut", "a bit", "empty", "a few bytes", "another's"])
def test_a_damaged_file_is_renamed_and_made_again(kept: Callable[..., str], tmp_path: Path, damage: str) -> None:
    kept("another")
    (other,) = (tmp_path / "kernels").iterdir()
    kept()
    (file,) = set((tmp_path / "kernels").iterdir()) - {other}
    data = file.read_bytes()
    file.write_bytes(
        {
            "cut": data[:-1],
            "a bit": data[:-1] + bytes([data[-1] ^ 1]),
            "empty": b"",
            "a few bytes": data[:20],
            "another's": other.read_bytes(),
        }[damage]
    )
    with pytest.warns(LowprecWarning, match=r"it is damaged; it is kept as .*\.o\.damaged"):
        assert kept() == "compiled"
    assert kept() == "read"


def test_an_interrupt_anywhere_leaves_files_that_are_whole(kept: Callable[..., str], tmp_path: Path) -> None:
    names: list[str] = []

    def first() -> None:
        names.append(f"kernel {len(names)}")
        kept(names[-1])

    sources = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error", LowprecWarning)
        # Of files that an interrupt keeps from being closed.
        warnings.simplefilter("ignore", ResourceWarning)
        for error in interrupts.interrupted(first):
            assert type(error) is interrupts.Interrupt
            sources.add(kept(names[-1], fresh=False))
            assert not list(tmp_path.rglob("*.tmp"))
        error = None
        gc.collect()
    assert sources == {"compiled", "read"}
