"""Products that cuBLASLt refuses run in another way, and the plan shows the reason."""

from dataclasses import fields

import ml_dtypes
import numpy as np
import pytest

import lowprec
from cuda_backend.device_fixture import draw
from software_cuda import Switches, cublaslt, tables
from software_cuda.descriptors import SoftwareLtError
from software_cuda.objects import EXECUTION_FAILED, INVALID_VALUE, NOT_SUPPORTED
from software_cuda.recorder import Refusal
from support import oracles

REFUSALS = [INVALID_VALUE, NOT_SUPPORTED]


def test_the_backend_is_tested_with_all_switches(software):
    """What some version of the libraries refuses is refused."""
    assert all(getattr(software.software.switches, x.name) for x in fields(Switches))


# -- epilogues ------------------------------------------------------------------------------------

A, B, BIAS, C = draw(0, 16, 16), draw(1, 16, 16), draw(2, 16), draw(3, 16, 16)
TRUE = oracles.product(A, B)

EPILOGUES = {
    "bias": ({"bias": BIAS}, TRUE + BIAS),
    "activation": ({"activation": "relu"}, np.maximum(TRUE, 0)),
    "c": ({"c": C, "beta": 2.0}, TRUE + 2 * C),
}

each_epilogue = pytest.mark.parametrize("name", EPILOGUES)


def given(software, name):
    keywords, _ = EPILOGUES[name]
    return {k: software.put(v) if isinstance(v, np.ndarray) else v for k, v in keywords.items()}


def refuse_the_first_descriptor(software, function, status, monkeypatch):
    """Refuse every search, or every run, of the operation that comes first."""
    operations = []
    real = getattr(software.software.cublas_lt, function)

    def refuse(handle, operation, *rest):
        operations.append(operation)
        if operation == operations[0]:
            raise SoftwareLtError(status)
        real(handle, operation, *rest)

    monkeypatch.setattr(software.software.cublas_lt, function, refuse, raising=False)


@each_epilogue
@pytest.mark.parametrize(
    ("function", "status"),
    [
        *(("matmul_algo_get_heuristic", x) for x in REFUSALS),
        *(("matmul", x) for x in (*REFUSALS, 13, 14)),
    ],
)
def test_epilogues_not_fused_run_in_a_kernel(software, name, status, function, monkeypatch):
    x, y, keywords = software.put(A), software.put(B), given(software, name)
    refuse_the_first_descriptor(software, function, status, monkeypatch)
    found = lowprec.matmul(x, y, **keywords)
    np.testing.assert_array_equal(software.get(found), EPILOGUES[name][1])
    # It stays so, and a plan and a profile show it.
    with lowprec.profile() as profile:
        found = lowprec.matmul(x, y, **keywords)
    np.testing.assert_array_equal(software.get(found), EPILOGUES[name][1])
    fallback = dict(lowprec.plan(x, y, **keywords).algorithm)["fallback"]
    assert fallback.startswith(
        "a kernel applies the epilogue to a staged product: cuBLASLt 13.1.0 "
    )
    assert "float32 (16, 16) @ float32 (16, 16)" in fallback
    assert ("INVALID_VALUE" in fallback) is (status == INVALID_VALUE)
    assert fallback in str(profile.records[0].algorithm)


@each_epilogue
def test_a_fused_epilogue_without_an_algorithm(software, name, monkeypatch):
    search, asked = cublaslt.search, []

    def none_at_first(*arguments, **keywords):
        asked.append(arguments)
        # with a workspace, and without
        return search(*arguments, **keywords) if len(asked) > 2 else []

    monkeypatch.setattr(cublaslt, "search", none_at_first)
    x, y, keywords = software.put(A), software.put(B), given(software, name)
    found = lowprec.matmul(x, y, **keywords)
    np.testing.assert_array_equal(software.get(found), EPILOGUES[name][1])
    assert "no algorithm" in dict(lowprec.plan(x, y, **keywords).algorithm)["fallback"]


def test_a_refused_plan_is_kept(software):
    x, y, keywords = software.put(A), software.put(B), given(software, "bias")
    with software.failing_call("matmul_algo_get_heuristic", status=INVALID_VALUE):
        assert "fallback" in dict(lowprec.plan(x, y, **keywords).algorithm)
    found = lowprec.matmul(x, y, **keywords)
    np.testing.assert_array_equal(software.get(found), TRUE + BIAS)
    assert software.software.count("cuLaunchKernel") == 1


@pytest.mark.parametrize("status", [7, 8, 13, 14, 15])
def test_the_first_use_tries_the_next_algorithm(software, status):
    software.software.switches.first_algorithm = False
    x, y, keywords = software.put(A), software.put(B), given(software, "bias")
    first = dict(lowprec.plan(x, y, **keywords).algorithm)["algorithm"]
    with software.failing_call("cublas_lt.matmul", status=status) as failure:
        found = lowprec.matmul(x, y, **keywords)
    assert failure.happened
    np.testing.assert_array_equal(software.get(found), TRUE + BIAS)
    # It stays so, and a plan shows what ran.
    rows = dict(lowprec.plan(x, y, **keywords).algorithm)
    assert rows["algorithm"] != first
    assert f"({status})" in rows["failed"]
    assert "fallback" not in rows
    runs = software.software.count("cublas_lt.matmul")
    lowprec.matmul(x, y, **keywords)
    assert software.software.count("cublas_lt.matmul") == runs + 1


@pytest.mark.parametrize(
    ("uses", "status"), [(0, 3), (1, 13)], ids=["too little memory", "a later use"]
)
def test_other_failures_are_reported(software, uses, status):
    x, y, keywords = software.put(A), software.put(B), given(software, "bias")
    software.software.switches.first_algorithm = False
    for _ in range(uses):
        lowprec.matmul(x, y, **keywords)
    with (
        software.failing_call("cublas_lt.matmul", status=status),
        pytest.raises(lowprec.BackendError, match=r"cannot run float32 \(16, 16\)"),
    ):
        lowprec.matmul(x, y, **keywords)
    software.forgive()
    assert {"failed", "fallback"}.isdisjoint(dict(lowprec.plan(x, y, **keywords).algorithm))


def test_without_a_fallback_the_first_refusal_is_reported(software):
    x, y, keywords = software.put(A), software.put(B), given(software, "bias")
    with (
        software.failing_call("matmul_algo_get_heuristic", status=INVALID_VALUE),
        software.failing_call("matmul_algo_get_heuristic", status=INVALID_VALUE),
        pytest.raises(lowprec.UnsupportedError, match=r"cannot prepare .*INVALID_VALUE"),
    ):
        lowprec.matmul(x, y, **keywords)
    found = lowprec.matmul(x, y, **keywords)
    np.testing.assert_array_equal(software.get(found), TRUE + BIAS)
    assert "fallback" not in dict(lowprec.plan(x, y, **keywords).algorithm)


# -- int8 with few rows ---------------------------------------------------------------------------


@pytest.fixture
def wants_rows(monkeypatch):
    """A cuBLASLt without algorithms for int8 with 16 rows and fewer, which are its columns."""
    validate = cublaslt.validate

    def refuse(asked, *rest):
        validate(asked, *rest)
        if asked.a.type == tables.R_8I and asked.n <= 16:
            raise Refusal(NOT_SUPPORTED, "few rows")

    monkeypatch.setattr("software_cuda.cublaslt.validate", refuse)


@pytest.mark.parametrize("size", [(1, 32, 16), (16, 32, 16), (7, 40, 9), (1, 5, 3)], ids=str)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.usefixtures("wants_rows")
def test_few_rows_of_int8_are_padded(software, size, batch, transposed):
    m, k, n = size
    a, b = draw(0, *batch, m, k, dtype=np.int8), draw(1, *batch, k, n, dtype=np.int8)
    if transposed:
        a, b = (np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) for x in (a, b))
    x, y = software.put(a), software.put(b)
    out, memory = software.put_with_memory(np.zeros((*batch, m, n), np.int32))
    before = software.get(memory)
    lowprec.matmul(x, y, out=out)
    np.testing.assert_array_equal(software.get(out), oracles.product(a, b))
    assert software.untouched_outside(out, memory, before)
    fallback = dict(lowprec.plan(x, y, out=out).algorithm)["fallback"]
    assert fallback.startswith(
        "rows are padded, and a kernel applies the epilogue to a staged product: cuBLASLt 13.1.0 has no algorithm"
    )


@pytest.mark.usefixtures("wants_rows")
@pytest.mark.parametrize(("rows", "padded"), [(4, True), (17, False)])
def test_few_rows_of_int8_with_a_bias(software, rows, padded):
    a, b, bias = (draw(i, *s, dtype=np.int8) for i, s in enumerate(((rows, 32), (32, 16), (16,))))
    bias = bias.astype(np.int32)
    with lowprec.profile() as profile:
        found = lowprec.matmul(software.put(a), software.put(b), bias=software.put(bias))
        plain = lowprec.matmul(software.put(a), software.put(b))
    np.testing.assert_array_equal(software.get(found), oracles.product(a, b) + bias)
    np.testing.assert_array_equal(software.get(plain), oracles.product(a, b))
    assert ["rows are padded" in str(x.algorithm) for x in profile.records] == [padded] * 2


# -- TF32 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "note"),
    [(1 | 1 << 9 | 1 << 19, True), (2 | 1 << 9 | 4 << 16, False), (0, False), (1 << 5, False)],
    ids=["FMA", "HMMA on TF32", "not reported", "a newer instruction"],
)
@pytest.mark.parametrize("mode", ["tf32", "fp32"])
def test_tf32_without_tensor_cores_is_reported(software, flags, note, mode, monkeypatch):
    monkeypatch.setattr(tables, "flags", lambda *_, **__: flags)
    x = software.put(A)
    rows = dict(lowprec.plan(x, x, math_mode=mode).algorithm)
    assert ("note" in rows) is (note and mode == "tf32")
    assert ("no tensor cores" in rows["units"]) is (flags & 0xFF == 1)
    if "note" in rows:
        assert "multiplies float32" in rows["note"]
        assert rows["note"] in " ".join(str(lowprec.plan(x, x, math_mode=mode)).split())


# -- C and D --------------------------------------------------------------------------------------


def test_a_product_is_added_in_place(software):
    """C and D are one matrix, which cuBLASLt 13 takes by one descriptor alone."""
    x, y, out = software.put(A), software.put(B), software.put(C)
    assert lowprec.matmul(x, y, c=out, beta=2.0, out=out) is out
    np.testing.assert_array_equal(software.get(out), TRUE + 2 * C)
    assert "fallback" not in dict(lowprec.plan(x, y, c=out, beta=2.0, out=out).algorithm)
    assert "cuLaunchKernel" not in " ".join(software.software.calls)


# -- no algorithm runs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [np.float32, np.int8, ml_dtypes.float8_e4m3fn], ids=lambda x: np.dtype(x).name
)
def test_if_no_algorithm_runs_the_first_error_is_reported(software, dtype, monkeypatch):
    def fail(*_):
        raise SoftwareLtError(EXECUTION_FAILED)

    monkeypatch.setattr(software.software.cublas_lt, "matmul", fail, raising=False)
    x = software.put(A.astype(dtype))
    for _ in range(2):
        with pytest.raises(lowprec.UnsupportedError, match=r"cannot run .*EXECUTION_FAILED"):
            lowprec.matmul(x, x)
