"""Write the tables of the documentation from the result files.

usage: python benchmarks/render.py [--check]

The tables go to `docs/_generated/bench_*.md`. `--check` writes nothing and fails if one of them is not what the result
files say.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import common

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT / "docs" / "_generated"
MISSING = "Not measured yet: run `python benchmarks/run_all.py`.\n"

Result = Mapping[str, Any]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; numbers stand on the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    lines = [header, rule, *rows]
    return "".join(
        f"| {' | '.join(c.replace('|', chr(92) + '|') for c in line)} |\n" for line in lines
    )


def load(folder: Path, benchmark: str) -> list[Result]:
    """Return the results of one benchmark, one per machine; quick runs mean nothing and are refused."""
    found = []
    for path in sorted(folder.glob(f"{benchmark}-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["benchmark"] != benchmark:
            continue
        if result["settings"]["quick"]:
            raise ValueError(f"{path.name} is from a quick run; measure again without --quick")
        found.append(result)
    return found


def _machine_line(result: Result) -> str:
    m = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    commit = "no commit" if m["commit"] is None else f"commit {m['commit'][:10]}"
    changed = " with changes" if m["dirty"] else ""
    units = ", ".join(m["flags"]) or "no vector units that are listed"
    threads = ", ".join(f"{name} {count}" for name, count in m["threads"].items()) or "unknown"
    return (
        f"{m['name']}: {m['cpu']}, {m['cores']} cores ({units}); threads: {threads}; "
        f"Python {m['python']}, {versions}; {commit}{changed}, {m['date']}.\n"
    )


def _claims(result: Result) -> str:
    return table(common.CLAIM_HEADER, common.claim_rows(result["claims"]))


# -- one page part per benchmark ------------------------------------------------------------------


def _size(row: Mapping[str, Any]) -> str:
    batch = f"{row['batch']} x " if row["batch"] > 1 else ""
    if row["m"] == row["k"] == row["n"]:
        return f"{batch}{row['n']}"
    return f"{batch}{row['m']} x {row['k']} x {row['n']}"


def gemm(result: Result) -> str:
    """Return speed by variant and size: GFLOP/s, in brackets times numpy.matmul in float32."""
    sizes = list(dict.fromkeys(_size(r) for r in result["results"]))
    by_variant: dict[str, dict[str, str]] = {}
    for r in result["results"]:
        speed = r["speed"]["numpy float32"]["median"]
        by_variant.setdefault(r["variant"], {})[_size(r)] = f"{r['gflops']:.0f} ({speed:.2f})"
    rows = [[variant, *(cells.get(s, "-") for s in sizes)] for variant, cells in by_variant.items()]
    return table(["GFLOP/s (x numpy float32)", *sizes], rows) + "\n" + _claims(result)


def overhead(result: Result) -> str:
    """Return what a small call costs, its stations, and what the import costs."""
    rows = result["results"]
    calls = [
        [r["library"], *(f"{1e6 * r[key]['median']:.2f}" for key in ("lowprec", "own"))]
        for r in rows
        if r["measured"] == "call"
    ]
    stations = [
        [r["station"], *(f"{1e6 * r[library]['median']:.2f}" for library in r["libraries"])]
        for r in rows
        if r["measured"] == "station"
    ]
    libraries = next((r["libraries"] for r in rows if r["measured"] == "station"), [])
    parts = [
        table(["8 x 8 float32, us per call", "lowprec.matmul", "the library's own matmul"], calls)
    ]
    parts.append(table(["station, us", *libraries], stations))
    return "\n".join([*parts, _claims(result)])


def accuracy(result: Result) -> str:
    """Return error and bound by distribution, mode and size, and the plot."""
    parts = []
    sizes = list(dict.fromkeys(r["n"] for r in result["results"]))
    for distribution in dict.fromkeys(r["distribution"] for r in result["results"]):
        own = [r for r in result["results"] if r["distribution"] == distribution]
        rows = [
            [mode, *(f"{r['normalised']:.1e} ({r['bound']:.1e})" for r in own if r["mode"] == mode)]
            for mode in dict.fromkeys(r["mode"] for r in own)
        ]
        parts.append(table([f"{distribution}: error (bound)", *(f"n = {n}" for n in sizes)], rows))
    plot = common.RESULTS / f"accuracy-{result['machine']['name']}.svg"
    if plot.exists():
        link = os.path.relpath(plot, GENERATED).replace(os.sep, "/")
        parts.append(f"![Error and bound by size, mode and distribution]({link})\n")
    return "\n".join([*parts, _claims(result)])


def guard(result: Result) -> str:
    """Return what a guard costs by what is loaded."""
    import bench_guard

    return table(*bench_guard.table(result["results"])) + "\n" + _claims(result)


def claims_only(result: Result) -> str:
    """Return what was claimed, beside what was measured."""
    return _claims(result)


#: By the name of the benchmark: how its result reads.
PAGES: dict[str, Callable[[Result], str]] = {
    "gemm": gemm,
    "gemm-no-extras": gemm,
    "overhead": overhead,
    "guard": guard,
    "accuracy": accuracy,
    "stress": claims_only,
}


def snippets(results: Path = common.RESULTS) -> dict[Path, str]:
    """Return the text of every generated file."""
    made = {}
    for benchmark, render in PAGES.items():
        parts = [f"{_machine_line(r)}\n{render(r)}" for r in load(results, benchmark)]
        name = f"bench_{benchmark.replace('-', '_')}.md"
        made[GENERATED / name] = "\n".join(parts) or MISSING
    return made


def write() -> None:
    """Bring every generated file up to date."""
    for path, text in snippets().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            common.write_text(path, text)


def check() -> int:
    """Report the generated files that are not what the result files say; return how many."""
    stale = 0
    for path, text in snippets().items():
        found = path.read_text(encoding="utf-8") if path.exists() else ""
        if found != text:
            stale += 1
            name = path.relative_to(ROOT).as_posix()
            old, new = found.splitlines(keepends=True), text.splitlines(keepends=True)
            sys.stderr.writelines(difflib.unified_diff(old, new, name, f"{name} (generated)"))
    return stale


def main() -> int:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing, fail if a table is not current"
    )
    if parser.parse_args().check:
        return 1 if check() else 0
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
