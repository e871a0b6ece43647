"""Machine code of kernels on disk: a later process compiles nothing, and what is damaged is made anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowprec.backends.cpu import casting

pytestmark = pytest.mark.skipif(
    not casting.has_kernels(), reason="numba is not installed, or switched off"
)

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
casting.cast([(x, got)], TF32)
assert (got == want).all()
from lowprec.backends.cpu.packed import native
print(len(native.compiled_here))
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


def _run(program: str, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "LOWPREC_CACHE_DIR": str(cache)},
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip


def test_a_later_process_compiles_nothing(tmp_path: Path) -> None:
    first, second = _run(_ROUND, tmp_path), _run(_ROUND, tmp_path)
    assert (first.stdout, first.stderr) == ("1\n", "")
    assert (second.stdout, second.stderr) == ("0\n", "")
    (file,) = (tmp_path / "kernels").iterdir()
    linked = _run(_LINK, tmp_path, str(file))
    assert linked.returncode == 0, linked.stderr

    data = file.read_bytes()
    file.write_bytes(data[:-100])
    again = _run(_ROUND, tmp_path)
    assert again.stdout == "1\n"
    assert "it is damaged; it is kept as" in again.stderr
    assert _run(_ROUND, tmp_path).stdout == "0\n"


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    done = _run(_ROUND, tmp_path / "file")
    assert done.stdout == "1\n"
    assert "lowprec cannot write to its cache" in done.stderr
