"""lowprec's OpenBLAS in panels for threads: every layout, the same bits for any number, apart from other copies."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import lowprec
from lowprec.backends.cpu import gemm, numba_import, openblas, panels, team, threads
from support import oracles
from support.oracles import random_matrix
from support.programs import run_python

needs_openblas = pytest.mark.skipif(openblas.openblas() is None, reason="scipy-openblas64 is not installed")

DTYPES = ("float32", "float64", "complex64", "complex128")
#: Large enough to be cut into panels; no extent is a multiple of the grain.
M, N, K = 331, 275, 200


@needs_openblas
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column_major", range(8), ids=lambda i: f"{i:03b}")
@pytest.mark.sampled(2)
def test_layouts(dtype: str, column_major: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "num_threads", lambda: 3)
    for m, n, k in ((M, N, K), (M, 1, K), (1, N, K), (M, N, 1), (1, 1, K), (3, 2, 5)):
        shapes = ((m, k), (k, n), (m, n))
        a, b, out = (
            np.asarray(random_matrix(rng, shape, dtype), order="F" if column_major >> i & 1 else "C")
            for i, shape in enumerate(shapes)
        )
        out[...] = np.nan  # what was there must not matter
        gemm.multiply_openblas(a, b, out)
        oracles.assert_within_bound(out, a, b)


@needs_openblas
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_vectors_with_gaps(dtype: str, order: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of rows: the last one is a short one."""
    monkeypatch.setattr(threads, "num_threads", lambda: 3)
    a = np.asarray(random_matrix(rng, (2200, 530), dtype), order=order)[:2190]
    x, frame = random_matrix(rng, (530, 3), dtype), np.full((2192, 2), 7, dtype)
    assert len(panels.rows_for_shape(*a.shape, by_rows=order == "C")) > 1
    gemm.multiply_openblas(a, x[:, 1:2], frame[1:-1, :1])
    oracles.assert_within_bound(frame[1:-1, :1], a, x[:, 1:2])
    assert np.all(frame[:, 1] == 7)
    assert frame[0, 0] == frame[-1, 0] == 7


# Some have other bits if they are cut into three: float32 with kernels for Haswell, float64 with those for SkylakeX.
SHAPES = [
    (331, 275, 380), (467, 482, 945), (430, 563, 119), (1000, 90, 300), (48, 2000, 400), (700, 1, 900),
    (1, 1200, 700),
]  # fmt: skip


@needs_openblas
@pytest.mark.parametrize("core_type", ["", "Haswell", pytest.param("Nehalem", marks=pytest.mark.sweep)])
def test_the_number_of_threads_changes_no_bit(core_type: str) -> None:
    """With the fastest kernels for the processor, and with those for older ones."""
    program = """
        import sys
        import numpy as np
        from lowprec.backends.cpu import cpuinfo, gemm, openblas, threads
        core_type, *shapes = eval(sys.argv[1])
        if core_type:
            openblas.core_type = lambda flags: core_type
        opened = openblas.loaded_openblas()
        if core_type and opened.core_type != core_type:
            print("not for this processor")
            raise SystemExit
        rng = np.random.default_rng(5)
        def random(shape, dtype):
            x = rng.standard_normal((2, *shape))
            return (x[0] + 1j * x[1] if dtype[0] == "c" else x[0]).astype(dtype)
        for m, n, k in shapes:
            for dtype in ("float32", "float64", "complex64", "complex128"):
                a, b = random((m, k), dtype), random((n, k), dtype).T
                for x, y in ((a, b), (np.asfortranarray(a), b.copy())):
                    results = []
                    for workers in (1, 2, 3, 7):
                        threads.num_threads = lambda: workers
                        out = np.zeros((m, n), dtype)
                        gemm.multiply_openblas(x, y, out)
                        results.append(out.tobytes())
                    assert len(set(results)) == 1, (m, n, k, dtype)
        print("the same")
    """
    found = run_python(program, repr((core_type, *SHAPES)))
    if found == "not for this processor":
        pytest.skip(f"no OpenBLAS with kernels for {core_type} here")
    assert found == "the same"


@needs_openblas
def test_the_number_of_threads_of_numpy_changes_no_bit_of_a_stack() -> None:
    """Each of these differs where NumPy's BLAS multiplies; its settings are those of all libraries."""
    program = """
        import hashlib, itertools
        import numpy as np
        import lowprec
        rng = np.random.default_rng(5)
        shapes = [((104, 83), (3, 83, 125)), ((3, 1, 74), (3, 74, 61)),
                  ((4, 42, 235), (4, 235, 42)), ((2, 90, 80), (80, 1))]
        for (a, b), dtype in itertools.product(shapes, ("float32", "float64", "complex64", "complex128")):
            x, y = ((rng.standard_normal(s) + 1j * rng.standard_normal(s)) for s in (a, b))
            x, y = (z.astype(dtype) if dtype[0] == "c" else z.real.astype(dtype) for z in (x, y))
            for u, v in ((x, y), (x.copy("F"), y.copy("F"))):
                for mode in ("fp32", "tf32", "bf16x3"):
                    print(hashlib.sha256(lowprec.matmul(u, v, math_mode=mode)).hexdigest())
    """
    found = {run_python(program, warn="ignore", OPENBLAS_NUM_THREADS=n, OMP_NUM_THREADS=n) for n in ("1", "7")}
    assert len(found) == 1
    assert len(found.pop().split()) == 4 * 4 * 2 * 3


@needs_openblas
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 5, 7, 4), (1, 9, 1, 30, 40), (3, 2, 20, 1, 30), (40, 1, 64, 48, 50)])
@pytest.mark.parametrize("out_order", ["rows", "columns", "gaps"])
@pytest.mark.sampled(2)
def test_batches(
    dtype: str, shape: tuple[int, ...], out_order: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated operands, into memory that holds NaN; each number of threads gives the same bits."""
    count, repeats, m, n, k = shape
    a, b = (random_matrix(rng, (count, 1, m, k), dtype), random_matrix(rng, (repeats, n, k), dtype).swapaxes(-1, -2))
    memory = np.full((repeats, count, n + 1, m + 2), np.nan, dtype)
    inner = memory[..., 1:, 1:-1] if out_order == "gaps" else np.ascontiguousarray(memory[..., 1:, 2:])
    out = inner.transpose(1, 0, 3, 2) if out_order != "rows" else np.full((count, repeats, m, n), np.nan, dtype)
    results = []
    for workers in (1, 2, 7):
        monkeypatch.setattr(threads, "num_threads", lambda workers=workers: workers)
        out[...] = np.nan
        gemm.multiply_openblas(a, b, out)
        results.append(out.tobytes())
    assert len(set(results)) == 1
    oracles.assert_within_bound(out, a, b)
    assert out_order != "gaps" or np.isnan(memory[..., 0, :]).all()


@pytest.mark.parametrize(
    ("m", "n", "k"), [(331, 275, 400), (40, 4000, 4000), (4000, 40, 300), (1, 1, 1), (48, 96, 10**7)]
)
@pytest.mark.parametrize("workers", [None, 1, 2, 3, 8, 64])
def test_panels(m: int, n: int, k: int, workers: int | None) -> None:
    covered = np.zeros((m, n), int)
    cut = panels.panels_for_shape(m, n, k) if workers is None else panels.panels_for_threads(m, n, k, workers)
    for i, rows, j, columns in cut:
        covered[i : i + rows, j : j + columns] += 1
        assert len(cut) == 1 or rows * columns * k >= panels.SMALLEST_PANEL
    assert np.all(covered == 1)
    assert 1 <= len(cut) <= (workers or 64)


# -- apart from other copies ----------------------------------------------------------------------


def test_the_fastest_kernels_for_a_processor() -> None:
    avx2 = frozenset({"sse2", "avx", "avx2", "fma"})
    avx512 = avx2 | {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
    assert openblas.core_type(avx512) == "SkylakeX"
    assert openblas.core_type(avx512 - {"avx512bw"}) == "Haswell"  # Knights Landing
    assert openblas.core_type(avx2) == "Haswell"
    assert openblas.core_type(frozenset({"sse2"})) is None


@needs_openblas
@pytest.mark.parametrize("theirs", [None, "Prescott"])
def test_the_variable_is_restored(theirs: str | None) -> None:
    """C's environment, which child processes inherit, and Python's; NumPy's own copy uses the user's value."""
    program = """
        import os, subprocess, sys
        theirs = eval(sys.argv[1])
        os.environ.pop("OPENBLAS_CORETYPE", None)
        if theirs is not None:
            os.environ["OPENBLAS_CORETYPE"] = theirs
        import numpy
        from lowprec.backends.cpu import cpuinfo, openblas

        def inherited():
            shown = subprocess.run([sys.executable, "-c", "import os; print(dict(os.environ))"], capture_output=True)
            return {k: v for k, v in eval(shown.stdout).items() if k.startswith("OPENBLAS")}

        before, mine = inherited(), dict(os.environ)
        opened = openblas.loaded_openblas()
        assert (inherited(), dict(os.environ)) == (before, mine)
        wanted = openblas.core_type(cpuinfo.cpu_flags())
        assert wanted is None or opened.core_type == wanted, opened.core_type
        assert opened._get_threads() == 1
    """
    run_python(program, repr(theirs))


@needs_openblas
def test_a_copy_loaded_by_another_library_is_left_alone() -> None:
    run_python("""
        import ctypes
        from lowprec.backends.cpu import openblas
        theirs = ctypes.CDLL(openblas.library_path())
        assert openblas.openblas() is None
        import lowprec, numpy as np
        assert lowprec.plan(np.eye(300), np.eye(300)).kernel == "numpy"
        assert "in the process for something else" in str(lowprec.info()["warnings"])
    """)


@needs_openblas
def test_threadpoolctl_limits_products_and_starts_no_threads_here() -> None:
    controlling = pytest.importorskip("threadpoolctl", reason="threadpoolctl is not installed")
    opened = openblas.loaded_openblas()
    assert not numba_import.fails()
    a = np.ones((600, 600))
    started: list[int] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        run = team._run
        monkeypatch.setattr(team, "_run", lambda job, workers: (started.append(workers), run(job, workers)))
        with controlling.threadpool_limits(1):
            assert lowprec.matmul(a, a)[0, 0] == 600
        assert set(started) == {1}
        with controlling.threadpool_limits(4):
            assert lowprec.matmul(a, a)[0, 0] == 600
            assert opened._get_threads() == 1
            opened._set_threads(3)
            assert lowprec.matmul(a, a[0])[0] == 600
            assert opened._get_threads() == 1
    assert opened._get_threads() == 1


@needs_openblas
def test_eight_threads_and_forked_children() -> None:
    run_python("""
        import os, threading
        import numpy as np
        import lowprec
        rng = np.random.default_rng(3)
        pairs = [tuple(rng.integers(-9, 9, (2, n, n)).astype("float32")) for n in (40, 130, 301, 420)]
        want = [(a.astype(int) @ b.astype(int)).astype("float32") for a, b in pairs]
        wrong, start = [], threading.Barrier(8)
        def multiply(rounds):
            for _ in range(rounds):
                for (a, b), c in zip(pairs, want):
                    if not np.array_equal(lowprec.matmul(a, b), c):
                        wrong.append(len(a))
        def first():
            start.wait()
            multiply(5)
        all_of_them = [threading.Thread(target=first) for _ in range(8)]
        for t in all_of_them: t.start()
        for t in all_of_them: t.join()
        assert str(lowprec.plan(*pairs[-1]).kernel) == "openblas" and not wrong, wrong
        if hasattr(os, "fork"):
            for _ in range(3):
                child = os.fork()
                if child == 0:
                    multiply(2)
                    os._exit(7 if wrong else 3)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    """)


_UNDER_A_LIMIT = """
import resource, sys, threading
import numpy as np, lowprec
warm, megabytes, where = sys.argv[1:]
a = (np.arange(90000) % 7).reshape(300, 300).astype(np.float32)
want = a @ a  # from here on NumPy has its memory
if warm == "warm":
    lowprec.matmul(a, a)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + (int(megabytes) << 20)
def multiply():
    stack = np.stack([a[:40, :40]] * 8).astype(np.complex64)
    lowprec.matmul(stack, stack)
    assert (lowprec.matmul(a, a) == want).all()
    print("done", lowprec.plan(a, a).kernel)
if where == "main":
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    multiply()
else:
    go = threading.Event()
    thread = threading.Thread(target=lambda: go.wait() and multiply())
    thread.start()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    go.set()
    thread.join()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux enforces the limit")
@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("megabytes", [300, 160, 64, 8])
@pytest.mark.parametrize("warm", ["warm", "cold"])
@pytest.mark.sampled(4)
def test_a_limit_on_the_address_space(warm: str, megabytes: int, where: str) -> None:
    found = run_python(_UNDER_A_LIMIT, warm, str(megabytes), where)
    # A worker that starts may find no memory and report it; the product is computed without it.
    assert found.startswith("done ")
    assert "OpenBLAS" not in found
