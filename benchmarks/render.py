"""Write the documentation's tables and charts from the result files.

usage: python benchmarks/render.py [--check]

Tables are written to `docs/_generated/bench_*.md`, one of them to the README, charts next to the result files.
`--check` writes nothing and fails if one of them is out of date. Drawing needs matplotlib, unless every chart is
current.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import common
import generated
import plot

GENERATED = generated.ROOT / "docs" / "_generated"
README = generated.ROOT / "README.md"
MISSING = "Not measured yet: run `python benchmarks/run_all.py`.\n"

Result = Mapping[str, Any]

#: One column of words, then numbers.
table = functools.partial(generated.table, words=1)


def load(folder: Path, benchmark: str) -> dict[Path, Result]:
    """Return the results of one benchmark, one per machine, those with AMX first; quick runs are refused."""
    found = {}
    for path in sorted(folder.glob(f"{benchmark}-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["benchmark"] != benchmark:
            continue
        if result["settings"]["quick"]:
            raise ValueError(f"{path.name} is from a quick run; measure again without --quick")
        found[path] = result
    return dict(sorted(found.items(), key=lambda item: not _has_amx(item[1])))


def _has_amx(result: Result) -> bool:
    return "amx_bf16" in result["machine"]["flags"]


def _version(result: Result) -> tuple[int, ...]:
    """Return the release that was measured."""
    return tuple(map(int, re.findall(r"\d+", result["machine"]["versions"]["lowprec"])[:3]))


def _machine_name(result: Result) -> str:
    # Shortens "Intel(R) Xeon(R) Processor" and "AMD EPYC 9B45 64-Core Processor".
    m = result["machine"]
    cpu = re.sub(r"\([^)]*\)|Processor|\d+-Core", "", m["cpu"])
    units = "with AMX" if _has_amx(result) else "without AMX"
    named = " ".join((*cpu.split(), *m["generation"].split()))
    return f"{named} {units}, {m['cores']} cores"


def _model(machine: Mapping[str, Any]) -> str:
    return f"{machine['cpu']} ({machine['generation']})" if machine["generation"] else machine["cpu"]


def _machine_line(result: Result) -> str:
    m = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    commit = "no commit" if m["commit"] is None else f"commit {m['commit'][:10]}"
    changed = " with changes" if m["dirty"] else ""
    units = ", ".join(m["flags"]) or "no vector units that are listed"
    threads = ", ".join(f"{name} {count}" for name, count in m["threads"].items()) or "unknown"
    return (
        f"Measured on {_model(m)}, {m['cores']} cores ({units}); threads: {threads}; "
        f"Python {m['python']}, {versions}; {commit}{changed}, {m['date']}.\n"
    )


def _claims(result: Result) -> str:
    if not result["claims"]:
        return ""
    # "1024: 1.01" stays together; a line may end behind the comma.
    rows = [
        [what, sizes.replace(": ", ":\N{NO-BREAK SPACE}"), *rest]
        for what, sizes, *rest in common.claim_rows(result["claims"])
    ]
    if any(c.get("by_size") for c in result["claims"]):
        return table(common.CLAIM_HEADER, rows, words=2)
    what, _, *rest = common.CLAIM_HEADER
    return table([what, *rest], [[row[0], *row[2:]] for row in rows])


# -- one page part per benchmark ------------------------------------------------------------------


def _by_row_and_column(corner: str, cells: Mapping[tuple[str, str], str]) -> str:
    """Return a table of cells by row and column, both in order of first occurrence."""
    names, columns = (list(dict.fromkeys(name)) for name in zip(*cells, strict=True))
    lines = [[name, *(cells.get((name, column), "-") for column in columns)] for name in names]
    return table([corner, *columns], lines)


def _us(time: Mapping[str, float]) -> str:
    return f"{1e6 * time['median']:.2f}"


def _size(row: Mapping[str, Any]) -> str:
    batch = f"{row['batch']} of " if row["batch"] > 1 else ""
    if row["m"] == row["k"] == row["n"]:
        return f"{batch}{row['n']}"
    return f"{batch}{row['m']} x {row['k']} x {row['n']}"


def gemm(result: Result) -> str:
    """Return speed by variant and size: GFLOP/s, and in brackets relative to numpy.matmul in float32."""
    square: dict[tuple[str, str], str] = {}
    others: dict[tuple[str, str], str] = {}
    for r in result["results"]:
        speed = r["speed"]["numpy float32"]["median"]
        cells = square if common.is_square(r) else others
        cells[r["variant"], _size(r)] = f"{r['gflops']:.0f} ({speed:.2f})"
    corner = "GFLOP/s (x numpy float32)"
    parts = [_by_row_and_column(corner, cells) for cells in (square, others) if cells]
    if left_out := ", ".join(result["settings"].get("left_out", ())):
        parts.append(f"Left out, more than 20 times slower than numpy float32: {left_out}.\n")
    return "\n".join([*parts, _claims(result)])


def overhead(result: Result) -> str:
    """Return the times of a small call, of its stages, and of the import."""
    calls, variants, stages = {}, {}, {}
    for r in result["results"]:
        if r["measured"] == "call":
            calls[r["library"], "lowprec.matmul"] = _us(r["lowprec"])
            calls[r["library"], "the library's own matmul"] = _us(r["own"])
        elif r["measured"] == "variant":
            both = f"{_us(r['lowprec'])} ({_us(r['own'])})"
            variants[r["variant"], r["library"]] = both
        elif r["measured"] == "station":
            stages |= {(r["station"], library): _us(r[library]) for library in r["libraries"]}
    parts = {
        "8 x 8 float32, us per call": calls,
        "us per call (with the library's own functions)": variants,
        "stage, us": stages,
    }
    tables = [_by_row_and_column(*part) for part in parts.items() if part[1]]
    return "\n".join([*tables, _claims(result)])


def accuracy(result: Result) -> str:
    """Return error by distribution, mode and size, and the bound, which is independent of the distribution."""
    errors: dict[str, dict[tuple[str, str], str]] = {}
    bounds: dict[tuple[str, str], float] = {}
    for r in result["results"]:
        at = r["mode"], f"n = {r['n']}"
        errors.setdefault(f"{r['distribution']}: error", {})[at] = f"{r['normalised']:.1e}"
        bounds[at] = max(bounds.get(at, 0.0), r["bound"])
    parts = {**errors, "bound": {at: f"{bound:.1e}" for at, bound in bounds.items()}}
    return "\n".join([*(_by_row_and_column(*part) for part in parts.items()), _claims(result)])


def guard(result: Result) -> str:
    """Return the time of a guard by loaded libraries."""
    header = {"none": "loaded: none", "torch": "loaded: torch", "jax": "loaded: + jax"}
    cells = {(r["block"], header[r["loaded"]]): _us(r["time"]) for r in result["results"]}
    return f"{_by_row_and_column('us', cells)}\n{_claims(result)}"


def unscale(result: Result) -> str:
    """Return the speed of dividing and checking gradients: GB/s, and in brackets relative to PyTorch's own pass."""
    cells = {}
    for r in result["results"]:
        speed = f" ({r['speed']['median']:.2f})" if r["speed"] else ""
        size = f"{r['arrays']:,} x {r['n']:,}" if r["arrays"] > 1 else f"{r['n']:,}"
        cells[r["variant"], size] = f"{r['gb_per_s']:.1f}{speed}"
    return f"{_by_row_and_column('GB/s (x PyTorch)', cells)}\n{_claims(result)}"


def transformer(result: Result) -> str:
    """Return the fastest other library's time over lowprec's: by shape, inside programs, in a training step."""
    rows = result["results"]
    products = {
        ("x".join(str(r[x]) for x in "mkn"), r["what"]): f"{r['speed']['median']:.2f}"
        for r in rows
        if r["kind"] == "product"
    }
    programs = {
        (r["what"], r["variant"]): f"{1e3 * r['time']['median']:.2f} ({r['slower_after']['median']:.2f})"
        for r in rows
        if r["kind"] == "program"
    }
    steps = [
        [r["variant"], f"{1e3 * r['time']['median']:.0f}", f"{r['relative_time']['median']:.2f}"]
        for r in rows
        if r["kind"] == "step"
    ]
    header = ("training step", "ms", "relative time")
    parts = [_by_row_and_column("m x k x n", products), _by_row_and_column("ms (relative)", programs)]
    return "\n".join([*parts, table(header, steps), _claims(result)])


def digits(result: Result) -> str:
    """Return accuracies by library and precision, and tests of equal means."""
    import bench_digits

    return f"{bench_digits.digits.table(result['results'])}\n{_claims(result)}"


def dask(result: Result) -> str:
    """Return the medians of the runs of a chunked product, and their ratios."""
    header = ("product", "limit of a worker", "runs", "seconds", "GiB", "spilled", "relative error")
    runs: dict[tuple[str, str], list[Result]] = {}
    for r in result["results"]:
        product = f"{r['variant']}, n = {r['n']:,}, chunks of {r['chunk']:,}"
        runs.setdefault((product, r["memory_limit"]), []).append(r)

    def median(of: list[Result], what: str) -> float:
        return statistics.median(r[what] for r in of)

    rows = [
        (
            *key,
            str(len(of)),
            f"{median(of, 'seconds'):.1f}",
            f"{median(of, 'peak_bytes') / 2**30:.2f}",
            f"{median(of, 'spilled_bytes') / 2**30:.2f}",
            f"{median(of, 'error'):.1e}",
        )
        for key, of in runs.items()
    ]
    return f"{generated.table(header, rows)}\n{_claims(result)}"


def recovery(result: Result) -> str:
    """Return the unaffected digits by scheme, for the largest matrices of each interval."""
    rows = result["results"]
    largest = max(r["n"] for r in rows)
    parts: dict[str, dict[tuple[str, str], str]] = {}
    for r in rows:
        if r["n"] == largest:
            cells = parts.setdefault(f"{r['arithmetic']}, n = {largest}: digits", {})
            digit = r["affected_digit"]
            cells[r["scheme"], r["interval"]] = "all" if digit is None else f"{digit:.1f}"
    return "\n".join([*(_by_row_and_column(*part) for part in parts.items()), _claims(result)])


def real(result: Result) -> str:
    """Return the error by mode and input, and below it the extents of each input."""
    parts: dict[str, dict[tuple[str, str], str]] = {}
    extents: dict[str, str] = {}
    for r in result["results"]:
        cells = parts.setdefault(f"{r['arithmetic']}: error", {})
        cells[f"`{r['mode']}`", r["input"]] = f"{r['normalised']:.1e}"
        extents[r["input"]] = f"{r['m']} x {r['k']} x {r['n']}"
    text = "; ".join(f"{name} {size}" for name, size in extents.items())
    tables = (_by_row_and_column(*part) for part in parts.items())
    return "\n".join([*tables, f"m x k x n: {text}.\n", _claims(result)])


def narrow(result: Result) -> str:
    """Return the errors of a transformer's weights, embeddings and similarities by format of the weights."""
    rows = [
        [
            f"`{r['format']}`",
            f"{r['nbytes'] / 1e6:.2f}",
            f"{100 * r['relative_error']:.2f} %",
            f"{r['cosine_mean']:.5f} ({r['cosine_min']:.5f})",
            f"{r['change_mean']:.5f} ({r['change_max']:.5f})",
            f"{r['same_neighbour']} of {r['sentences']}",
        ]
        for r in result["results"]
        if r["kind"] == "embeddings"
    ]
    header = ["weights", "MB", "error of a matrix, at most", "cosine, mean (least)"]
    errors = table([*header, "change of a similarity, mean (largest)", "same neighbour"], rows)
    speeds: dict[str, dict[tuple[str, str], str]] = {"storage": {}, "weight": {}}
    for r in result["results"]:
        if r["kind"] in speeds:
            where = f"{r['m']} x {r['n']} x {r['n']}" if "m" in r else f"n = {r['n']}"
            speeds[r["kind"]][f"`{r['format']}`", where] = f"{r['speed']['median']:.2f}"
    titles = ("both operands: speed over bfloat16", "the weight: speed over bfloat16")
    tables = (_by_row_and_column(*part) for part in zip(titles, speeds.values(), strict=True))
    return "\n".join([errors, *tables, _claims(result)])


def tradeoff(result: Result) -> str:
    """Return speed and error by mode and size; a star marks those that no other mode beats in both."""
    cells: dict[tuple[str, str], str] = {}
    for r in result["results"]:
        star = " *" if r["on_front"] else ""
        at = f"`{r['mode']}`", f"n = {r['n']}"
        cells[at] = f"{r['speed']['median']:.2f} x, {r['normalised']:.1e}{star}"
    return f"{_by_row_and_column('speed over fp32, error', cells)}\n{_claims(result)}"


def solve(result: Result) -> str:
    """Return speed over the best library by family and size, backward errors, and both by condition number."""
    own = [r for r in result["results"] if r["kind"] == "family"]
    speeds = {
        (f"{r['family']}, n = {r['n']}", r["variant"]): f"{r['time']['median']:.2f} ({r['speed']['median']:.2f})"
        for r in own
    }
    errors = {(f"{r['family']}, n = {r['n']}", r["variant"]): f"{r['backward_error']:.1e}" for r in own}
    by_condition = {
        (f"{r['condition']:.0e}", r["mode"]): f"{r['speed']['median']:.2f}, {r['steps']} steps, {r['method']}"
        for r in result["results"]
        if r["kind"] == "condition"
    }
    parts = {
        "seconds (speed over the best library)": speeds,
        "backward error": errors,
        "condition (speed, steps, method), by mode of the factor": by_condition,
    }
    return "\n".join([*(_by_row_and_column(*part) for part in parts.items()), _claims(result)])


#: The renderer of each benchmark's result.
PAGES: dict[str, Callable[[Result], str]] = {
    "gemm": gemm,
    "gemm-schemes": gemm,
    "overhead": overhead,
    "guard": guard,
    "accuracy": accuracy,
    "unscale": unscale,
    "transformer": transformer,
    "digits": digits,
    "recovery": recovery,
    "real": real,
    "narrow": narrow,
    "tradeoff": tradeoff,
    "solve": solve,
    "stress": _claims,
    "dask": dask,
}


def _part(benchmark: str, path: Path, result: Result) -> str:
    parts = [f"**{_machine_name(result)}**\n"]
    if benchmark in plot.CHARTS:
        _, shows = plot.CHARTS[benchmark]
        link = os.path.relpath(plot.chart_path(path), GENERATED).replace(os.sep, "/")
        parts.append(f"![{shows}]({link})\n")
    return "\n".join([*parts, PAGES[benchmark](result), _machine_line(result)])


#: The README's rows: label, variant, baseline.
README_ROWS = (
    ("float32 in mode `bf16`", "lowprec float32 bf16", "numpy float32"),
    ("float32 in mode `tf32`", "lowprec float32 tf32", "numpy float32"),
    ("float32 in mode `fp32`", "lowprec float32 fp32", "numpy float32"),
    ("int8", "lowprec int8", "numpy float32"),
    ("bfloat16", "lowprec bfloat16 (torch)", "torch bfloat16"),
    ("float16", "lowprec float16 (torch)", "torch float16"),
)


def readme_table(results: Iterable[Result]) -> str:
    """Return lowprec's speed on each machine: the range over the square products."""
    results = list(results)

    def cell(result: Result, variant: str, baseline: str) -> str:
        speeds = common.square_speeds(result["results"], variant, baseline).values()
        ends = list(dict.fromkeys(f"{f(speeds):#.2g}".rstrip(".") for f in (min, max) if speeds))
        return f"{' to '.join(ends)} x" if ends else "-"

    rows = []
    for name, variant, baseline in README_ROWS:
        library, dtype = baseline.split(" ")
        cells = [cell(result, variant, baseline) for result in results]
        rows.append([name, f"`{library}.matmul` on {dtype}", *cells])
    header = ["lowprec.matmul on", "compared with", *map(_machine_name, results)]
    return table(header, rows, words=2)


def snippets(results: Path = common.RESULTS) -> dict[Path, str]:
    """Return the text of every generated file, the README's table included."""
    made = {}
    for benchmark in PAGES:
        parts = [_part(benchmark, p, r) for p, r in load(results, benchmark).items()]
        name = f"bench_{benchmark.replace('-', '_')}.md"
        made[GENERATED / name] = "\n".join(parts) or MISSING
    # Results on a CPU with AMX are older than the present kernels.
    of_cpus = [x for x in load(results, "gemm").values() if not _has_amx(x)]
    newest = max((_version(x) for x in of_cpus), default=())
    speed = readme_table(x for x in of_cpus if _version(x) == newest)
    made[README] = generated.filled(README, "speed", speed)
    return made


def charted(results: Path = common.RESULTS) -> list[Path]:
    """Return the result files that have a chart."""
    return [path for benchmark in plot.CHARTS for path in load(results, benchmark)]


def write() -> None:
    """Write every generated file that is out of date, including charts."""
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit('the charts need matplotlib, which is not installed: pip install -e ".[plot]"')
    generated.write(snippets())
    for path in charted():
        if not plot.is_current(path):
            plot.write(path)


def check() -> int:
    """Report the generated files that are out of date; return their number."""
    stale = [path for path in charted() if not plot.is_current(path)]
    for path in stale:
        print(f"{plot.chart_path(path).name} was not drawn from {path.name}", file=sys.stderr)
    return generated.check(snippets()) + len(stale)


if __name__ == "__main__":
    sys.exit(generated.main(__doc__ or "", write, check))
