"""Speed of float64 solves by a factor in lower precision and refinement, against the libraries' solvers.

Matrices by family and size, one right-hand side; three rounds, one from n = 8192 on. The second part has one size,
condition numbers from 1 to 1e14 and two modes of the factor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import common  # isort: skip - sets a variable that must come before NumPy
import numpy as np
import scipy.linalg
import timing
import torch

import lowprec

NUMPY, REFINE, AUTO = "numpy.linalg.solve", "lowprec, refine", "lowprec, auto"

#: Required speed at a size, where FP32 is twice as fast as FP64.
LIMITS = {4096: 1.4, 8192: 1.6}

#: Size from which one round is measured.
LONG = 8192

Solver = Callable[[], Any]


def _reflected(values: Any, rng: np.random.Generator) -> Any:
    """Return a matrix with these singular values: a diagonal matrix between products of three reflections."""
    a = np.diag(values)
    for _ in range(3):
        v, w = rng.standard_normal((2, len(values)))
        a -= np.outer(v, 2 / (v @ v) * (v @ a))
        a -= np.outer(2 / (w @ w) * (a @ w), w)
    return a


def _ridge(n: int, rng: np.random.Generator) -> Any:
    """Return the Gaussian kernel of points in four dimensions, with a ridge."""
    points = rng.random((n, 4))
    squares = (points**2).sum(axis=1)
    a = np.exp((2 * points @ points.T - squares[:, None] - squares) / (2 * 0.3**2))
    a[np.diag_indices(n)] += 0.05
    return a


def _poisson(n: int, rng: np.random.Generator) -> Any:
    """Return the five-point Laplacian on the most nearly square grid with 2^k columns."""
    columns = 1 << (n.bit_length() // 2)
    family_rows, other = (
        2 * np.eye(m) - np.eye(m, k=1) - np.eye(m, k=-1) for m in (columns, n // columns)
    )
    return np.kron(np.eye(n // columns), family_rows) + np.kron(other, np.eye(columns))


FAMILIES: dict[str, Callable[[int, np.random.Generator], Any]] = {
    "random": lambda n, rng: rng.standard_normal((n, n)),
    "condition 1e2": lambda n, rng: _reflected(np.geomspace(1, 1e-2, n), rng),
    "kernel ridge": _ridge,
    "Poisson": _poisson,
}


def others(a: Any, b: Any) -> dict[str, Solver]:
    tensors = torch.from_numpy(a), torch.from_numpy(b)
    return {
        NUMPY: lambda: np.linalg.solve(a, b),
        "scipy.linalg.solve": lambda: scipy.linalg.solve(a, b, assume_a="gen"),
        "torch.linalg.solve": lambda: torch.linalg.solve(*tensors),
    }


def backward_error(a: Any, b: Any, x: Any) -> float:
    size = np.linalg.norm(a) * np.linalg.norm(x) + np.linalg.norm(b)
    return float(np.linalg.norm(b - a @ np.asarray(x)) / size)


def measure(
    a: Any, b: Any, solvers: dict[str, Solver], rounds: int, seed: int
) -> tuple[dict[str, list[float]], list[float], dict[str, Any]]:
    """Return the seconds of these solvers and the libraries', the best library's by round, and the results.

    Solvers take turns, and the first of several rounds is omitted.
    """
    library, results = others(a, b), {}
    solvers = library | solvers

    def sample(name: str, _: int) -> float:
        time.sleep(timing.SPIN_SECONDS)
        begin = time.perf_counter()
        results[name] = solvers[name]()
        return time.perf_counter() - begin

    omitted = int(rounds > 1)
    samples = timing.take_turns(list(solvers), sample, rounds=rounds + omitted, seed=seed)
    seconds = {name: samples[name][omitted:] for name in solvers}
    return (
        seconds,
        [min(each) for each in zip(*(seconds[name] for name in library), strict=True)],
        results,
    )


def families(sizes: list[int], rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    for n, (family, make) in product(sizes, FAMILIES.items()):
        rng = np.random.default_rng(seed)
        a, b = make(n, rng), rng.standard_normal(n)
        solvers = {
            f"lowprec, {method}": lambda a=a, b=b, method=method: lowprec.linalg.solve(
                a, b, method=method
            )
            for method in ("refine", "auto")
        }
        seconds, best, results = measure(a, b, solvers, rounds if n < LONG else 1, seed)
        for name in seconds:
            yield {
                "kind": "family", "family": family, "n": n, "variant": name,
                "time": timing.summary(seconds[name]),
                "speed": timing.speed_ratio(best, seconds[name]),
                "over_numpy": timing.speed_ratio(seconds[NUMPY], seconds[name]),
                "backward_error": backward_error(a, b, results[name]),
            }  # fmt: skip


def conditions(n: int, rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    for exponent in range(0, 15, 2):
        rng = np.random.default_rng(seed)
        a, b = _reflected(np.geomspace(1, 10.0**-exponent, n), rng), rng.standard_normal(n)
        solvers = {
            mode: lambda a=a, b=b, mode=mode: lowprec.linalg.solve(
                a, b, method="refine", factor_mode=mode, full_output=True
            )
            for mode in ("fp32", "bf16")
        }
        seconds, best, results = measure(a, b, solvers, rounds, seed)
        for mode in solvers:
            _, report = results[mode]
            yield {
                "kind": "condition", "condition": 10.0**exponent, "n": n, "mode": mode,
                "speed": timing.speed_ratio(best, seconds[mode]),
                "steps": report.steps + report.gmres_steps, "method": report.method,
            }  # fmt: skip


def claims_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    family_rows = [r for r in rows if r["kind"] == "family"]
    errors = {(r["family"], r["n"], r["variant"]): r["backward_error"] for r in family_rows}
    ratios = [
        e / errors[family, n, NUMPY]
        for (family, n, name), e in errors.items()
        if name in (REFINE, AUTO)
    ]
    automatic = [r["over_numpy"]["median"] for r in family_rows if r["variant"] == AUTO]
    claims = [
        common.claim(
            "backward error over numpy.linalg.solve's, the largest", max(ratios), 2.0, at_most=True
        ),
        common.claim("auto: speed over numpy.linalg.solve, the least", min(automatic), 0.95),
    ]
    for n, limit in LIMITS.items():
        speeds = [
            r["speed"]["median"] for r in family_rows if r["n"] == n and r["variant"] == REFINE
        ]
        what = f"refine: speed over the best of NumPy, SciPy and PyTorch at n = {n}, the least"
        claims.append(common.claim(what, min(speeds) if speeds else None, limit))
    return claims


def measure_all(quick: bool, seed: int) -> Iterator[dict[str, Any]]:
    rounds, sizes, n = (1, [64, 128], 128) if quick else (3, [2048, 4096, 8192], 2048)
    yield from families(sizes, rounds, seed)
    yield from conditions(n, rounds, seed)


if __name__ == "__main__":
    common.main(__doc__, "solve", measure_all, claims_of)
