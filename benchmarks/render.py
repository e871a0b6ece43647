"""Write the documentation's tables and charts from the result files.

usage: python benchmarks/render.py [--check]

Tables are written to `docs/_generated/bench_*.md`, one of them to the README, charts next to the result files.
`--check` writes nothing and fails if one of them is out of date. Drawing needs matplotlib, unless every chart is
current.
"""

from __future__ import annotations

import functools
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import claims
import digits
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
    results = {}
    for path in sorted(folder.glob(f"{benchmark}-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["benchmark"] != benchmark:
            continue
        if result["settings"]["quick"]:
            raise ValueError(f"{path.name} is from a quick run; measure again without --quick")
        results[path] = result
    return dict(sorted(results.items(), key=lambda item: not _has_amx(item[1])))


def _has_amx(result: Result) -> bool:
    return "amx_bf16" in result["machine"]["flags"]


def _version(result: Result) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", result["machine"]["versions"]["lowprec"])[:3]))


def _machine_name(result: Result) -> str:
    # Shortens "Intel(R) Xeon(R) Processor" and "AMD EPYC 9B45 64-Core Processor".
    m = result["machine"]
    cpu = re.sub(r"\([^)]*\)|Processor|\d+-Core", "", m["cpu"])
    units = "with AMX" if _has_amx(result) else "without AMX"
    named = " ".join((*cpu.split(), *m["generation"].split()))
    return f"{named} {units}, {m['cores']} cores"


def _machine_line(result: Result) -> str:
    m = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    commit = "no commit" if m["commit"] is None else f"commit {m['commit'][:10]}"
    changed = " with changes" if m["dirty"] else ""
    units = ", ".join(m["flags"]) or "no vector units that are listed"
    threads = ", ".join(f"{name} {count}" for name, count in m["threads"].items()) or "unknown"
    cpu = f"{m['cpu']} ({m['generation']})" if m["generation"] else m["cpu"]
    return (
        f"Measured on {cpu}, {m['cores']} cores ({units}); threads: {threads}; "
        f"Python {m['python']}, {versions}; {commit}{changed}, {m['date']}.\n"
    )


def _claims(result: Result) -> str:
    if not result["claims"]:
        return ""
    # "1024: 1.01" stays together; a line may end behind the comma.
    rows = [
        [what, sizes.replace(": ", ":\N{NO-BREAK SPACE}"), *rest]
        for what, sizes, *rest in claims.claim_rows(result["claims"])
    ]
    if any(c.get("by_size") for c in result["claims"]):
        return table(claims.CLAIM_HEADER, rows, words=2)
    what, _, *rest = claims.CLAIM_HEADER
    return table([what, *rest], [[row[0], *row[2:]] for row in rows])


# -- one page part per benchmark ------------------------------------------------------------------

#: Cells by row and column, under the words in the corner of their table.
Tables = dict[str, dict[tuple[str, str], str]]
#: Corner of a table, row, column and cell, as formats of a row of the results; which rows have the cell.
Cells = tuple[str, str, str, str, Callable[[Mapping[str, Any]], bool]]


def _tables(parts: Tables) -> list[str]:
    """Return the tables that have cells, rows and columns in order of first occurrence."""
    tables = []
    for corner, cells in parts.items():
        if cells:
            names, columns = (list(dict.fromkeys(name)) for name in zip(*cells, strict=True))
            lines = [
                [name, *(cells.get((name, column), "-") for column in columns)] for name in names
            ]
            tables.append(table([corner, *columns], lines))
    return tables


def _pivoted(*specs: Cells) -> Callable[[Result], list[str]]:
    """Return a function that makes tables of a result; times are milliseconds as `NAME_ms`, and `NAME_us`."""

    def make(result: Result) -> list[str]:
        tables: Tables = {}
        first_spec: dict[str, int] = {}
        for r in result["results"]:
            medians = {
                name: x["median"]
                for name, x in r.items()
                if isinstance(x, Mapping) and "median" in x
            }
            units = {
                f"{name}_{unit}": x * by
                for name, x in medians.items()
                for unit, by in (("ms", 1e3), ("us", 1e6))
            }
            for number, (*formats, has_it) in enumerate(specs):
                if has_it(r):
                    corner, name, column, cell = (
                        text.format_map({**r, **medians, **units}) for text in formats
                    )
                    first_spec.setdefault(corner, number)
                    tables.setdefault(corner, {})[name, column] = cell
        return _tables(
            {corner: tables[corner] for corner in sorted(tables, key=first_spec.__getitem__)}
        )

    return make


def _where(**values: Any) -> Callable[[Mapping[str, Any]], bool]:
    return lambda r: all(r.get(name) == value for name, value in values.items())


def _size(row: Mapping[str, Any]) -> str:
    batch = f"{row['batch']} of " if row["batch"] > 1 else ""
    if row["m"] == row["k"] == row["n"]:
        return f"{batch}{row['n']}"
    return f"{batch}{row['m']} x {row['k']} x {row['n']}"


def gemm(result: Result) -> list[str]:
    """Return speed by variant and size: GFLOP/s, and in brackets relative to numpy.matmul in float32."""
    parts = []
    for square in (True, False):
        cells = {
            (
                r["variant"],
                _size(r),
            ): f"{r['gflops']:.0f} ({r['speed']['numpy float32']['median']:.2f})"
            for r in result["results"]
            if claims.is_square(r) is square
        }
        parts += _tables({"GFLOP/s (x numpy float32)": cells})
    if left_out := ", ".join(result["settings"].get("left_out", ())):
        parts.append(f"Left out, more than 20 times slower than numpy float32: {left_out}.\n")
    return parts


def dask(result: Result) -> list[str]:
    runs: dict[tuple[str, str], list[Result]] = {}
    for r in result["results"]:
        product = f"{r['variant']}, n = {r['n']:,}, chunks of {r['chunk']:,}"
        runs.setdefault((product, r["memory_limit"]), []).append(r)
    rows = []
    for key, of in runs.items():
        names = ("seconds", "peak_bytes", "spilled_bytes", "error")
        seconds, peak, spilled, error = (statistics.median(r[name] for r in of) for name in names)
        figures = f"{seconds:.1f}", f"{peak / 2**30:.2f}", f"{spilled / 2**30:.2f}", f"{error:.1e}"
        rows.append((*key, str(len(of)), *figures))
    header = ("product", "limit of a worker", "runs", "seconds", "GiB", "spilled", "relative error")
    return [generated.table(header, rows)]


def recovery(result: Result) -> list[str]:
    """Return the unaffected digits by scheme, for the largest matrices of each interval."""
    rows = result["results"]
    largest = max(r["n"] for r in rows)
    parts: Tables = {}
    for r in rows:
        if r["n"] == largest:
            digit = "all" if r["affected_digit"] is None else f"{r['affected_digit']:.1f}"
            parts.setdefault(f"{r['arithmetic']}, n = {largest}: digits", {})[
                r["scheme"], r["interval"]
            ] = digit
    return _tables(parts)


def real(result: Result) -> list[str]:
    """Return the error by mode and input, and below it the extents of each input."""
    errors = _pivoted(("{arithmetic}: error", "`{mode}`", "{input}", "{normalised:.1e}", _where()))
    extents = dict.fromkeys("{input} {m} x {k} x {n}".format_map(r) for r in result["results"])
    return [*errors(result), f"m x k x n: {'; '.join(extents)}.\n"]


def narrow(result: Result) -> list[str]:
    """Return the errors of a transformer by format of its weights, and speeds."""
    errors = [
        [
            f"`{r['format']}`", f"{r['nbytes'] / 1e6:.2f}", f"{100 * r['relative_error']:.2f} %",
            f"{r['cosine_mean']:.5f} ({r['cosine_min']:.5f})", f"{r['change_mean']:.5f} ({r['change_max']:.5f})",
            f"{r['same_neighbour']} of {r['sentences']}",
        ]
        for r in result["results"]
        if r["kind"] == "embeddings"
    ]  # fmt: skip
    header = ["weights", "MB", "error of a matrix, at most", "cosine, mean (least)"]
    header += ["change of a similarity, mean (largest)", "same neighbour"]
    over = ": speed over bfloat16"
    speeds = _pivoted(
        (f"both operands{over}", "`{format}`", "n = {n}", "{speed:.2f}", _where(kind="storage")),
        (
            f"the weight{over}",
            "`{format}`",
            "{m} x {n} x {n}",
            "{speed:.2f}",
            _where(kind="weight"),
        ),
        (
            "weight of {k} x {n}, threads: {threads}; speed over NumPy's float32",
            "{name}",
            "{m} rows",
            "{speed:.2f}",
            _where(kind="compared"),
        ),
    )
    return [table(header, errors), *speeds(result)]


def beside_torch(result: Result) -> list[str]:
    """Return milliseconds, or numbers of elements or rows, of PyTorch and lowprec."""
    rows = []
    for r in result["results"]:
        both = r["torch"], r["lowprec"]
        figures = [
            f"{x} of {r['of']:,}" if r["of"] else f"{1e3 * x['median']:.2f} ms" for x in both
        ]
        rows.append([r["units"], r["case"], *figures])
    return [generated.table(["instruction sets", "product", "PyTorch", "lowprec"], rows, words=2)]


_CALL, _UNSCALED, _TRADED = (
    "8 x 8 float32, us per call",
    "GB/s (x PyTorch)",
    "speed over fp32, error",
)

_PARTS: dict[str, Callable[[Result], list[str]]] = {
    "gemm": gemm,
    "gemm-schemes": gemm,
    "overhead": _pivoted(
        (_CALL, "{library}", "lowprec.matmul", "{lowprec_us:.2f}", _where(measured="call")),
        (_CALL, "{library}", "the library's own matmul", "{own_us:.2f}", _where(measured="call")),
        (
            "us per call (with the library's own functions)", "{variant}", "{library}",
            "{lowprec_us:.2f} ({own_us:.2f})", _where(measured="variant"),
        ),
    ),
    "guard": _pivoted(
        ("us", "{block}", "loaded: {loaded}", "{time_us:.2f}", lambda r: r["loaded"] != "jax"),
        ("us", "{block}", "loaded: + jax", "{time_us:.2f}", _where(loaded="jax")),
    ),
    # The bound does not depend on the distribution.
    "accuracy": _pivoted(
        ("{distribution}: error", "{mode}", "n = {n}", "{normalised:.1e}", _where()),
        ("bound", "{mode}", "n = {n}", "{bound:.1e}", _where()),
    ),
    "unscale": _pivoted(
        (_UNSCALED, "{variant}", "{n:,}", "{gb_per_s:.1f} ({speed:.2f})", _where(arrays=1)),
        (_UNSCALED, "{variant}", "{arrays:,} x {n:,}", "{gb_per_s:.1f} ({speed:.2f})", lambda r: r["arrays"] > 1),
    ),
    "transformer": _pivoted(
        ("m x k x n", "{m}x{k}x{n}", "{what}", "{speed:.2f}", _where(kind="product")),
        ("attention", "{what}", "{variant}", "{relative_time:.2f}", _where(kind="attention", records=False)),
        ("and its gradients", "{what}", "{variant}", "{relative_time:.2f}", _where(kind="attention", records=True)),
        ("training step", "{variant}", "ms", "{time_ms:.0f}", _where(kind="step")),
        ("training step", "{variant}", "relative time", "{relative_time:.2f}", _where(kind="step")),
    ),
    "digits": lambda result: [digits.table(result["results"])],
    "recovery": recovery,
    "real": real,
    "narrow": narrow,
    # A star marks the modes that no other one beats in both.
    "tradeoff": _pivoted(
        (_TRADED, "`{mode}`", "n = {n}", "{speed:.2f} x, {normalised:.1e}", _where(on_front=False)),
        (_TRADED, "`{mode}`", "n = {n}", "{speed:.2f} x, {normalised:.1e} *", _where(on_front=True)),
    ),
    "solve": _pivoted(
        (
            "seconds (speed over the best library)", "{family}, n = {n}", "{variant}", "{time:.2f} ({speed:.2f})",
            _where(kind="family"),
        ),
        ("backward error", "{family}, n = {n}", "{variant}", "{backward_error:.1e}", _where(kind="family")),
        (
            "condition (speed, steps, method), by mode of the factor", "{condition:.0e}", "{mode}",
            "{speed:.2f}, {steps} steps, {method}", _where(kind="condition"),
        ),
    ),
    "torch": beside_torch,
    "stress": lambda _: [],
    "dask": dask,
}  # fmt: skip


def page(benchmark: str, result: Result) -> str:
    return "\n".join([*_PARTS[benchmark](result), _claims(result)])


def _part(benchmark: str, path: Path, result: Result) -> str:
    parts = [f"**{_machine_name(result)}**\n"]
    if benchmark in plot.CHARTS:
        _, shows = plot.CHARTS[benchmark]
        link = os.path.relpath(plot.chart_path(path), GENERATED).replace(os.sep, "/")
        parts.append(f"![{shows}]({link})\n")
    return "\n".join([*parts, page(benchmark, result), _machine_line(result)])


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
        speeds = claims.square_speeds(result["results"], variant, baseline).values()
        ends = list(dict.fromkeys(f"{f(speeds):#.2g}".rstrip(".") for f in (min, max) if speeds))
        return f"{' to '.join(ends)} x" if ends else "-"

    rows = []
    for name, variant, baseline in README_ROWS:
        library, dtype = baseline.split(" ")
        cells = [cell(result, variant, baseline) for result in results]
        rows.append([name, f"`{library}.matmul` on {dtype}", *cells])
    header = ["lowprec.matmul on", "compared with", *map(_machine_name, results)]
    return table(header, rows, words=2)


def snippets(results: Path = claims.RESULTS) -> dict[Path, str]:
    """Return the text of every generated file, the README's table included."""
    files = {}
    for benchmark in _PARTS:
        parts = [_part(benchmark, p, r) for p, r in load(results, benchmark).items()]
        name = f"bench_{benchmark.replace('-', '_')}.md"
        files[GENERATED / name] = "\n".join(parts) or MISSING
    # Results on a CPU with AMX are older than the present kernels.
    of_cpus = [x for x in load(results, "gemm").values() if not _has_amx(x)]
    newest = max((_version(x) for x in of_cpus), default=())
    speed = readme_table(x for x in of_cpus if _version(x) == newest)
    files[README] = generated.filled(README, "speed", speed)
    return files


def charted(results: Path = claims.RESULTS) -> list[Path]:
    return [path for benchmark in plot.CHARTS for path in load(results, benchmark)]


def write() -> None:
    """Write every generated file that is out of date, including charts."""
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
