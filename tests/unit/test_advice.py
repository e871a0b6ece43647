"""Advice on shapes: each sentence appears where it applies and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lowprec.formats import BFLOAT16, FLOAT32, TF32, DType
from lowprec.modes import MathMode
from lowprec.planning import GemmProblem, OperandSpec, ReasonKind, plan_gemm
from lowprec.planning.rendering import advise
from support import machines


def a_plan(sizes, fmt, intensity, rounds_for, capability):
    able = SimpleNamespace(flops_per_byte=16.0, compute_capability=capability)
    return SimpleNamespace(
        layout=SimpleNamespace(**dict(zip("mnk", sizes, strict=True))), operand_format=fmt, capabilities=able,
        arithmetic_intensity=intensity, rounded=(rounds_for is not None, False), call=None,
        kernel_row=SimpleNamespace(cost_per_element=rounds_for),
    )  # fmt: skip


def test_low_intensity_is_below_the_devices_own():
    def kinds(intensity):
        advice = advise(a_plan(SQUARE, FLOAT32, intensity, None, None))
        return [reason.kind for reason in advice]

    assert kinds(15.9) == [ReasonKind.LOW_INTENSITY]
    assert kinds(16.0) == []


SQUARE = (1024, 1024, 1024)


@pytest.mark.parametrize(
    ("sizes", "fmt", "intensity", "rounds_for", "expected"),
    [
        (SQUARE, BFLOAT16, 100.0, 60.0, ()),
        (SQUARE, FLOAT32, 100.0, None, ()),
        ((1001, 1001, 1001), FLOAT32, 100.0, None, ()),
        ((1024, 1001, 1024), BFLOAT16, 100.0, None,
         ("n = 1001 is not a multiple of 8, as tensor cores prefer for 16-bit data: pad",)),
        ((1002, 1024, 1001), TF32, 100.0, None,
         ("m = 1002 and k = 1001 are not multiples of 4, as tensor cores prefer for 32-bit data: pad",)),
        ((1001, 1002, 1003), BFLOAT16, 100.0, None,
         ("m = 1001, n = 1002 and k = 1003 are not multiples of 8, as tensor cores prefer for 16-bit data: pad",)),
        ((1000, 1024, 1024), None, 100.0, None,
         ("m = 1000 is not a multiple of 16, as tensor cores prefer for 8-bit data: pad",)),
        ((1024, 1024, 64), BFLOAT16, 2.0, None,
         ("k = 64 (at most 128): memory-bound rather than compute-bound",)),
        (SQUARE, BFLOAT16, 2.0, None, ("2 flops per byte, below the device's 16: memory-bound",)),
        ((8, 1024, 1024), BFLOAT16, 100.0, 60.0,
         ("m = 8 (at most 128): memory-bound rather than compute-bound",
          "rounding the operands costs more than the product: a low-precision mode is slower here")),
        ((8, 1024, 1024), BFLOAT16, 100.0, None,
         ("m = 8 (at most 128): memory-bound rather than compute-bound",)),
        ((128, 136, 1024), BFLOAT16, 100.0, None,
         ("m = 128 (at most 128): memory-bound rather than compute-bound",)),
        ((0, 3, 5), BFLOAT16, 0.0, 60.0, ()),
    ],
)  # fmt: skip
def test_each_sentence_has_its_reason(sizes, fmt, intensity, rounds_for, expected):
    advice = advise(a_plan(sizes, fmt, intensity, rounds_for, (9, 0)))
    assert tuple(map(str, advice)) == expected


@pytest.mark.parametrize(("device", "mentioned"), [(machines.BARE, False), (machines.gpu(), True)])
def test_tensor_cores_are_mentioned_if_present(device, mentioned):
    odd = OperandSpec.contiguous(DType.FLOAT32, (1001, 1001))
    advice = plan_gemm(GemmProblem(odd, odd), device, MathMode.TF32).advice
    assert any("tensor cores" in str(reason) for reason in advice) is mentioned
