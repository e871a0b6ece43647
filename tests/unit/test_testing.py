"""``lowprec.testing``: right products pass in every mode, planted faults do not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec import testing
from lowprec.backends.cpu import library

Array = np.ndarray[Any, Any]

SHAPES = [(32, 64, 48), (16, 256, 40), (8, 1000, 24)]
ROUNDS = {
    "tf32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
}


def _operands(shape: tuple[int, int, int], seed: int = 0) -> tuple[Array, Array]:
    m, k, n = shape
    draw = np.random.default_rng(seed)
    return draw.standard_normal((m, k), np.float32), draw.standard_normal((k, n), np.float32)


def _truncated(x: Array, mode: str) -> Array:
    dropped = {"tf32": 13, "fp16": 13, "bf16": 16}[mode]
    return (x.view(np.uint32) >> dropped << dropped).view(np.float32)


def _summed_in(dtype: Any) -> Callable[..., Array]:
    def multiply(a: Array, b: Array, mode: str) -> Array:
        a, b = (x.astype(ROUNDS.get(mode, x.dtype)).astype(np.float32) for x in (a, b))
        total = np.zeros((len(a), b.shape[1]), dtype)
        for column, line in zip(a.T, b, strict=True):
            total = (total.astype(np.float32) + np.outer(column, line)).astype(dtype)
        return total.astype(np.float32)

    return multiply


def _with_scale_of_next_block(a: Array, b: Array, mode: str) -> Array:
    x = lowprec.quantize(a, mode)  # type: ignore[arg-type]
    scales = np.roll(np.repeat(np.exp2(x.scales.astype(np.float64) - 127), 32, -1), 32, -1)[
        :, : a.shape[1]
    ]
    own = np.repeat(np.exp2(x.scales.astype(np.float64) - 127), 32, -1)[:, : a.shape[1]]
    return lowprec.matmul((x.dequantize() / own * scales).astype(np.float32), b, math_mode=mode)


#: By name: a wrong kernel, and the modes that it is meant to compute.
FAULTS: dict[str, tuple[Callable[[Array, Array, str], Array], tuple[str, ...]]] = {
    "truncated operands": (
        lambda a, b, mode: lowprec.matmul(_truncated(a, mode), _truncated(b, mode), math_mode=mode),
        ("tf32", "bf16", "fp16"),
    ),
    "no last k": (
        lambda a, b, mode: lowprec.matmul(a[:, :-1], b[:-1], math_mode=mode),
        ("fp32", "tf32", "bf16", "bf16x6", "mxfp8"),
    ),
    "tf32": (lambda a, b, _: lowprec.matmul(a, b, math_mode="tf32"), ("fp32", "bf16x6", "fp64")),
    "sums in float16": (_summed_in(np.float16), ("fp32", "bf16", "fp16")),
    "scales of the next block": (_with_scale_of_next_block, ("mxfp8",)),
}
PLANTED = [
    (fault, mode, shape)
    for fault, (_, modes) in FAULTS.items()
    for mode in modes
    for shape in SHAPES
]


@pytest.mark.parametrize(("fault", "mode", "shape"), PLANTED)
def test_a_planted_fault_is_found(fault: str, mode: str, shape: tuple[int, int, int]) -> None:
    a, b = _operands(shape)
    wrong = FAULTS[fault][0](a, b, mode)
    testing.assert_matmul(lowprec.matmul(a, b, math_mode=mode), a, b, mode)
    with pytest.raises(AssertionError, match=f"not a product in {mode}: "):
        testing.assert_matmul(wrong, a, b, mode)


#: Operands by name: of random numbers, and those whose roundings repeat, cancel, overflow or underflow.
KINDS: dict[str, Callable[[np.random.Generator, int, int], Array]] = {
    "normal": lambda draw, m, k: draw.standard_normal((m, k)),
    "one value": lambda draw, m, k: np.full((m, k), draw.uniform(0.1, 3)),
    "equal in rows": lambda draw, m, k: np.repeat(draw.standard_normal((m, 1)), k, 1),
    "ramp": lambda draw, m, k: np.arange(m * k).reshape(m, k),
    "integers": lambda draw, m, k: draw.integers(-8, 9, (m, k)),
    "exponents": lambda draw, m, k: np.ldexp(
        draw.standard_normal((m, k)), draw.integers(-30, 30, (m, k))
    ),
    "zeros": lambda draw, m, k: draw.standard_normal((m, k)) * (draw.random((m, k)) < 0.2),
    "large": lambda draw, m, k: draw.standard_normal((m, k)) * 1e18,
    "tiny": lambda draw, m, k: draw.standard_normal((m, k)) * 1e-20,
}


@pytest.mark.parametrize("mode", [str(mode) for mode in lowprec.MathMode])
@pytest.mark.parametrize("repeats", [1, pytest.param(45, marks=pytest.mark.sweep)])
def test_right_products_pass(mode: str, repeats: int) -> None:
    draw = np.random.default_rng(repeats)
    dtype = np.float64 if mode == "fp64_emulated" else np.float32
    for kind in [*KINDS] * repeats:
        (m, n), k = draw.integers(1, 24, 2), int(draw.choice([1, 2, 7, 31, 64, 256, 700]))
        other = KINDS[str(draw.choice([*KINDS]))]
        a, b = KINDS[kind](draw, m, k).astype(dtype), other(draw, n, k).T.astype(dtype)
        out_dtype = None
        if dtype == np.float32:
            out_dtype = draw.choice([None, "bfloat16", "float16"], p=[0.7, 0.15, 0.15])
        with np.errstate(over="ignore"):
            testing.assert_matmul(
                lowprec.matmul(a, b, math_mode=mode, out_dtype=out_dtype), a, b, mode
            )


@pytest.mark.parametrize("mode", ["tf32", "bf16", "fp16", "mxfp8"])
def test_tensor_cores_are_right_with_the_bound_of_their_device(mode: str) -> None:
    a, b = _operands((16, 512, 24))
    with lowprec.emulate("hopper"):
        c = lowprec.matmul(a, b, math_mode=mode)
    testing.assert_matmul(c, a, b, mode, device="h100")


@pytest.mark.parametrize(
    ("dtype", "mode"),
    [("complex64", "bf16"), ("complex128", "fp32"), ("int8", "fp32"), ("bfloat16", "fp32")],
)
def test_element_types_and_batches(dtype: str, mode: str) -> None:
    draw = np.random.default_rng(1)
    a, b = (draw.integers(-9, 9, shape).astype(dtype) for shape in ((3, 1, 8, 40), (2, 40, 8)))
    if dtype.startswith("complex"):
        a, b = (x * (1 / 3 + 0.2j) for x in (a, b))
    c = lowprec.matmul(a, b, math_mode=mode)
    testing.assert_matmul(c, a, b, mode)
    c[2, 1, 3, 4] = c[2, 1, 3, 4] * 2 + 8
    with pytest.raises(
        AssertionError, match=r"1 of 384 elements are wrong; the first, c\[2, 1, 3, 4\], is "
    ):
        testing.assert_matmul(c, a, b, mode)


def test_nan_and_infinities_stay_where_they_belong() -> None:
    a, b = _operands((4, 8, 4))
    a[0, 1], a[2, 3] = np.nan, np.inf
    c = lowprec.matmul(a, b)
    testing.assert_matmul(c, a, b)
    c[2, 1] = -c[2, 1]
    with pytest.raises(AssertionError, match=r"c\[2, 1\], is -?inf where -?inf is right"):
        testing.assert_matmul(c, a, b)
    c = lowprec.matmul(a, b)
    c[0, 2] = 0
    with pytest.raises(AssertionError, match=r"c\[0, 2\], is 0 where nan is right"):
        testing.assert_matmul(c, a, b)


@pytest.mark.skipif(
    sys.platform != "linux" or not library.units(), reason="interception needs the compiled kernels"
)
def test_the_reference_is_not_intercepted() -> None:
    a, b = _operands((16, 64, 8))
    exact = testing.tolerance(a, b)
    with lowprec.numpy.intercept("bf16", cast=True):
        np.testing.assert_array_equal(testing.tolerance(a, b).reference, exact.reference)


def test_other_libraries_arrays() -> None:
    torch = pytest.importorskip("torch")
    a = torch.randn(16, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    testing.assert_matmul(a @ a.T, a, a.T)


def test_what_is_no_product_is_refused() -> None:
    a, b = _operands((4, 8, 4))
    with pytest.raises(
        lowprec.ShapeError, match=r"c has shape \(4, 3\); the product of a and b has \(4, 4\)"
    ):
        testing.assert_matmul((a @ b)[:, :3], a, b)
    with pytest.raises(lowprec.ShapeError, match="must be matrices or stacks"):
        testing.tolerance(a[0], b)
    recipe = lowprec.Recipe("mxfp8", rounding="stochastic", seed=1)
    with pytest.raises(lowprec.ModeError, match="rounds at random"):
        testing.tolerance(a, b, recipe)


def test_the_reference_is_the_product_of_rounded_operands() -> None:
    a, b = _operands((4, 8, 4))
    expected = testing.tolerance(a, b, "bf16")
    exact = a.astype(ml_dtypes.bfloat16).astype(float) @ b.astype(ml_dtypes.bfloat16).astype(float)
    np.testing.assert_array_equal(expected.reference, exact)
    # Eight sums and the rounding of each product: at most k + 1 units of |A||B|.
    assert np.all(expected.bound < 10 * 2.0**-24 * (np.abs(a) @ np.abs(b)) * 1.02 + 1e-37)
    assert testing.tolerance(a, b, "bf16", dtype="bfloat16").bound.max() > 2.0**-9


PROGRAM = """
import lowprec, numpy

class Switch:
    name, module, tier, reduced = "switch", "numpy", "process", False
    switches, modes = {"reduced": "products"}, (lowprec.MathMode.FP32,)
    describe = save = lambda self: {"reduced": self.reduced}
    set_mode = restore = lambda self, state: self.save()

lowprec.register_controller(switch := Switch())
product = numpy.matmul

def test_full():
    pass

def test_sets_the_switch():
    switch.reduced = True
    numpy.matmul = lambda a, b: product(a.astype("float16"), b.astype("float16")).astype("float32")

def test_restores_it():
    switch.reduced, numpy.matmul = False, product
"""


def _run_pytest(folder: Path, program: str, *options: str) -> str:
    (folder / "test_program.py").write_text(program)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "lowprec_command",
        *options,
    ]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_tests_fail_in_which_a_library_multiplies_in_less(tmp_path: Path) -> None:
    output = _run_pytest(tmp_path, PROGRAM, "--lowprec-require", "fp32")
    assert "2 failed, 1 passed" in output, output
    assert "at the end of the test numpy's matmul is in fp16" in output
    assert "at the beginning of the test numpy's matmul is in fp16" in output


def test_pytest_imports_nothing_without_the_option(tmp_path: Path) -> None:
    output = _run_pytest(tmp_path, "import sys\ndef test(): assert 'lowprec' not in sys.modules")
    assert "1 passed" in output, output


def test_an_unknown_precision_is_refused(tmp_path: Path) -> None:
    assert "precision 'fp33' is not one of: " in _run_pytest(
        tmp_path, "", "--lowprec-require", "fp33"
    )
