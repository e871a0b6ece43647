"""What was seen to work on a GPU, feature by feature: read from the committed reports, and from nothing else.

A report is `benchmarks/results/gpu-*.json`, as `benchmarks/gpu_report.py` writes it. Its rows say on what they were
measured; those of a CPU count for nothing here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

NOT_SEEN = "not yet seen on a GPU"
NO_TEST = "none"

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Evidence:
    """Rows of a report that show a feature.

    Parameters
    ----------
    section : str
    where : tuple of (str, object)
        What a row must hold.
    """

    section: str
    where: tuple[tuple[str, Any], ...] = ()

    def rows(self, report: Report) -> list[Mapping[str, Any]]:
        """Return the rows of a report that were measured on a GPU and judged."""
        found = report["results"].get(self.section, {}).get("rows", [])
        wanted = (("device", "gpu"), *self.where)
        return [r for r in found if r["ok"] is not None and all(r.get(k) == v for k, v in wanted)]


@dataclass(frozen=True)
class Feature:
    """One line of the table.

    Parameters
    ----------
    words : str
    evidence : tuple of Evidence
        All of them must have rows, and none of the rows may have failed.
    test : str
        `module::function` under `tests/cuda` that covers it with the software CUDA; empty where none does.
    """

    words: str
    evidence: tuple[Evidence, ...]
    test: str = ""


def _see(section: str, **where: Any) -> tuple[Evidence, ...]:
    return (Evidence(section, tuple(where.items())),)


def _stored(dtype: str, **where: Any) -> tuple[Evidence, ...]:
    return _see("accuracy", dtypes=[dtype, dtype], **where)


_PRODUCTS = "test_products.py::test_products"
_EPILOGUES = "test_products.py::test_epilogues"
_GRAPHS = "test_streams.py::test_a_warm_product_can_be_captured"
_STREAMS = "test_arrays.py::test_another_librarys_stream_is_waited_for"

#: By group, in the order of the page.
FEATURES: dict[str, tuple[Feature, ...]] = {
    "Storage types, within the plan's bound": (
        Feature("float64", _stored("float64"), _PRODUCTS),
        Feature("float32", _stored("float32", mode="fp32"), _PRODUCTS),
        Feature("float16", _stored("float16"), _PRODUCTS),
        Feature("bfloat16", _stored("bfloat16"), _PRODUCTS),
        Feature("complex64", _stored("complex64", mode="fp32"), _PRODUCTS),
        Feature("complex128", _stored("complex128"), _PRODUCTS),
        Feature("int8, exact", _stored("int8") + _see("features", name="integers"), _PRODUCTS),
        Feature("float8", _stored("float8_e4m3fn"), _PRODUCTS),
        Feature(
            "float8 with scales, as numbers and on the device",
            _see("features", name="float8"),
            "test_products.py::test_fp8_scales",
        ),
        Feature(
            "two types in one product",
            _see("features", name="mixed_types"),
            "test_products.py::test_two_element_types",
        ),
    ),
    "Modes, within the plan's bound": (
        *(
            Feature(
                f"`{mode}`",
                _stored("float32", mode=mode) + _stored("complex64", mode=mode),
                "test_products.py::test_errors_are_within_the_plan_s_bound",
            )
            for mode in ("fp32", "fp32_pedantic", "tf32", "bf16", "fp16")
        ),
        Feature(
            "`fp16` beyond float16's range",
            _stored("float32", mode="fp16", distribution="scaled")
            + _see("features", name="fp16_range"),
            "test_products.py::test_float16_is_scaled_where_its_range_is_left",
        ),
        Feature(
            "scopes, guard and `rtol`",
            _see("features", name="mode_scopes"),
            "test_streams.py::test_rtol_chooses_among_the_gpu_s_modes",
        ),
        Feature(
            "Inf and NaN",
            _see("features", name="no_numbers"),
            "test_products.py::test_inf_and_nan_go_through_as_they_would",
        ),
        Feature(
            "`NVIDIA_TF32_OVERRIDE=0` forbids TF32 in cuBLAS",
            _see("override", override="0"),
            "test_streams.py::test_the_override_of_nvidia_holds",
        ),
    ),
    "Shapes and layouts": (
        Feature(
            "transposed and strided views",
            _see("features", name="strides"),
            "test_products.py::test_views",
        ),
        Feature(
            "batches, and one dimension",
            _see("features", name="batches"),
            "test_products.py::test_batches",
        ),
        Feature("size zero", _see("features", name="empty"), "test_products.py::test_nothing_to_do"),
        Feature("odd extents and addresses", _see("features", name="odd_pointers"), _PRODUCTS),
        Feature(
            "an `out` that overlaps an operand",
            _see("features", name="overlapping_out"),
            "test_products.py::test_out_that_is_also_an_operand",
        ),
    ),
    "Epilogues": (
        Feature("`alpha`, `beta`, `c`, `out`", _see("features", name="addends"), _EPILOGUES),
        Feature(
            "`bias`, `relu`, `gelu`",
            _see("features", name="epilogues") + _see("epilogues", by="lowprec"),
            _EPILOGUES,
        ),
        Feature(
            "sums of split products stay in FP32", _see("beta", question="split"),
            "test_mutations.py::test_a_mistake_in_the_call",
        ),
    ),
    "Arrays, streams and devices": (
        Feature(
            "PyTorch, streams in threads", _see("streams", name="torch, streams in threads"), _STREAMS
        ),
        Feature(
            "PyTorch, operands still being written",
            _see("streams", name="torch, operands still being written"),
            _STREAMS,
        ),
        Feature(
            "PyTorch, operands dropped at once",
            _see("streams", name="torch, operands dropped at once"),
            "test_arrays.py::test_operands_known_only_by_dlpack_are_held_until_they_were_read",
        ),
        Feature("CuPy, a stream of its own", _see("streams", name="cupy, a stream of its own"), _STREAMS),
        Feature("JAX", _see("streams", name="jax"), ""),
        Feature(
            "PyTorch with CuPy in one product",
            _see("streams", name="torch with cupy"),
            "test_arrays.py::test_another_librarys_stream_waits_afterwards",
        ),
        Feature(
            "arrays known by DLPack alone",
            _see("features", name="dlpack"),
            "test_arrays.py::test_a_consumer_reads_a_result_once_it_is_there",
        ),
        Feature(
            "several devices",
            _see("streams", name="several devices"),
            "test_streams.py::test_a_device_that_is_not_current",
        ),
        Feature(
            "memory does not grow",
            _see("features", name="memory"),
            "test_memory.py::test_what_is_unused_is_bounded_and_the_oldest_goes_first",
        ),
    ),
    "CUDA graphs, replayed bit by bit": (
        *(
            Feature(words, _see("graphs", route=route), test)
            for words, route, test in (
                (
                    "operands as they lie",
                    "direct",
                    _GRAPHS,
                ),
                ("operands rewritten", "packed", _GRAPHS),
                ("operands rewritten, result staged", "packed and aside", _GRAPHS),
                ("result staged", "aside", _GRAPHS),
            )
        ),
    ),
    "The rest": (
        Feature(
            "kernels compiled by NVRTC",
            _see("features", name="modes"),
            "test_compile.py::test_nvrtc_compiles_the_kernels",
        ),
        Feature(
            "what these kernels compute",
            _see("features", name="modes") + _see("features", name="addends"),
            "test_convert.py::test_every_packing",
        ),
        Feature(
            "the plan names algorithm and units",
            _see("features", name="plans"),
            "test_streams.py::test_a_plan_shows_what_cublaslt_chose",
        ),
        Feature(
            "`autotune`",
            _see("features", name="autotune"),
            "test_autotune.py::test_nothing_of_the_caller_s_is_written",
        ),
        Feature(
            "`autotune` on disk",
            _see("features", name="autotune_on_disk"),
            "test_autotune.py::test_the_fastest_runs_from_now_on_and_in_the_next_process",
        ),
        Feature(
            "`profile`",
            _see("features", name="profile"),
            "test_streams.py::test_a_profile_takes_times_by_events",
        ),
        Feature(
            "`cublas_handle` and the guard",
            _see("features", name="cublas_handles"),
            "test_cublas_handle.py::test_the_guard_saves_sets_and_restores_the_raw_mode",
        ),
        Feature(
            "what cannot be done is refused",
            _see("features", name="refusals"),
            "test_missing.py::test_driver_and_devices",
        ),
        Feature("all of `tests/cuda`, on a machine with a GPU", _see("tests")),
    ),
}  # fmt: skip


def reports(folder: Path = RESULTS) -> list[Report]:
    """Return the reports that were made on a GPU, the oldest first; quick ones are refused."""
    found = []
    for path in sorted(folder.glob("gpu-*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["settings"]["quick"]:
            raise ValueError(f"{path.name} is from a quick run; measure again without --quick")
        if report["machine"]["gpu"]:
            found.append(report)
    return sorted(found, key=lambda r: r["machine"]["date"])


def seen(feature: Feature, found: Sequence[Report]) -> str:
    """Return where and when a feature was seen to work, and where it failed."""
    words = []
    for report in found:
        by_evidence = [[row["ok"] for row in e.rows(report)] for e in feature.evidence]
        if any(not all(judged) for judged in by_evidence):
            words.append(f"**failed** on {title(report)}")
        elif all(by_evidence):
            words.append(title(report))
    return "; ".join(words) or NOT_SEEN


def title(report: Report) -> str:
    """Return device and date of a report."""
    machine = report["machine"]
    return f"{machine['gpu']['devices'][0]['name']}, {machine['date']}"


def covered_by(feature: Feature, root: Path = ROOT) -> str:
    """Return the test that covers a feature with the software CUDA.

    Raises
    ------
    ValueError
        If there is no such test.
    """
    if not feature.test:
        return NO_TEST
    module, _, function = feature.test.partition("::")
    path = root / "tests" / "cuda" / module
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if not re.search(rf"^def {re.escape(function)}\(", text, re.MULTILINE):
        raise ValueError(f"{feature.words}: there is no test {function} in tests/cuda/{module}")
    return f"`{module}`, `{function}`"


def rows(found: Sequence[Report]) -> Iterable[list[str]]:
    """Return the table's rows, under the names of their groups."""
    for group, features in FEATURES.items():
        yield [f"**{group}**", "", ""]
        for feature in features:
            yield [feature.words, seen(feature, found), covered_by(feature)]


def conditions(report: Report) -> str:
    """Return under which conditions a report was made."""
    machine = report["machine"]
    gpu, versions = machine["gpu"], machine["versions"]
    device = gpu["devices"][0]
    driver = gpu.get("nvidia_smi", {}).get("driver_version", "unknown")
    names = (
        "lowprec",
        "torch",
        "cupy-cuda13x",
        "jax",
        "nvmath-python",
        "cuda-bindings",
        "cuda-core",
    )
    told = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    commit = machine.get("commit") or "unknown"
    return (
        f"{title(report)}: compute capability {device['compute_capability']}, driver {driver} "
        f"(CUDA {gpu['cuda']}), cuBLAS {gpu['cublas']}; {told}; commit {commit[:10]}."
    )


def claim_rows(report: Report) -> Iterable[list[str]]:
    """Return what was claimed of a GPU, beside what was measured."""
    verdicts = {True: "met", False: "**missed**", None: "not measured"}
    for claim in report["claims"]:
        value = "-" if claim["value"] is None else f"{claim['value']:.3g}"
        by_size = ", ".join(f"{n}: {v:.2f}" for n, v in claim.get("by_size", {}).items()) or "-"
        limit = f"{claim['relation']} {claim['limit']:g}"
        yield [claim["what"], value, by_size, limit, verdicts[claim["met"]]]
