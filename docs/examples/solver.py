"""Would a solver survive TF32? Three of them, unchanged, with the products that TF32 rounds and those that it does not.

usage: python docs/examples/solver.py [--n N] [--mode MODE]

The matrix is float32, symmetric and positive definite, with a condition of 1000. TF32, in which tensor
cores of GPUs multiply float32, has 10 bits after the point. It needs SciPy and Linux.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse.linalg

import lowprec


def system(n: int) -> tuple[Any, Any, Any]:
    """Return a matrix with eigenvalues from 0.001 to 1, the largest twice the next, a right side and the solution."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((n, n)))[0]
    eigenvalues = np.append(np.geomspace(1e-3, 0.5, n - 1), 1.0)
    matrix = (basis * eigenvalues @ basis.T).astype(np.float32)
    matrix = (matrix + matrix.T) / 2
    solution = rng.standard_normal(n)
    return matrix, (matrix.astype(np.float64) @ solution).astype(np.float32), solution


def direct(a: Any, b: Any) -> Any:
    """Cholesky's factors, by LAPACK."""
    return scipy.linalg.solve(a, b, assume_a="pos")


def gradients(a: Any, b: Any) -> Any:
    """Conjugate gradients: a product of the matrix and a vector in each step."""
    return scipy.sparse.linalg.cg(a, b, rtol=1e-6, maxiter=500)[0]


def refined(a: Any, b: Any) -> Any:
    """A direct solution, and three steps of refinement with residuals as matrix products."""
    factor = scipy.linalg.cho_factor(a)
    x = scipy.linalg.cho_solve(factor, b)
    for _ in range(3):
        x = x + scipy.linalg.cho_solve(factor, b - a @ x)
    return x


def main() -> None:
    """Print the errors, and the products of each solver."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, default=300, help="size of the matrix")
    parser.add_argument("--mode", default="tf32", help="of the products that are taken")
    options = parser.parse_args()
    a, b, solution = system(options.n)
    print(f"{'solver':10} {'fp32':>8} {options.mode:>8}  rounded / left in fp32")
    for solver in (direct, gradients, refined):
        errors = []
        for mode in ("fp32", options.mode):
            with lowprec.numpy.intercept(mode) as seen:
                found = solver(a, b)
            errors.append(np.linalg.norm(found - solution) / np.linalg.norm(solution))
        report = seen.report()
        products = f"{operators(report.taken)} / {operators(report.passed)}"
        print(f"{solver.__name__:10} {errors[0]:8.1e} {errors[1]:8.1e}  {products}")


def operators(products: Sequence[Any]) -> str:
    """Return the number of calls of each routine."""
    return ", ".join(sorted(f"{p.count} {p.operator}" for p in products)) or "none"


if __name__ == "__main__":
    main()
