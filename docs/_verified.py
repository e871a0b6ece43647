"""The features that worked on a GPU, according to the committed reports alone.

A report is a file `benchmarks/results/gpu-*.json` of `benchmarks/gpu_report.py`. A feature is shown by tests with its
marker, `@pytest.mark.feature("words")`, that ran on a GPU; three features are shown by measurements.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu import tests

from lowprec.recipes import MODES

RESULTS = tests.FOLDER.parents[1] / "benchmarks" / "results"
NOT_SEEN = "not yet seen on a GPU"

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """A feature that a measurement shows.

    Parameters
    ----------
    words : str
    part : str
        Of the report.
    where : tuple of (str, object)
        What a row must hold.
    """

    words: str
    part: str
    where: tuple[tuple[str, Any], ...]


_MODES = ("fp32", "fp32_pedantic", "tf32", "bf16", "fp16")
_STORED = (
    "float64", "float32", "float16", "bfloat16", "complex64", "complex128", "int8", "float8_e4m3fn",
    "float8_e5m2",
)  # fmt: skip
_EMULATED = (
    ("bf16x9", "float32"), ("bf16x9", "complex64"), ("fp64_emulated", "float64"), ("fp64_emulated", "complex128"),
)  # fmt: skip
_LIBRARIES = ("torch", "cupy")
_CAPTURED = (
    "fp32", "tf32", "bf16", "fp16", "float16, bias and relu", "int8", "a bias of another type", "complex64 in bf16",
)  # fmt: skip

#: By group, in the order of the page.
FEATURES: dict[str, tuple[str | Measured, ...]] = {
    "Storage types, exact on small whole numbers": (
        *(f"stored as {dtype}" for dtype in _STORED),
        "float8 with scales, as numbers and on the device",
        "float8 widened, with scales as numbers",
        "two types in one product",
        "a result of another type",
        "mxfp8 by cuBLASLt's block-scaled mode",
        "nvfp4 by cuBLASLt's block-scaled mode",
        "quantised operands, widened",
    ),
    "Modes, within the plan's bound": (
        *(f"mode {mode}" for mode in (*_MODES, *MODES) if mode != "int8_blocks"),
        "recipes with stochastic rounding and a Hadamard transform",
        Measured("modes that quantise, products of large matrices", "quantizing", ()),
        "mode fp16 beyond float16's range",
        "schemes that recover FP32",
        *(f"{mode} of {dtype} by a compute type of cuBLAS" for mode, dtype in _EMULATED),
        "scopes, guard and `rtol`",
        "Inf and NaN",
        Measured("`NVIDIA_TF32_OVERRIDE=0` forbids TF32 in cuBLAS", "override-0", ()),
    ),
    "Programs": (
        "guard: `cublasSgemm` on lowprec's handle",
        "a user's own cuBLAS handle keeps its mode in the guard",
        *(f"guard: product and solver of {library}" for library in ("PyTorch", "CuPy", "JAX")),
        "`NVIDIA_TF32_OVERRIDE`, handles and modes",
        "`lowprec.matmul` in PyTorch: gradients",
        "`intercept` in PyTorch, with gradients",
        "`lowprec.matmul` in a compiled graph",
        "`audit` finds TF32",
        "`linalg.solve` by refinement",
        "loss scaling with PyTorch: a step, and one that overflows",
    ),
    "Shapes and layouts": (
        "transposed and strided views",
        "batches, and one dimension",
        "size zero",
        "odd extents and addresses",
        "an `out` that overlaps an operand",
    ),
    "Epilogues": (
        "`alpha`, `beta`, `c`, `out`",
        "`bias`, `relu`, `gelu`",
        Measured("sums of split products stay in FP32", "accumulation", (("question", "split"),)),
    ),
    "Arrays, streams and devices": (
        *(
            f"{library}: {what}"
            for library in _LIBRARIES
            for what in (
                "operands still being written", "operands dropped at once", "threads on streams of their own",
                "with another library's operand",
            )
        ),
        "JAX: operands still being computed",
        Measured("JAX: operands pending, dropped and donated", "ordering", ()),
        "arrays known by DLPack alone",
        "several devices",
        "memory does not grow",
    ),
    "CUDA graphs": tuple(
        f"CUDA graph of {library}: {case}" for library in _LIBRARIES for case in _CAPTURED
    )
    + tuple(f"CUDA graph of {library}, prepared operand" for library in _LIBRARIES),
    "The rest": (
        "prepared operands",
        "2:4 sparse operands of float16, bfloat16 and int8",
        "2:4 sparse operands, pruned, and with an epilogue",
        "gradients of a scaled loss, `LossScaler`",
        "kernels that pack operands",
        "kernels that quantise operands",
        "kernels that apply epilogues",
        "the plan names algorithm and units, `info` the device",
        "`autotune`, and its choice on disk",
        "`profile`",
        "`cublas_handle` and the guard",
        "what cannot be done is refused",
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


def judged(feature: str | Measured, report: Report) -> list[bool]:
    """Return a report's rows on a feature; rows that ran in software are ignored."""
    results = report["results"]
    if isinstance(feature, Measured):
        found = results.get(feature.part, {}).get("rows", [])
        own = [r for r in found if all(r.get(name) == value for name, value in feature.where)]
    else:
        rows = (r for part in results.values() for r in part["rows"])
        own = [r for r in rows if r.get("feature") == feature and r["device"] == "gpu"]
    return [r["ok"] for r in own if r["ok"] is not None]


def seen(feature: str | Measured, found: Sequence[Report]) -> str:
    """Return where and when a feature worked, and where it failed."""
    words = []
    for report in found:
        told = judged(feature, report)
        if told:
            words.append(title(report) if all(told) else f"**failed** on {title(report)}")
    return "; ".join(words) or NOT_SEEN


def summary(found: Sequence[Report]) -> str:
    """Return the number of features that worked in a report, as a sentence."""
    features = [feature for group in FEATURES.values() for feature in group]
    if not found:
        return "Nothing was seen on a GPU yet: the tests of the features below ran with a software CUDA.\n"
    count = sum(any(all(j) for r in found if (j := judged(feature, r))) for feature in features)
    return f"{count} of {len(features)} features worked on a GPU ({', '.join(dict.fromkeys(map(title, found)))}).\n"


def title(report: Report) -> str:
    """Return device and date of a report."""
    machine = report["machine"]
    return f"{machine['gpu']['devices'][0]['name']}, {machine['date']}"


def markers(folder: Path = tests.FOLDER) -> dict[str, list[str]]:
    """Return the tests by words of their marker, with fields like `{mode}` unreplaced."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for decorator in getattr(node, "decorator_list", ()):
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(
                    "mark.feature"
                ):
                    for words in map(ast.literal_eval, decorator.args):
                        found.setdefault(words, []).append(f"`{path.name}`, `{node.name}`")
    return found  # fmt: skip


def matches(marker: str, feature: str) -> bool:
    """Whether a marker's words, with fields replaced, can be those of a feature."""
    parts = [re.escape(part) for part in re.split(r"\{\w+\}", marker)]
    return re.fullmatch(".+".join(parts), feature) is not None


def covered_by(feature: str | Measured, marked: Mapping[str, list[str]]) -> str:
    """Return the first of the tests that show a feature, on the software CUDA where there is no GPU.

    Raises
    ------
    ValueError
        If no test does.
    """
    if isinstance(feature, Measured):
        return f"none; measured by the part `{feature.part}`"
    exact = {feature: marked[feature]} if feature in marked else marked
    found = [test for marker, tests in exact.items() if matches(marker, feature) for test in tests]
    if not found:
        raise ValueError(f"no test bears the marker of the feature {feature!r}")
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return found[0] + more


def rows(found: Sequence[Report]) -> Iterable[list[str]]:
    """Return the table's rows, under the names of their groups."""
    marked = markers()
    for group, features in FEATURES.items():
        yield [f"**{group}**", "", ""]
        for feature in features:
            words = feature.words if isinstance(feature, Measured) else feature
            yield [words, seen(feature, found), covered_by(feature, marked)]


def conditions(report: Report) -> str:
    """Return the conditions of a report."""
    machine = report["machine"]
    gpu, versions = machine["gpu"], machine["versions"]
    device = gpu["devices"][0]
    driver = machine.get("nvidia_smi", {}).get("driver_version", "unknown")
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
    """Return the claims about a GPU, next to the measurements."""
    verdicts = {True: "met", False: "**missed**", None: "not measured"}
    for claim in report["claims"]:
        value = "-" if claim["value"] is None else f"{claim['value']:.3g}"
        by_size = ", ".join(f"{n}: {v:.2f}" for n, v in claim.get("by_size", {}).items()) or "-"
        limit = f"{claim['relation']} {claim['limit']:g}"
        yield [claim["what"], value, by_size, limit, verdicts[claim["met"]]]
