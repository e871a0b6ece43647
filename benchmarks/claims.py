"""Claims of result files as rows of a table, and speeds by size; `docs/examples` is on the path from here on."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from generated import ROOT

RESULTS = ROOT / "benchmarks" / "results"

# Some benchmarks run programs of the documentation.
sys.path.insert(0, str(ROOT / "docs" / "examples"))

Row = Mapping[str, Any]

CLAIM_HEADER = ("claim", "by size", "measured", "limit", "")


def claim_rows(claims: Iterable[Row]) -> list[list[str]]:
    """Return the claims as rows of a table under `CLAIM_HEADER`."""
    return [
        [
            c["what"],
            ", ".join(f"{n}: {value:.2f}" for n, value in c.get("by_size", {}).items()) or "-",
            "-" if c["value"] is None else f"{c['value']:.3g}",
            f"{c['relation']} {c['limit']:g}",
            {True: "met", False: "MISSED", None: "not measured"}[c["met"]],
        ]
        for c in claims
    ]


def is_square(row: Row) -> bool:
    """Whether a row of `bench_gemm.py` is that of a single product of square matrices."""
    return row["batch"] == 1 and row["m"] == row["k"] == row["n"]


def square_speeds(rows: Iterable[Row], variant: str, baseline: str) -> dict[str, float]:
    """Return how many times as fast as the baseline a variant is on square products, by size."""
    squares = (
        r for r in rows if r["variant"] == variant and baseline in r["speed"] and is_square(r)
    )
    return {str(r["n"]): r["speed"][baseline]["median"] for r in squares}
