"""``lowprec.audit``: the precision that results show."""

import json
from functools import partial

import numpy as np
import pytest

import lowprec
from lowprec import auditing
from lowprec.cli import main
from lowprec.errors import BackendError, SettingError


def in_16_bits(a, b):
    """Multiply with sums that are rounded to float16 after each term."""
    total = np.zeros((len(a), b.shape[1]), np.float16)
    for i in range(a.shape[1]):
        total = (total + (a[:, i : i + 1] * b[i]).astype(np.float16)).astype(np.float16)
    return total.astype(np.float32)


@pytest.mark.parametrize("size", [16, 100])
@pytest.mark.parametrize(
    ("mode", "precision"),
    [
        ("fp32", "fp32"), ("fp64", "fp32"), ("tf32", "tf32"), ("bf16", "bf16"),
        ("bf16x3", "split"), ("bf16x9", "fp32"), ("tf32x3", "fp32"), ("fp16x3", "fp32"),
    ],
)  # fmt: skip
def test_modes_are_distinguished(mode, precision, size):
    run = partial(lowprec.matmul, math_mode=mode)
    assert auditing.measure(run, size) == precision


def test_float16_and_its_sums_are_distinguished():
    def rounded(a, b):
        return a.astype(np.float16).astype(np.float32) @ b.astype(np.float16).astype(np.float32)

    assert auditing.measure(rounded, 16) == "fp16"
    assert auditing.measure(in_16_bits, 16) == "fp16 sums"
    assert auditing.measure(lambda a, b: a.astype("float32") @ b * 0, 16) == "fp16 sums"


@pytest.mark.parametrize("sides", ["a", "b"])
def test_one_rounded_operand_is_enough(sides):
    def half(a, b):
        a, b = (lowprec.matmul(x, np.eye(len(x), dtype=x.dtype), math_mode="bf16") if s in sides else x
                for s, x in (("a", a), ("b", b)))  # fmt: skip
        return a @ b

    assert auditing.measure(half, 16) == "bf16"


def test_pytorch_is_measured_where_it_multiplies(torch):
    full = lowprec.audit(["torch"], sizes=[16])
    assert {r.operation for r in full.rows} == {
        "matmul",
        "linear",
        "convolution",
        "attention",
        "solve",
    }
    assert {r.precision for r in full.rows} == {"fp32"}
    assert not full.below("fp32")
    assert full.switches["torch"]["get_float32_matmul_precision()"] == "highest"
    with lowprec.torch.intercept("bf16"):
        low = lowprec.audit(["torch"], sizes=[16])
        operations = {r.operation for r in low.below("fp32")}
        assert operations == {"matmul", "linear", "convolution", "attention"}
        assert {r.precision for r in low.below("tf32")} == {"bf16"}
    assert "matmul" in str(low)


def test_a_guard_verifies_what_it_protects(monkeypatch):
    with lowprec.fp32_guard(verify=True):
        assert lowprec.get_math_mode() == "fp32"

    def low(a, b):
        return np.matmul(a.astype("bfloat16").astype(np.float32), b)

    monkeypatch.setitem(auditing._DEVICES, "numpy", lambda numpy: iter([("cpu", {"matmul": low})]))
    with pytest.raises(BackendError, match=r"not in full FP32: .*numpy's matmul on cpu \(bf16\)"):
        lowprec.fp32_guard(verify=True).__enter__()
    with lowprec.math_mode("bf16"):  # the guard is left
        assert lowprec.get_math_mode() == "bf16"


def test_jax_is_measured(jax):
    assert not lowprec.audit(["jax"], sizes=[16]).below("fp32")
    with lowprec.jax.intercept("tf32"):
        low = lowprec.audit(["jax"], sizes=[16])
    assert {r.precision for r in low.rows if r.operation == "matmul"} == {"tf32"}


def test_an_operation_that_fails_is_unknown(monkeypatch):
    def refuse(a, b):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setitem(
        auditing._DEVICES, "numpy", lambda numpy: iter([("cpu", {"matmul": refuse})])
    )
    (row,) = lowprec.audit(["numpy"], sizes=[16]).rows
    assert (row.precision, row.detail) == ("unknown", "RuntimeError: no kernel")
    assert not lowprec.audit(["numpy"], sizes=[16]).below("fp32")


def test_mistakes():
    with pytest.raises(SettingError, match="no audit of mlx; choose among torch, jax"):
        lowprec.audit(["mlx"])
    for sizes in ([2], []):
        with pytest.raises(SettingError, match=rf"at least 5, got \{sizes}"):
            lowprec.audit(["numpy"], sizes=sizes)
    with pytest.raises(SettingError, match="'fp8' is not one of: fp16 sums, bf16"):
        lowprec.audit(["numpy"], sizes=[16]).below("fp8")


@pytest.mark.usefixtures("torch")
def test_the_command(capsys):
    words = ("audit", "torch", "--sizes", "16", "--json")
    with lowprec.torch.intercept("bf16"):
        assert main([*words, "--require", "fp32"]) == 1
        seen = capsys.readouterr()
        assert main([*words, "--require", "bf16"]) == 0
    assert seen.err == "lowprec audit: 4 operations are below fp32\n"
    assert {r["precision"] for r in json.loads(seen.out)["rows"]} == {"bf16", "fp32"}
    assert main(["audit", "mlx"]) == 2
