"""Write the tables of the documentation that restate code.

usage: python docs/_generate.py [--check]

Each table is generated from the object that the program uses, and is committed, so that every site that renders
Markdown shows it. ``--check`` writes nothing and fails if a committed table is out of date.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
sys.path.insert(0, str(DOCS.parent / "benchmarks"))
sys.path.insert(0, str(DOCS.parent / "tests" / "frameworks"))

import _pages
import _verified
import generated
import torch_matrix
from generated import table

import lowprec
from lowprec import errors, modes
from lowprec.architectures import Architecture
from lowprec.backends.cpu.emulation.arithmetic import formats_of
from lowprec.backends.cpu.kernel_rows import KERNELS, kernels_of
from lowprec.formats import BLOCK_FORMATS, GROUPS, WHOLE, BlockFormat
from lowprec.planning import ACTIVATIONS, Capabilities
from lowprec.planning.gpus import MODELS
from lowprec.planning.kernels import choose_kernel
from lowprec.planning.lowering.scale_modes import fp4_units_multiply, scale_modes
from lowprec.planning.plan import compute_words
from lowprec.planning.tensor_cores import BLOCK_KINDS, BLOCK_SCALES_SINCE, accumulation
from lowprec.policy import environment
from lowprec.policy.controllers import controllers
from lowprec.recipes import FORMATS


def _code(text: str | None) -> str:
    return f"`{text}`" if text and text != "-" else "-"


def _first_line(item: object) -> str:
    return (inspect.getdoc(item) or "").partition("\n\n")[0].replace("``", "`")


def mode_table() -> str:
    """Return the math modes that this version runs, with the neighbours' names."""
    header = ["mode", "float32 operands become", "products", "JAX preset", "cuBLASLt compute type"]
    rows = [
        [
            _code(row.mode.value),
            row.inputs,
            str(len(row.pairs)),
            _code(row.jax_preset),
            _gpu_words(row),
        ]
        for row in modes.TABLE
    ]
    return table(header, rows)


def _gpu_words(row: modes.ModeRow) -> str:
    """Return the compute type passed to cuBLASLt; "-" for a mode that is an alias of another."""
    if row.mode is modes.MathMode.FP32_EMULATED:
        return "-"
    words = compute_words(row.compute_type, row.data)
    if narrow := _narrow_units(row):
        return f"COMPUTE_32F on {narrow}, else on {row.data} data"
    if row.emulation is None:
        return words
    return f"{words}; {row.emulation} on some GPUs"


def _narrow_units(row: modes.ModeRow) -> str:
    """Return the codes that tensor cores multiply, and their compute capabilities; empty if there are none."""
    rules = FORMATS.get(row.mode.value)
    if rules is None:
        return ""
    layout = lowprec.plan(*np.ones((2, 128, 128), np.float32), math_mode=row.mode).layout
    generations = ((8, 9), (9, 0), (10, 0))
    of_fp8 = [each for each in generations if scale_modes(rules, layout, each) is not None]
    of_fp4 = [each for each in generations if fp4_units_multiply(rules, layout, each)]
    if not of_fp8 + of_fp4:
        return ""
    first = min(of_fp8 + of_fp4)
    since = "{}.{}".format(*first)
    if generations[-1] in of_fp8 + of_fp4:
        since += " and later"
    return f"{'FP4' if of_fp4 else 'FP8'} data on compute capability {since}"


def alias_table() -> str:
    """Return a mode's other names."""
    names: dict[str, list[str]] = {}
    for alias, mode in modes.ALIASES.items():
        names.setdefault(mode.value, []).append(_code(alias))
    return table(["mode", "also accepted"], [[_code(m), ", ".join(a)] for m, a in names.items()])


def variable_table() -> str:
    """Return the environment variables that lowprec reads or reports."""
    rows = [[_code(v.name), v.legal, v.default, v.meaning] for v in environment.VARIABLES]
    return table(["variable", "values", "where unset", "meaning"], rows)


def kernel_table() -> str:
    """Return the CPU's kernels for each kind of numbers, in order of preference."""
    formats = ("float64", "float32", "tf32", "float16", "bfloat16", "int8")
    rows = [
        [fmt, "; else ".join(row.units for row in KERNELS if not row.formats or fmt in row.formats)]
        for fmt in formats
    ]
    return table(["numbers, once rounded", "multiplied by"], rows)


#: Generations of processors, their units for products, and the flags of these on x86-64.
_AVX512 = frozenset({"avx2", "avx512f"})
_VNNI = _AVX512 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
GENERATIONS = (
    ("Intel Haswell to Comet Lake, AMD Zen to Zen 3", "AVX2", frozenset({"avx2"})),
    ("Intel Alder Lake to Arrow Lake", "AVX2, AVX-VNNI", frozenset({"avx2", "avx_vnni"})),
    ("Intel Skylake-SP", "AVX-512", _AVX512),
    ("Intel Cascade Lake, Ice Lake, Tiger Lake", "AVX-512, VNNI", _VNNI),
    ("Intel Cooper Lake, AMD Zen 4 and Zen 5", "AVX-512, VNNI, BF16", _BF16),
    (
        "Intel Sapphire Rapids and later Xeons",
        "AMX, AVX-512, VNNI, BF16",
        _BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
    ),
    ("AArch64", "NEON", None),
    ("AArch64 with dot products (Apple M1, Neoverse N1)", "NEON, DotProd", None),
    ("AArch64 with bfloat16 (Apple M2, Neoverse V1)", "NEON, DotProd, BF16", None),
)


def generation_table() -> str:
    """Return which kernel multiplies on each generation of processors."""
    header = ["processors", "units", "`fp32`", "`tf32`, `fp16`", "`bf16`", "int8"]
    rows = []
    for processors, units, flags in GENERATIONS:
        every = kernels_of("x86_64" if flags else "aarch64")
        names = {
            "fp32_neon",
            *(("int8_neon",) * ("Dot" in units)),
            *(("bf16_neon",) * ("BF16" in units)),
        }
        found = (
            x.requires
            for x in every
            if x.requires and (flags or set()).issuperset(x.instruction_sets)
        )
        able = Capabilities(
            "cpu", processors, every, frozenset(found) if flags else frozenset(names)
        )
        kernels = [
            _code(choose_kernel(fmt, able)[0].name)
            for fmt in ("float32", "tf32", "float16", "bfloat16", "int8")
        ]
        assert kernels[1] == kernels[2]
        rows.append([processors, units, kernels[0], *kernels[2:]])
    return table(header, rows)


def emulation_table() -> str:
    """Return how the tensor cores that can be emulated sum."""
    names = {"float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}
    rows = [
        [
            architecture.label,
            _code(names.get(fmt, fmt)),
            str(model.group),
            str(model.fraction_bits),
            str(model.least_exponent),
            str(model.instruction_k),
        ]
        for architecture in Architecture
        for fmt in formats_of(architecture, *BLOCK_KINDS)
        if (model := accumulation(fmt, architecture.capability))
    ]
    header = ["tensor cores", "format", "group $g$", "fraction bits $F$", "least exponent"]
    return table([*header, "k of an instruction"], rows)


def gpu_table() -> str:
    """Return the models of NVIDIA GPUs for which a plan can be made without one."""
    formats = {
        "FP64": "float64",
        "FP32": "float32",
        "TF32": "tf32",
        "BF16": "bfloat16",
        "FP16": "float16",
    }
    formats |= {"FP8": "float8_e4m3fn", "INT8": "int8"}
    rows = [
        [
            _code(model.key),
            model.source,
            "{}.{}".format(*model.compute_capability),
            str(model.multiprocessors),
            *(
                f"{model.peak_tflops[f]:g}" if f in model.peak_tflops else "-"
                for f in formats.values()
            ),
            str(model.bandwidth),
            str(model.memory),
            f"{model.l2:g}",
        ]
        for model in MODELS
    ]
    header = ["`device=`", "source", "capability", "SMs", *(f"{name}, TFLOP/s" for name in formats)]
    return table([*header, "GB/s", "GB", "L2, MB"], rows, words=2)


def guard_table() -> str:
    """Return the libraries whose switches the guard sets, and how far these reach."""
    rows = [
        [
            _code(controller.name),
            str(controller.tier),
            "; ".join(f"{_code(name)}: {acts_on}" for name, acts_on in controller.switches.items()),
            ", ".join(_code(mode.value) for mode in controller.modes),
        ]
        for controller in controllers()
    ]
    return table(["library", "reaches", "switches and the products they act on", "modes"], rows)


def _results(name: str) -> list[dict[str, Any]]:
    """Return the results of a benchmark on all machines."""
    paths = sorted((DOCS.parent / "benchmarks" / "results").glob(f"{name}-*.json"))
    return [r for path in paths for r in json.loads(path.read_text(encoding="utf-8"))["results"]]


def _measured_narrow() -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Return the results of `bench_narrow.py`: rows of a matrix of N(0, 1), its errors, and speeds with 8 rows."""
    results = _results("narrow")
    rows = {r["format"]: r for r in results if r["kind"] == "normal"}
    errors = {name: f"{100 * r['relative_error']:.2f} %" for name, r in rows.items()}
    weights = [r for r in results if r["kind"] == "weight" and r["m"] == 8]
    return rows, errors, {r["format"]: f"{r['speed']['median']:.2f}" for r in weights}


#: Weights of the README by their names in `narrow_libraries.py`, with the formats of their errors.
_WEIGHTS = {
    "torch bfloat16": ("PyTorch: `bfloat16`", ""),
    "onnxruntime 8 bits, accuracy_level 4": ("ONNX Runtime: 8 bits, rows in int8", ""),
    "onnxruntime 4 bits, accuracy_level 4": ("ONNX Runtime: 4 bits, rows in int8", ""),
    "lowprec float by mxfp8": ("`mxfp8`, rows in float32", "mxfp8"),
    "lowprec float by nvfp4": ("`nvfp4`, rows in float32", "nvfp4"),
    "lowprec float by mxfp4": ("`mxfp4`, rows in float32", "mxfp4"),
    "lowprec int8_blocks by int8": ("`int8`, rows in int8", ""),
    "lowprec int8_blocks by nvfp4": ("`nvfp4`, rows in int8", "nvfp4"),
    "lowprec int8_blocks by mxfp4": ("`mxfp4`, rows in int8", "mxfp4"),
}


def weight_table() -> str:
    """Return weights with their size and error, and the speed of few rows times them on one thread."""
    formats, errors, _ = _measured_narrow()
    speeds: dict[str, dict[int, str]] = {}
    for r in _results("narrow"):
        if r["kind"] == "compared" and r["threads"] == 1 and r["k"] == r["n"]:
            speeds.setdefault(r["name"], {})[r["m"]] = f"{r['speed']['median']:.2f} x"
    cells = []
    for name, (weight, of_error) in _WEIGHTS.items():
        size = f"{formats[of_error]['nbytes'] / 1e6:.1f} MB" if of_error else "-"
        found = [speeds[name][m] for m in (1, 4, 32)]
        cells.append([weight, size, errors.get(of_error, "-"), *found])
    return table(["weight", "size", "error", "1 row", "4 rows", "32 rows"], cells, words=1)


def narrow_table() -> str:
    """Return the formats of quantised arrays, with the errors that `bench_narrow.py` measured."""
    _, errors, speeds = _measured_narrow()
    names = {"float8_e4m3fn": "E4M3", "float4_e2m1fn": "E2M1", "float8_e8m0fnu": "E8M0"}
    names |= {name: name for name in ("float32", "int8", "int4")}
    rows = []
    for row in BLOCK_FORMATS.values():
        length = "a vector" if row.block == WHOLE else f"{' or '.join(map(str, GROUPS))} numbers"
        length = length if row.has_float_scales else f"{row.block} numbers"
        scales = [f"{names[row.scales.name]} for {length}"] if row.scales else []
        scales += ["float32 for the array"] if row.has_scale else []
        numbers = (row.elements.smallest_subnormal, row.elements.largest)
        smallest, largest = (f"{x:g}" if x > 0.1 else f"2^{math.log2(x):.0f}" for x in numbers)
        bits = row.bits + (8 * (1 + 3 * row.has_float_scales) / row.block if row.block > 0 else 0)
        elements = f"{names[row.elements.name]}, {smallest} to {largest}"
        words = [_code(row.name), elements, "; ".join(scales), _gpu_call(row)]
        rows.append([*words, f"{bits:g}", errors.get(row.name, "-"), speeds.get(row.name, "-")])
    header = ["format", "elements", "scales", "cuBLASLt", "bits", "error", "speed"]
    return table(header, rows, words=4)


def _gpu_call(row: BlockFormat) -> str:
    """Return cuBLASLt's scale mode of a format, or how it is multiplied otherwise, and the first compute capability."""
    if row.scales is None:
        return "FP8 with float32 scales, 8.9"
    if not row.scale_mode:
        return "widened to float32" if row.has_float_scales else "widened to bfloat16"
    return f"{_code(row.scale_mode)}, {BLOCK_SCALES_SINCE[0]}.{BLOCK_SCALES_SINCE[1]}"


def verified_table() -> str:
    """Return the features that worked on a GPU, with device, date, and the test that covers each without one."""
    header = ["feature", "seen to work on", "test with the software CUDA"]
    return table(header, _verified.rows(_verified.reports()))


def verified_claims() -> str:
    """Return the figures of each report that was made on a GPU."""
    header = ["claim", "measured", "by size", "limit", ""]
    parts = [
        f"{_verified.conditions(report)}\n\n{table(header, _verified.claim_rows(report))}"
        for report in _verified.reports()
    ]
    return (
        "\n".join(parts)
        or "None yet: run `python benchmarks/gpu_report.py` on a machine with a GPU.\n"
    )


def torch_table() -> str:
    """Return the PyTorch transformations that lowprec's product supports, from the rows of the test."""
    rows = [
        [
            _code(row.name),
            *(
                torch_matrix.REFUSALS.get(row.refused.get(c, ""), "yes")
                for c in torch_matrix.COLUMNS
            ),
        ]
        for row in torch_matrix.ROWS
    ]
    return table(["transformation", *torch_matrix.COLUMNS], rows)


def error_table() -> str:
    """Return the exception classes with their built-in bases."""
    rows = []
    for name in errors.__all__:
        bases = getattr(errors, name).__mro__[1:]
        builtin = [_code(b.__name__) for b in bases if b.__module__ == "builtins"]
        shown = [b for b in builtin if b not in {"`BaseException`", "`object`"}]
        rows.append([_code(name), shown[0], _first_line(getattr(errors, name))])
    return table(["class", "is also a", "raised for"], rows)


def literal_types() -> str:
    """Return the types of the names that arguments accept, for type checkers."""
    presets = {row.jax_preset.lower(): row.jax_preset for row in modes.TABLE if row.jax_preset}
    names = {
        "ModeName": [
            *map(str, modes.MathMode),
            *(presets.get(alias, alias) for alias in modes.ALIASES),
        ],
        "ActivationName": ACTIVATIONS,
        "ArchitectureName": map(str, Architecture),
    }
    lines = []
    for name, values in names.items():
        text = ", ".join(f'"{value}"' for value in values)
        one = f"{name}: TypeAlias = Literal[{text}]"
        rest = textwrap.fill(text, 120, initial_indent=" " * 4, subsequent_indent=" " * 4)
        lines.append(
            one if len(one) <= 120 else f"{name}: TypeAlias = Literal[\n{rest},\n]  # fmt: skip"
        )
    return "\n".join(lines) + "\n"


def snippets() -> dict[Path, str]:
    """Return the text of every generated file, those with a generated section included."""
    made = {
        "modes.md": mode_table(),
        "aliases.md": alias_table(),
        "variables.md": variable_table(),
        "kernels.md": kernel_table(),
        "generations.md": generation_table(),
        "emulation.md": emulation_table(),
        "gpus.md": gpu_table(),
        "guard.md": guard_table(),
        "torch.md": torch_table(),
        "errors.md": error_table(),
        "narrow.md": narrow_table(),
        "verified.md": verified_table(),
        "verified_summary.md": _verified.summary(_verified.reports()),
        "verified_claims.md": verified_claims(),
    }
    files = {DOCS / "_generated" / name: text for name, text in made.items()}
    files[README] = generated.filled(README, "weights", weight_table())
    source = Path(modes.__file__)
    files[source] = generated.filled(source, "names for type checkers", literal_types())
    return files | _pages.pages(files)


def write() -> None:
    """Bring every generated file up to date."""
    generated.write(snippets())


def check() -> int:
    """Report the generated files that are out of date; return their number."""
    return generated.check(snippets())


if __name__ == "__main__":
    sys.exit(generated.main(__doc__ or "", write, check))
