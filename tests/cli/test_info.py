"""``lowprec.info()``: true, complete, harmless."""

import importlib
import json
import os
from dataclasses import replace
from importlib import metadata

import numpy as np
import pytest

import lowprec
from lowprec.backends.cpu import cpuinfo, library
from lowprec.backends.cpu.kernel_rows import BF16_AVX512, INT8_AVX512, kernels_of
from lowprec.checking.measure import load
from lowprec.cli import main
from lowprec.cli.commands.check import conditions, describe
from lowprec.planning import Capabilities

#: The modules whose names the tests replace.
module = importlib.import_module("lowprec.inspection")
cpu_module = importlib.import_module("lowprec.backends.cpu.device")
command = importlib.import_module("lowprec.cli.commands.info")
info = module.info


def _named(entries, name):
    return next(e for e in entries if e["name"] == name)


#: What the kernels for AVX-512 need.
AVX512 = frozenset({"avx2", "fma", "avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})


def test_versions_are_those_installed():
    libraries = info()["libraries"]
    assert _named(libraries, "numpy")["version"] == np.__version__
    assert _named(libraries, "numpy")["status"] == "loaded"
    for name in ("ml_dtypes", "torch", "jax", "cupy"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            assert _named(libraries, name)["status"] in ("missing", "loaded")
            continue
        assert (
            str(_named(libraries, name)["version"]).partition("+")[0] == version.partition("+")[0]
        )


def test_the_cpu_is_this_one():
    (cpu,) = info()["devices"]
    assert cpu["cores"] == os.cpu_count()
    assert 1 <= cpu["threads"] <= cpu["affinity"] <= cpu["cores"]
    present = {s["name"] for s in cpu["instruction_sets"] if s["present"]}
    assert present == cpuinfo.cpu_flags() & {s["name"] for s in cpu["instruction_sets"]}


def test_measurements_name_the_units(monkeypatch):
    able = Capabilities(
        "cpu",
        "a CPU",
        kernels_of("x86_64"),
        frozenset({"fp32_avx512", "bf16_avx512", "int8_avx512"}),
    )
    monkeypatch.setattr(cpu_module, "_capabilities", lambda: able)
    found = conditions(load())
    units = [BF16_AVX512.units, INT8_AVX512.units]
    assert found["units"] == units
    assert f", {', '.join(units)}, " in describe(found)
    monkeypatch.setattr(cpu_module, "_capabilities", lambda: replace(able, features=frozenset()))
    assert ", FP32 units alone, " in describe(conditions(load()))


@pytest.mark.parametrize("name", ["LOWPREC_MATH_MODE", "LOWPREC_FORCE_MATH_MODE"])
def test_a_bad_variable_is_a_warning(monkeypatch, name):
    monkeypatch.setenv(name, "fp17")
    found = info()
    assert found["mode"]["name"] is None
    assert name in found["mode"]["error"]
    assert any(name in w and "'fp17'" in w for w in found["warnings"])
    row = _named(found["environment"], name)
    assert (row["value"], row["effect"]) == ("fp17", "refused")


@pytest.fixture
def x86_64(monkeypatch):
    monkeypatch.setattr(cpuinfo.platform, "machine", lambda: "x86_64")


@pytest.fixture
def another(monkeypatch):
    """The capabilities are found again, and those of this machine afterwards."""
    cpu_module._capabilities.cache_clear()
    yield
    monkeypatch.undo()
    cpu_module._capabilities.cache_clear()


@pytest.mark.usefixtures("another")
def test_outside_x86_64(monkeypatch):
    monkeypatch.setattr(cpuinfo.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(cpuinfo, "system_flags", frozenset)
    monkeypatch.setattr(library, "units", lambda: frozenset({"fp32_neon", "bf16_neon"}))
    (cpu,) = info()["devices"]
    assert cpu["instruction_sets"] == []
    assert cpu["units"] == ["bfloat16 vector units (NEON)"]


@pytest.mark.usefixtures("x86_64", "another")
def test_without_tile_units(monkeypatch):
    monkeypatch.setattr(cpuinfo, "system_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setattr(library, "units", lambda: frozenset({"fp32_avx2"}))
    found = info()
    sets = found["devices"][0]["instruction_sets"]
    assert _named(sets, "avx2") == {
        "name": "avx2", "present": True, "used": True, "by": "lowprec's kernels fp32_avx2",
    }  # fmt: skip
    assert _named(sets, "amx_bf16") == {
        "name": "amx_bf16",
        "present": False,
        "used": False,
        "by": "",
    }
    assert any("no tile units: tf32, bf16, fp16, bf16x3" in w for w in found["warnings"])


@pytest.mark.usefixtures("x86_64", "another")
def test_modes_on_vector_units_are_not_those_in_fp32(monkeypatch):
    monkeypatch.setattr(
        library, "units", lambda: frozenset({"fp32_avx512", "bf16_avx512", "int8_avx512"})
    )
    (warning,) = (w for w in info()["warnings"] if "tile units" in w)
    modes = "tf32, fp16, tf32x3, fp16x3, fp16x4, fp16x3_unscaled, fp16x4_unscaled, fp16_karatsuba"
    assert (
        warning
        == f"this processor has no tile units: {modes} round the operands and multiply in FP32, no faster than fp32"
    )


@pytest.mark.usefixtures("another")
def test_without_kernels(monkeypatch):
    why = "built without kernels (no compiler)"
    monkeypatch.setattr(library, "unavailable_reason", lambda: why)
    monkeypatch.setattr(library, "units", frozenset)
    monkeypatch.setattr("lowprec.errors._given", set())

    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(module.sys.modules, "torch", None)
    found = info()
    statuses = {e["name"]: e["status"] for e in found["libraries"]}
    assert (statuses["numpy"], statuses["torch"]) == ("loaded", "missing")
    assert not any(s["used"] for s in found["devices"][0]["instruction_sets"])
    (warning,) = (w for w in found["warnings"] if "kernels (" in w)
    assert warning == f"{why}: products run on NumPy, no faster than fp32 in any mode"
    a = np.ones((3, 3), np.float32)
    with pytest.warns(
        lowprec.LowprecWarning,
        match=r"built without kernels \(no compiler\): products run on NumPy",
    ):
        plan = lowprec.plan(a, a, math_mode="bf16")
    assert plan.kernel_reason == f"NumPy's BLAS; {why}"


@pytest.mark.parametrize(
    ("flags", "core_type", "held", "says"),
    [
        (AVX512, "Haswell", None, "set OPENBLAS_CORETYPE=SkylakeX before"),
        (AVX512, "Haswell", "Haswell", "OPENBLAS_CORETYPE=Haswell holds it there; unset it"),
        (AVX512, "SkylakeX", None, None),
        (AVX512, "Cooperlake", None, None),
        (AVX512, None, None, None),
        (frozenset({"avx2", "fma"}), "Haswell", None, None),
        (frozenset(), "ARMV8", None, None),
    ],
)
def test_a_blas_below_the_machine(flags, core_type, held, says, monkeypatch):
    monkeypatch.setattr(cpuinfo, "cpu_flags", lambda: flags)
    monkeypatch.setattr(cpu_module, "_numpys_core_type", lambda: core_type)
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    if held is not None:
        monkeypatch.setenv("OPENBLAS_CORETYPE", held)
    found = info()
    assert found["blas"]["core_type"] == core_type
    warnings = [w for w in found["warnings"] if "NumPy's OpenBLAS has its kernels" in w]
    assert len(warnings) == (says is not None)
    if says is not None:
        assert says in warnings[0]


def test_the_kernels_of_numpys_blas_are_those_that_threadpoolctl_finds():
    controlling = pytest.importorskip("threadpoolctl", reason="threadpoolctl is not installed")
    found = {
        x["architecture"]
        for x in controlling.threadpool_info()
        if x["internal_api"] == "openblas" and "numpy" in x["filepath"]
    }
    core_type = info()["blas"]["core_type"]
    assert found == set() if core_type is None else found == {core_type}


def test_an_nvidia_driver_that_is_of_no_use(monkeypatch, tmp_path):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65\nGCC version:\n")
    monkeypatch.setattr(module, "_NVIDIA_DRIVER", driver)
    found = info()
    assert [d["device"] for d in found["devices"]] == ["cpu"]
    assert found["gpu"]["used"] is False
    assert found["gpu"]["driver"] == "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65"
    assert any("NVIDIA driver" in w for w in found["warnings"])
    monkeypatch.setattr(module, "_NVIDIA_DRIVER", tmp_path / "missing")
    assert not any("NVIDIA driver" in w for w in info()["warnings"])


def test_the_command_shows_switches_and_a_device_of_which_little_is_known(monkeypatch, capsys):
    rows = (
        ("torch", "get_float32_matmul_precision()", "medium", "process", None),
        ("cupy", None, None, "process", "OSError: no driver"),
    )
    keys = ("library", "switch", "value", "tier", "problem")
    shown = [dict(zip(keys, row, strict=True)) for row in rows]
    monkeypatch.setattr(module, "switch_rows", lambda: shown)
    facts = info()
    facts["devices"].append({"device": "ext_dev:0", "name": "a stranger", "memory_bytes": 3 << 30})
    monkeypatch.setattr(command, "info", lambda: facts)
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for words in ("get_float32_matmul_precision()", "medium", "cannot be read: OSError: no driver"):
        assert words in shown
    for words in ("ext_dev:0: a stranger", "3.0 GiB"):
        assert words in shown


def test_it_is_a_dictionary_that_prints_as_tables():
    found = lowprec.info()
    assert isinstance(found, dict)
    assert json.loads(json.dumps(found))["version"] == found["version"]
    assert len(repr(found).splitlines()) == 1
    assert len(repr(found)) < 200
    assert {"libraries", "warnings", f"lowprec {found['version']}"} <= {
        line.partition(",")[0] for line in str(found).splitlines()
    }
    assert found._repr_html_().count("<table>") == found._repr_html_().count("</table>") >= 4
