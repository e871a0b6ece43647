"""A product that is larger than a worker's memory, in Dask chunks, in a mode of the caller's choice.

usage: python docs/examples/dask_product.py [--n N] [--chunk N] [--mode MODE] [--workers N] [--memory BYTES]

`lowprec.matmul` takes Dask arrays: the chunks of k are added in FP32, one after the other, so that no worker holds more
than two chunks of the result and its operands, and the rest can be on disk.
"""

from __future__ import annotations

import argparse
import time

import dask.array as da
import numpy as np
from distributed import Client, LocalCluster

import lowprec


def main() -> None:
    """Multiply, and compare a few rows with float64."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=20_000, help="rows and columns")
    parser.add_argument("--chunk", type=int, default=4_000, help="rows and columns of a chunk")
    parser.add_argument("--mode", default="bf16x3", help="math mode")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--memory", default="3GB", help="memory of each, before it spills to disk")
    options = parser.parse_args()

    n, chunk = options.n, options.chunk
    with (
        LocalCluster(
            n_workers=options.workers,
            threads_per_worker=1,
            memory_limit=options.memory,
            dashboard_address=None,
        ) as cluster,
        Client(cluster),
    ):
        rng = da.random.default_rng(0)
        a, b = (rng.standard_normal((n, n), chunks=chunk, dtype=np.float32) for _ in range(2))
        with lowprec.math_mode(options.mode):
            product = lowprec.matmul(a, b)  # nothing runs yet; the mode travels in the graph

        start = time.perf_counter()
        rows = [0, n // 2, n - 1]
        norm, found, of_a = da.compute(da.linalg.norm(product), product[rows], a[rows])
        seconds = time.perf_counter() - start
        exact = sum(
            of_a[:, k : k + chunk].astype(np.float64)
            @ b[k : k + chunk].astype(np.float64).compute()
            for k in range(0, n, chunk)
        )
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    print(f"{n} x {n} in chunks of {chunk}, {options.mode}: {seconds:.1f} s, norm {norm:.6g}")
    print(f"relative error of {len(rows)} rows: {error:.1e}")


if __name__ == "__main__":
    main()
