"""NumPy's products in two runs: the function that is behind the change, and errors against NumPy's own products."""

import subprocess
import sys

import numpy as np
import pytest
from scipy.linalg import blas as routines

import lowprec
from lowprec.backends.cpu import library
from lowprec.cli import main

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or library.library() is None,
    reason="interception needs Linux and the compiled kernels",
)

#: Of sketches of 1,021 numbers: three standard deviations.
SKETCH = 0.07


def draw(*shape, dtype=np.float32, seed=0):
    x = np.random.default_rng(seed).standard_normal((2, *shape))
    return (x[0] + 1j * x[1] if np.dtype(dtype).kind == "c" else x[0]).astype(dtype)


class Fit:
    """Steps of gradient descent for the inputs of a network of two layers whose outputs are known."""

    def __init__(self, spoiled):
        self.first = draw(64, 32) / 6
        self.second = draw(48, 64, seed=1) / 8
        self.scale = np.ones((64, 1), np.float32)
        if spoiled:  # the same function
            self.scale[7] = 0.01
            self.second[:, 7] *= 100
        self.wanted = draw(48, 16, seed=2)

    def hidden(self, x):
        return np.tanh(self.first @ x)

    def output(self, hidden):
        return self.second @ (self.scale * hidden)

    def of_hidden(self, residual):
        return self.scale * (self.second.T @ residual)

    def of_input(self, gradient):
        return self.first.T @ gradient

    def solve(self):
        x = np.zeros((32, 16), np.float32)
        for _ in range(3):
            hidden = self.hidden(x)
            gradient = self.of_hidden(self.wanted - self.output(hidden))
            x = x + 0.3 * self.of_input((1 - hidden**2) * gradient)
        return x


def test_the_spoiled_function_is_named_first():
    np.testing.assert_allclose(Fit(True).solve(), Fit(False).solve(), rtol=1e-3, atol=1e-4)
    before = lowprec.compare(Fit(False).solve, "nvfp4")
    found = lowprec.compare(Fit(True).solve, "nvfp4", blame=True)
    line = Fit.output.__code__.co_firstlineno + 1
    name = f"{__name__}.output:{line} (gemm)"
    assert found.layers[0].layer == name
    assert f"of that comes from {name}" in found.verdict
    assert found.change > before.change
    assert {x.mode for x in found.layers} == {"nvfp4"}
    assert sum(x.share for x in found.layers) == pytest.approx(1)
    assert [x.calls for x in found.layers] == [3] * 4
    assert 0.8 < sum(x.blame for x in found.layers) < 1.25
    assert not found.parting
    without = lowprec.compare(Fit(True).solve, "nvfp4")
    assert without.layers[0].layer == name
    assert f"of layer {name}" in without.verdict


def relative(x, y):
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


@pytest.mark.parametrize("order", ["C", "F"])
def test_errors_equal_a_computation_by_hand(order):
    """Operands in bfloat16 multiply exactly in float64; the reference is NumPy's product."""
    a = np.asarray(draw(130, 90), order=order)
    b = np.asarray(draw(90, 110, seed=1), order=order)

    def first():
        return np.matmul(a, b, out=np.empty((130, 110), np.float32, order=order))

    def second(x):
        return x[:, 20:] @ b  # which every version of NumPy gives to its BLAS

    results = []

    def run():
        x = first()
        y = second(x)
        results.append((x, y))
        return y

    found = lowprec.compare(run, "bf16")
    rows = {x.layer.split(".")[-1].split(":")[0]: x for x in found.layers}
    (x, y), (x_again, y_again) = results
    for row, result, again, exact in (
        (rows["first"], x, x_again, a.astype(float) @ b),
        (rows["second"], y, y_again, x[:, 20:].astype(float) @ b),
    ):
        # The reference has errors of FP32, 2**-16 of those of bfloat16.
        assert row.own_error == pytest.approx(relative(result, exact), rel=1e-3)
        assert row.drift == pytest.approx(relative(result, again), rel=SKETCH)
    assert found.change == pytest.approx(relative(y, y_again))


#: Calls of SciPy's BLAS, of matrices of 6 x 6 in the order of Fortran and a vector.
CALLS = {
    "gemm": lambda f, a, v: f(1.5, a, a.T, 0.5, a.copy(order="F"), overwrite_c=1),
    "gemv": lambda f, a, v: f(1.5, a, v, 0.5, v.copy(), incy=-1),
    "symm": lambda f, a, v: f(1.5, a, a, lower=1),
    "syrk": lambda f, a, v: f(1.5, a),
    "trmm": lambda f, a, v: f(1.5, a, a.copy(order="F"), lower=1, overwrite_b=1),
    "symv": lambda f, a, v: f(1.5, a, v),
    "ger": lambda f, a, v: f(1.5, v, v, a=a.copy(order="F"), overwrite_a=1),
    "dot": lambda f, a, v: f(v, v),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_each_routine_has_the_error_of_its_result(name, dtype):
    """The part that is not written is the same in both results, and zero where it counts."""
    is_complex = dtype == np.complex64
    if is_complex and name in ("symv", "ger", "dot"):
        name = {"symv": "hemv", "ger": "gemm", "dot": "hemm"}[name]
    if name == "hemm":
        call = CALLS["symm"]
    else:
        call = CALLS["symv" if name == "hemv" else name]
    function = getattr(routines, ("c" if is_complex else "s") + name)
    a = np.asfortranarray(draw(6, 6, dtype=dtype))
    v = draw(6, dtype=dtype, seed=1)
    results = []

    def run():
        results.append(call(function, a, v))
        return results[-1]

    rules = {name: "bf16", "*": "fp32"}
    found = lowprec.compare(run, rules)
    (row,) = found.layers
    assert row.layer.endswith(f"({name})")
    assert row.mode == "bf16"
    difference = np.linalg.norm(results[0] - results[1])
    assert difference > 0
    # Both runs have the same operands, so own error and drift are one number; a sketch of few numbers is exact.
    assert row.own_error == pytest.approx(row.drift, rel=1e-3)
    assert row.drift == pytest.approx(difference / np.linalg.norm(results[1]), rel=1e-3)


def test_products_of_the_library_drift_and_solvers_are_counted():
    a = draw(40, 40) + 8 * np.eye(40, dtype=np.float32)

    def run():
        x = a @ a
        return np.linalg.solve(x, a), np.dot(x[0], x[1]), np.float64(x @ x.astype(float)).sum()

    found = lowprec.compare(run, "bf16")
    by_routine = {(x.layer.split("(")[-1], x.mode): x for x in found.layers}
    dot = by_routine["dot)", ""]
    assert dot.own_error is None
    assert 0 < dot.drift < 0.1
    wide = by_routine["gemm)", ""]
    assert wide.own_error is None
    assert by_routine["gesv)", ""].drift is None
    assert sum(x.share for x in found.layers) == pytest.approx(1)


def test_many_products_are_summed():
    a = draw(4, 4)

    def run(count=9000):
        x = a
        for _ in range(count):
            x = a @ a
        return x

    found = lowprec.compare(run, "bf16")
    (row,) = found.layers
    assert row.calls == 9000
    exact = a.astype(float) @ a
    with lowprec.numpy.intercept("bf16"):
        rounded = a @ a
    assert row.own_error == pytest.approx(relative(rounded, exact), rel=1e-3)
    assert row.drift == pytest.approx(relative(rounded, exact), rel=SKETCH)
    assert not found.parting
    counts = iter([9001, 9002])
    found = lowprec.compare(lambda: run(next(counts)), "bf16")
    assert found.parting == "The runs part after 9001 products: one has more of them."
    sizes = iter([4, 3])

    def parting():
        run(100)
        last = run(50)[:, : next(sizes)]
        return [(a @ last.copy()).sum(), run(100)]

    found = lowprec.compare(parting, "bf16")
    assert ".parting:" in found.parting
    assert found.parting.endswith("(gemm) (4x3).")
    assert [x.drift is None for x in found.layers].count(True) == 1


def test_the_first_nan_and_its_origin_are_named():
    x = np.ones((4, 4), np.float32)
    large = np.full((4, 4), 3.4028e38, np.float32)
    with np.errstate(all="ignore"):
        found = lowprec.compare(lambda: large @ (x.T * np.float32(1e-30)), "bf16")
        assert found.fault.endswith(": by bf16; the product is finite in fp32.")
        found = lowprec.compare(lambda: (large * np.float32("nan")) @ x, "bf16")
        assert found.fault.endswith(" (gemm) (4x4): its first operand has NaN.")
        found = lowprec.compare(lambda: large @ x, "bf16")
    assert found.fault.endswith(": so is the product in fp32.")


def test_underflow_and_clipping_are_shown():
    a = np.ones((4, 64), np.float32)
    b = np.ones((64, 32), np.float32)
    b[::16] = 1000  # of each block of 16 the others are lost
    found = lowprec.compare(lambda: a @ b, "nvfp4")
    assert found.layers[0].underflow == 15 / 16


def test_a_forked_process_and_threads_are_not_disturbed():
    program = """
import os, threading, numpy as np, lowprec
a = np.ones((32, 32), np.float32)
def run():
    if os.fork() == 0:
        os._exit(int((a @ a)[0, 0] != 32))
    assert os.wait()[1] == 0
    threads = [threading.Thread(target=lambda: [a @ a for _ in range(300)]) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return a @ a
found = lowprec.compare(run, "bf16")
print(sum(x.calls for x in found.layers))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "1201\n"


def test_products_of_the_library_that_add_have_no_own_error():
    """Their result is not compared with the former one, which is kept before the call."""
    a = np.asfortranarray(draw(6, 6))
    c = np.asfortranarray(draw(6, 6, seed=1))
    found = lowprec.compare(lambda: routines.sgemm(1.5, a, a, 0.5, c), {"gemv": "bf16"})
    (row,) = found.layers
    assert (row.mode, row.own_error, row.underflow) == ("", None, 0.0)


def test_statistics_of_a_block_are_those_of_its_products():
    """The columns are PyTorch's; of each block of 16 all other numbers of `b` are lost."""
    a = draw(64, 96)
    b = np.ones((96, 32), np.float32)
    b[::16] = 1000
    with lowprec.numpy.intercept("nvfp4", statistics=True) as seen:
        results = [a @ b for _ in range(5)]
    (row,) = seen.report().taken
    assert row.count == 5
    # of the first 42 of 64 vectors
    assert 0.9 * np.abs(a).max() < row.a.magnitude <= np.abs(a).max()
    assert row.b.magnitude == 1000
    assert row.b.underflow == 15 / 16
    assert row.error == pytest.approx(relative(results[0], a.astype(float) @ b), rel=1e-3)
    text = str(seen.report())
    assert all(word in text for word in ("largest", "underflow", "clipped", "blocks", "error"))
    with lowprec.numpy.intercept("nvfp4") as seen:
        assert np.array_equal(a @ b, results[0])
    assert seen.recorder is None
    assert "underflow" not in str(seen.report())


def test_without_the_compiled_library_nothing_is_begun(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(library, "library", lambda: None)
    monkeypatch.setattr(
        library, "unavailable_reason", lambda: "built without kernels (no compiler)"
    )
    calls = []
    with pytest.raises(lowprec.UnsupportedError, match=r"need the compiled kernels: built without"):
        lowprec.compare(lambda: calls.append(1), "bf16")
    with pytest.raises(lowprec.UnsupportedError, match="statistics of JAX and NumPy"):
        lowprec.numpy.intercept("bf16", statistics=True)
    program = tmp_path / "program.py"
    program.write_text("print('it runs')\n")
    assert main(["run", "--mode", "bf16", "--against", "fp32", str(program)]) != 0
    shown = capsys.readouterr()
    assert "need the compiled kernels" in shown.err
    assert not shown.out
    assert not calls
