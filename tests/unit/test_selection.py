"""``rtol``: the cheapest mode whose bound is within it, and an account of all the others."""

import re
from types import SimpleNamespace

import pytest

from lowprec.errors import ModeError
from lowprec.formats import BFLOAT16, FLOAT32, TF32, DType
from lowprec.modes import MathMode, available_modes, row
from lowprec.planning import Capabilities, GemmProblem, OperandSpec, plan_gemm, select_mode
from lowprec.planning.rendering import advise
from lowprec.planning.selection import BOUNDS
from support import machines
from support.machines import AMX, BARE, ROWS, gpu


def square(dtype, n=1024, **kwargs):
    spec = OperandSpec.contiguous(dtype, (n, n))
    return GemmProblem(spec, spec, **kwargs)


@pytest.mark.parametrize(
    ("rtol", "mode"),
    [
        (1.0, MathMode.INT8),
        (1e-2, MathMode.BF16),
        # Three products of bfloat16 parts, where a TF32 product is four of them.
        (2e-3, MathMode.BF16X3),
        (1e-4, MathMode.BF16X3),
        (2e-5, MathMode.BF16X6),
        (2e-6, MathMode.FP64),
    ],
)
def test_the_cheapest_mode_within_rtol_is_taken(rtol, mode):
    chosen, _ = select_mode(square(DType.FLOAT32), AMX, rtol)
    assert chosen is mode
    assert plan_gemm(square(DType.FLOAT32), AMX, mode).bound.relative <= rtol


@pytest.mark.parametrize("capability", [(7, 0), (7, 2), (7, 5), (8, 0), (9, 0)], ids=str)
@pytest.mark.parametrize("n", [64, 1024, 16384])
def test_modes_that_the_tensor_cores_do_not_multiply_are_no_cheaper_than_fp32(capability, n):
    """Volta's and Turing's multiply float16 of the floating types, and nothing else."""
    chosen, candidates = select_mode(square(DType.FLOAT32, n), gpu(capability), 0.1)
    costs = {c.mode: c.cost for c in candidates}
    for mode in (MathMode.TF32, MathMode.BF16):
        assert (costs[mode] < costs[MathMode.FP32]) is (capability >= (8, 0))
    assert chosen in (
        {MathMode.TF32, MathMode.BF16} if capability >= (8, 0) else {MathMode.FP16, MathMode.FP32}
    )


def test_every_mode_is_accounted_for_the_cheapest_first():
    _, candidates = select_mode(square(DType.FLOAT32), AMX, 2e-3)
    by_mode = {c.mode: c for c in candidates}
    # fp32_emulated is one of the others, and fp64_emulated acts on float64.
    assert set(by_mode) == set(available_modes()) - {MathMode.FP32_EMULATED, MathMode.FP64_EMULATED}
    assert [c.mode for c in candidates if c.accepted] == [MathMode.BF16X3]
    costs = [c.cost for c in candidates]
    assert costs == sorted(costs)
    assert str(by_mode[MathMode.BF16].why) == "its bound exceeds rtol = 0.002"
    assert str(by_mode[MathMode.FP32].why) == "no cheaper than bf16x3"
    assert str(by_mode[MathMode.FP16].why) == "no cheaper than bf16x3"


def test_excluded_modes_are_passed_over():
    chosen, candidates = select_mode(square(DType.FLOAT32), AMX, 2e-3, frozenset({MathMode.BF16X3}))
    assert chosen is MathMode.TF32
    bf16x3 = next(c for c in candidates if c.mode is MathMode.BF16X3)
    assert str(bf16x3.why) == "excluded by the environment"


def test_no_mode_within_rtol_is_an_error_with_the_bounds():
    words = r"no math mode guarantees rtol = 1e-09 for float32 operands at k = 1024; bounds: .*fp32 2\.3.*float64"
    with pytest.raises(ModeError, match=words):
        select_mode(square(DType.FLOAT32), AMX, 1e-9)


@pytest.mark.parametrize("machine", [AMX, BARE, gpu()], ids=["amx", "bare", "gpu"])
def test_the_order_of_the_bounds_in_the_error_does_not_depend_on_costs(machine):
    """It is that of the mode table; of a result without elements all costs are the same."""
    orders = set()
    for m, n in [(3, 0), (1, 1), (1, 4096), (4096, 4096)]:
        specs = [OperandSpec.contiguous(DType.FLOAT32, shape) for shape in ((m, 64), (64, n))]
        with pytest.raises(ModeError, match=r"bounds: fp32 .*, tf32 ") as caught:
            select_mode(GemmProblem(*specs), machine, 1e-30)
        orders.add(
            tuple(re.findall(r"(\w+) [\d.e-]+[,.]", str(caught.value).partition("bounds: ")[2]))
        )
    (order,) = orders
    others = ["int8_blocks"] * (machine.compute_capability is not None)  # for CPUs alone
    assert list(order) == [
        m for m in available_modes() if not m.endswith("emulated") and m not in others
    ]


@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.BFLOAT16, DType.INT8])
def test_storage_that_modes_leave_alone_has_one_candidate(dtype):
    _, candidates = select_mode(square(dtype), AMX, 0.1)
    assert [c.mode for c in candidates] == [MathMode.FP32]


def test_the_plans_candidates_print():
    p = square(DType.FLOAT32)
    chosen, candidates = select_mode(p, AMX, 2e-3)
    plan = machines.report_on(plan_gemm(p, AMX, chosen), candidates=candidates)
    text = " ".join(str(plan).split())
    assert "mode bound cost verdict" in text
    assert "bf16x3 3.28e-05 0.46 taken: the cheapest" in text


def test_a_bound_that_is_the_tolerance_is_within_it():
    p = square(DType.FLOAT32)
    rtol = plan_gemm(p, AMX, MathMode.BF16).bound.relative
    assert select_mode(p, AMX, rtol)[0] is MathMode.BF16
    assert select_mode(p, AMX, rtol * (1 - 2.0**-50))[0] is not MathMode.BF16


def test_modes_that_no_kernel_of_the_device_runs_are_not_weighed():
    kernel = ROWS["numpy"]._replace(formats=frozenset({"float32", "bfloat16"}))
    device = Capabilities("ext_dev:0", "a device of few formats", (kernel,))
    _, candidates = select_mode(square(DType.FLOAT32), device, 1e-2)
    assert {c.mode for c in candidates if not row(c.mode).quantizes} == {
        "fp32", "fp32_pedantic", "bf16", "bf16x3", "bf16x6", "bf16x9"
    }  # fmt: skip


@pytest.mark.parametrize("able", [BARE, AMX, gpu((8, 0)), gpu((9, 0))])
def test_the_ladder_has_no_missing_rung(able):
    """From 1e-2 to 1e-7 there is a mode at every k, and a smaller tolerance never takes one with a larger bound."""
    for k in (1, 64, 4096, 10**6):
        p = GemmProblem(
            OperandSpec.contiguous(DType.FLOAT32, (2048, k)),
            OperandSpec.contiguous(DType.FLOAT32, (k, 2048)),
        )
        for bound in BOUNDS:
            rungs = [select_mode(p, able, 10.0**-x, bound=bound) for x in (2, 3, 4, 5, 6, 7)]
            taken = [next(c for c in candidates if c.accepted) for _, candidates in rungs]
            assert all(c.bound <= 10.0**-x for c, x in zip(taken, (2, 3, 4, 5, 6, 7), strict=True))
            costs = [c.cost for c in taken]
            assert costs == sorted(costs)
        assert k == 1 or rungs[-1][0] is MathMode.FP64


def test_the_probable_bound_takes_a_cheaper_mode():
    p, able = square(DType.FLOAT32), BARE
    assert select_mode(p, able, 2e-5)[0] is MathMode.FP64
    mode, (taken, *_) = select_mode(p, able, 2e-5, bound="probable")
    assert mode is MathMode.FP32
    assert taken.bound == plan_gemm(p, able, MathMode.FP32).bound.probable
    with pytest.raises(ModeError, match="no math mode probably keeps rtol = 1e-09 for float32"):
        select_mode(p, able, 1e-9, bound="probable")


def a_plan(sizes, fmt, intensity, rounds_for):
    able = SimpleNamespace(flops_per_byte=16.0, compute_capability=(9, 0))
    return SimpleNamespace(
        layout=SimpleNamespace(**dict(zip("mnk", sizes, strict=True))), operand_format=fmt, capabilities=able,
        arithmetic_intensity=intensity, rounded=(rounds_for is not None, False), call=None,
        kernel_row=SimpleNamespace(cost_per_element=rounds_for),
    )  # fmt: skip


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
        (SQUARE, BFLOAT16, 16.0, None, ()),
        (SQUARE, BFLOAT16, 15.9, None, ("15.9 flops per byte, below the device's 16: memory-bound",)),
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
    advice = advise(a_plan(sizes, fmt, intensity, rounds_for))
    assert tuple(map(str, advice)) == expected


@pytest.mark.parametrize(("device", "mentioned"), [(machines.BARE, False), (machines.gpu(), True)])
def test_tensor_cores_are_mentioned_if_present(device, mentioned):
    odd = OperandSpec.contiguous(DType.FLOAT32, (1001, 1001))
    advice = advise(plan_gemm(GemmProblem(odd, odd), device, MathMode.TF32))
    assert any("tensor cores" in str(reason) for reason in advice) is mentioned
