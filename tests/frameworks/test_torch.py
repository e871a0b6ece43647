"""The product inside PyTorch: every way in which PyTorch records, transforms, traces and compiles operations.

Each cell of the matrix compares with ``torch.matmul`` on float64 operands, where the two differ by roundings alone.
"""

import copy
import functools
import re

import numpy as np
import pytest

import lowprec
from frameworks.torch_matrix import COLUMNS, ROWS, cubic

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


SHAPES = [
    ((3, 4), (4, 2)), ((4,), (4, 2)), ((3, 4), (4,)), ((4,), (4,)), ((2, 3, 4), (4, 2)), ((2, 3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (3, 4, 2)), ((3, 4), (2, 4, 2)),
]  # fmt: skip


def operands(torch, a, b, dtype=None, grad=True):
    made = torch.Generator().manual_seed(0)
    return [
        torch.randn(s, generator=made, dtype=dtype or torch.float64).requires_grad_(grad)
        for s in (a, b)
    ]


def close(torch, found, true):
    """Equal but for the order of sums of at most 20 products and two products in a row, far below 1e-12."""
    torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-12)


# -- derivatives ----------------------------------------------------------------------------------


#: Without elements: an inner dimension, a result, a batch.
EMPTY = [
    ((3, 0), (0, 2)),
    ((2, 3, 0), (0, 2)),
    ((2, 3, 4), (4, 0)),
    ((0, 3, 4), (4, 2)),
    ((2, 3, 0), (0,)),
]


@pytest.mark.parametrize(("a", "b"), EMPTY)
def test_gradients_without_elements(torch, a, b):
    x = operands(torch, a, b)
    true = torch.autograd.grad(torch.matmul(*x).sum(), x)
    close(torch, torch.autograd.grad(lowprec.matmul(*x).sum(), x), true)
    compiled = torch.compile(lambda a, b: lowprec.matmul(a, b), backend="aot_eager", fullgraph=True)
    close(torch, torch.autograd.grad(compiled(*x).sum(), x), true)


@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_gradients_and_gradients_of_gradients(torch, a, b):
    x = operands(torch, a, b)
    assert torch.autograd.gradcheck(lowprec.matmul, x, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lowprec.matmul, x)


def test_gradients_of_complex_operands_and_factors(torch):
    x = operands(torch, (3, 4), (4, 2), torch.complex128)
    assert torch.autograd.gradcheck(lambda a, b: lowprec.matmul(a, b, alpha=2.0), x)
    assert torch.autograd.gradcheck(lambda a, b: lowprec.matmul(a, b, alpha=1 + 2j), x)
    assert torch.autograd.gradgradcheck(lambda a, b: lowprec.matmul(a, b, alpha=1j), x)


def test_gradients_of_everything_that_follows_the_product(torch):
    a, b = operands(torch, (3, 4), (4, 2))
    c, bias = operands(torch, (3, 2), (2,))

    def call(*x):
        return lowprec.matmul(x[0], x[1], c=x[2], bias=x[3], alpha=0.5, beta=2.0, activation="gelu")

    def true(*x):
        return torch.nn.functional.gelu(0.5 * x[0] @ x[1] + 2 * x[2] + x[3], approximate="tanh")

    assert torch.autograd.gradcheck(call, (a, b, c, bias))
    close(torch, call(a, b, c, bias), true(a, b, c, bias))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_have_the_type_of_their_operand(torch, dtype):
    a, b = operands(torch, (3, 4), (4, 2), getattr(torch, dtype))
    found = lowprec.matmul(a, b, out_dtype="float32")
    assert found.dtype == torch.float32
    found.sum().backward()
    assert a.grad.dtype == b.grad.dtype == a.dtype
    # Each element of the gradient is a sum of two or three numbers, rounded once.
    unit = torch.finfo(a.dtype).eps
    true = torch.ones(3, 2) @ b.detach().float().T
    torch.testing.assert_close(a.grad.float(), true, rtol=unit, atol=unit)


def test_gradients_of_a_real_operand_with_a_complex_one_are_real(torch):
    (a,) = operands(torch, (2, 3, 4), (1,))[:1]
    (b,) = operands(torch, (4, 2), (1,), torch.complex128)[:1]
    for x in ((a, b), (b.detach().mT.requires_grad_(), a[0].detach().mT.requires_grad_())):
        assert torch.autograd.gradcheck(lowprec.matmul, x)


def all_calls(torch):
    """Return ways to call a function of tensors, the first of which must require grad."""
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    return {
        "without gradients": lambda f, x, *others: f(x.detach(), *others),
        "with gradients": lambda f, *x: f(*x),
        "vmap": lambda f, x, *others: torch.vmap(lambda x: f(x, *others))(x[None])[0],
        "compiled": lambda f, *x: compiled(f)(*x),
    }


CALLS = ("without gradients", "with gradients", "vmap", "compiled")


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("storage", ["float16", "float32"])
def test_the_epilogue_of_a_product_of_16_bits_is_added_in_float32(torch, how, storage):
    """The product, 2 * 300 * 300, is beyond float16, and the result is not."""
    x = torch.full((2, 2), 300.0, dtype=getattr(torch, storage), requires_grad=True)
    bias = torch.full((2,), -178000.0)

    def call(x, b):
        return lowprec.matmul(
            x, b, bias=bias, c=x, beta=-3.0, activation="relu", out_dtype="float16"
        )

    found = all_calls(torch)[how](call, x, x.detach())
    assert found.dtype == torch.float16
    assert found.tolist() == [[1100.0, 1100.0]] * 2


@pytest.mark.parametrize("how", ["with gradients", "compiled"])
def test_a_layer_of_16_bits_multiplies_16_bits_in_its_backward_pass(torch, lt, how):
    layer = lt.Linear(4, 2, dtype=torch.bfloat16)
    x = torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True)
    with lowprec.profile() as profile:
        found = all_calls(torch)[how](layer, x)
        found.sum().backward()
    assert found.dtype == x.grad.dtype == layer.weight.grad.dtype == torch.bfloat16
    assert [{r.a_dtype, r.b_dtype} for r in profile.records] == [{"bfloat16"}] * 3
    torch.testing.assert_close(
        x.grad, layer.weight.detach().sum(0).expand(3, 4), rtol=2**-8, atol=0
    )


@pytest.mark.parametrize("how", ["without gradients", "compiled"])
def test_integers_saturate_in_every_call(torch, lt, how):
    a, b = (torch.full(s, 127, dtype=torch.int8) for s in ((2, 300), (300, 3)))
    call = all_calls(torch)[how]
    for bias in (torch.full((3,), 2**31 - 5, dtype=torch.int32), torch.ones(3, dtype=torch.int8)):
        true = min(300 * 127**2 + int(bias[0]), 2**31 - 1)
        found = call(lambda a, b, bias=bias: lowprec.matmul(a, b, bias=bias), a, b)
        assert found.dtype == torch.int32
        assert found.unique().tolist() == [true]
    for wrong in ({"c": torch.ones(2, 3)}, {"activation": "gelu"}):
        with pytest.raises(lowprec.UnsupportedError, match="cannot be used with int8 operands"):
            lt.matmul(a, b, **wrong)
    found = call(lambda a, b: lowprec.matmul(a, b, activation="relu"), a, -b)
    assert not found.any()


# Dynamo's own, about transforms in a graph.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_transformed(torch, lt, row, column):
    (x,) = operands(torch, (4, 4), (1,), grad=False)[:1]
    mine, theirs = cubic(lowprec.matmul), cubic(torch.matmul)
    torch._dynamo.reset()
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    calls = {
        "as it is": lambda: row.make(torch, mine)(x),
        "compiled": lambda: row.make(torch, mine, compiled)(x),
        "intercepted": lambda: row.make(torch, theirs)(x.float()),
    }
    if column in row.refused:
        # In a graph PyTorch wraps what is raised in errors of its own.
        errors = (lowprec.UnsupportedError, RuntimeError)
        with pytest.raises(errors, match=re.escape(row.refused[column])):
            calls[column]()
        return
    true = row.make(torch, theirs)(x)
    if column != "intercepted":
        close(torch, calls[column](), true)
        return
    with lt.intercept("fp32") as seen:
        found = calls[column]()
    assert seen.report().taken
    assert not seen.report().passed
    # Two products in a row, differentiated twice: some hundred roundings of FP32 in numbers up to a hundred.
    torch.testing.assert_close(found.double(), true, rtol=2.0**-15, atol=2.0**-10)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize(
    ("a", "b"), [((4, 4, 4), (4, 4, 4)), ((4, 4), (4, 4, 4)), ((4, 4), (4, 4))]
)
def test_vmap(torch, a, b, in_dims):
    x, y = operands(torch, a, b, grad=False)
    if max(in_dims[0] or 0, 0) >= x.ndim or max(in_dims[1] or 0, 0) >= y.ndim:
        in_dims = (0, 0)
    found = torch.vmap(lowprec.matmul, in_dims=in_dims)(x, y)
    close(torch, found, torch.vmap(torch.matmul, in_dims=in_dims)(x, y))


def test_tensors_of_a_transform_that_has_ended(torch):
    kept = []
    x, w = torch.eye(3) * 2, torch.ones(3, 3, requires_grad=True)
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(x)
    assert torch.equal(lowprec.matmul(kept[0], w), x @ w)
    assert not lowprec.matmul(kept[0], x).requires_grad
    with torch.no_grad():
        assert torch.equal(lowprec.matmul(kept[0], w), x @ w)
    lowprec.matmul(kept[0], w).sum().backward()
    assert torch.equal(w.grad, torch.full((3, 3), 2.0))


# -- graphs ---------------------------------------------------------------------------------------

#: 1 in bfloat16, and 1 in TF32: the mode shows in the result.
ABOVE_ONE = 1 + 2**-9
IN_MODE = {"fp32": ABOVE_ONE**2, "tf32": ABOVE_ONE**2, "bf16": 1.0}


@pytest.fixture
def counting(torch):
    """A backend of torch.compile that runs graphs as they are, and counts them."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


def test_a_graph_is_made_again_for_another_mode_and_kept(torch, counting):
    x = torch.full((4, 4), ABOVE_ONE)
    compiled = torch.compile(lambda x: lowprec.matmul(x, x), fullgraph=True, backend=counting)

    def value():
        return float(compiled(x)[0, 0]) / 4

    assert value() == IN_MODE["fp32"]
    for _ in range(2):
        with lowprec.math_mode("bf16"):
            assert value() == IN_MODE["bf16"]
        with lowprec.math_mode("tf32"):
            assert value() == IN_MODE["tf32"]
    assert value() == IN_MODE["fp32"]
    assert counting.frame_count == 3
    lowprec.set_math_mode("bf16")
    try:
        assert value() == IN_MODE["bf16"]
    finally:
        lowprec.set_math_mode(None)
    assert value() == IN_MODE["fp32"]


def test_the_guard_reaches_a_graph_that_was_compiled_before(torch, counting):
    x = torch.full((4, 4), ABOVE_ONE)
    compiled = torch.compile(
        lambda x: lowprec.matmul(x, x, math_mode="bf16"), fullgraph=True, backend=counting
    )
    assert float(compiled(x)[0, 0]) == 4
    with lowprec.fp32_guard(frameworks=False):
        assert float(compiled(x)[0, 0]) > 4
    assert counting.frame_count == 1


def test_a_task_sees_its_own_mode_in_a_shared_graph(torch, counting):
    """Tasks of one thread share the note by which graphs are guarded; the operator asks the scopes of the task."""
    import asyncio

    x = torch.full((4, 4), ABOVE_ONE)
    compiled = torch.compile(lambda x: lowprec.matmul(x, x), fullgraph=True, backend=counting)
    found = {}

    async def task(mode):
        with lowprec.math_mode(mode):
            await asyncio.sleep(0)
            found[mode] = float(compiled(x)[0, 0]) / 4
            await asyncio.sleep(0)

    async def main():
        await asyncio.gather(*map(task, IN_MODE))

    asyncio.run(main())
    assert found == IN_MODE


def test_backward_runs_in_the_mode_of_the_forward_product(torch, counting):
    x = torch.full((4, 4), ABOVE_ONE, requires_grad=True)
    ones = torch.full((4, 4), ABOVE_ONE)
    compiled = torch.compile(lambda x: lowprec.matmul(x, ones), fullgraph=True, backend="aot_eager")
    eager = lambda x: lowprec.matmul(x, ones)  # noqa: E731
    for call in (eager, compiled):
        for mode, value in IN_MODE.items():
            with lowprec.math_mode(mode):
                y = call(x)
            (gradient,) = torch.autograd.grad(y, x, ones)
            assert float(gradient[0, 0]) / 4 == value
        with lowprec.math_mode("bf16"):
            y = call(x)
        with lowprec.fp32_guard(frameworks=False):
            (gradient,) = torch.autograd.grad(y, x, ones)
        assert float(gradient[0, 0]) / 4 == IN_MODE["fp32"]


def test_a_mode_of_its_own_for_the_backward_pass(torch):
    x = torch.full((4, 4), ABOVE_ONE, requires_grad=True)
    y = lowprec.torch.matmul(x, x.detach(), math_mode="fp32", backward_mode="bf16")
    assert float(y.detach()[0, 0]) / 4 == IN_MODE["fp32"]
    (gradient,) = torch.autograd.grad(y, x, torch.full((4, 4), ABOVE_ONE))
    assert float(gradient[0, 0]) / 4 == IN_MODE["bf16"]
    with pytest.raises(lowprec.ModeError, match="backward_mode 'bf17'"):
        lowprec.torch.matmul(x, x, backward_mode="bf17")


def test_shapes_that_change_make_one_graph(torch, counting):
    compiled = torch.compile(
        lambda a, b: lowprec.matmul(a, b, bias=b[0], activation="relu"),
        fullgraph=True, backend=counting, dynamic=True,
    )  # fmt: skip
    for m, k, n in ((3, 4, 5), (6, 7, 8), (9, 4, 3)):
        a, b = torch.ones(m, k), torch.ones(k, n)
        assert torch.equal(compiled(a, b), torch.full((m, n), k + 1.0))
    assert counting.frame_count == 1


def test_the_product_itself_is_compiled_per_mode(torch, counting):
    x = torch.full((4, 4), ABOVE_ONE)
    compiled = torch.compile(lowprec.matmul, fullgraph=True, backend=counting)
    for mode in ("fp32", "bf16", "fp32"):
        with lowprec.math_mode(mode):
            assert float(compiled(x, x)[0, 0]) / 4 == IN_MODE[mode]
    assert counting.frame_count == 2
    with pytest.raises(torch._dynamo.exc.Unsupported, match="is in no graph with out="):
        torch.compile(
            lambda x: lowprec.matmul(x, x, out=x.clone()), fullgraph=True, backend=counting
        )(x)
    with pytest.raises(lowprec.DTypeError, match="alpha must be a number"):
        torch.compile(lambda x: lowprec.matmul(x, x, alpha="1"), backend=counting)(x)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "contraction",
    [
        lambda a, b: lowprec.einsum("bij,bjk,kl->il", a, b, b[0]),
        lambda a, b: lowprec.einsum("bij->j", a) + lowprec.einsum("ii->i", b[0]),
        lambda a, b: lowprec.tensordot(a, b, axes=((0, 2), (0, 1))),
        lambda a, b: lowprec.vecdot(a, b[0]),
        lambda a, b: lowprec.linear(a, b[0], b[0, 0], activation="relu"),
    ],
    ids=["einsum", "sums", "tensordot", "vecdot", "linear"],
)
@pytest.mark.sampled(2)
def test_contractions_in_graphs(torch, counting, contraction, dynamic):
    compiled = torch.compile(contraction, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for n in (4, 5):
        x = operands(torch, (2, n, n), (2, n, n))
        found = compiled(*x)
        close(torch, found, contraction(*x))
        found, true = (torch.autograd.grad(f(*x).sum(), x) for f in (compiled, contraction))
        close(torch, found, true)


def encoder(torch, linear):
    torch.manual_seed(0)
    return torch.nn.Sequential(linear(4, 8), torch.nn.GELU(), linear(8, 2))


def test_linear_is_torchs_and_can_be_exported_and_trained(torch, lt):
    mine, theirs = encoder(torch, lt.Linear), encoder(torch, torch.nn.Linear)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 4)
    torch.testing.assert_close(mine(x), theirs(x))
    exported = torch.export.export(mine, (x,)).module()
    for model in (theirs, exported):
        model(x).square().sum().backward()
    gradients = dict(exported.named_parameters())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad)
    shared = lt.Linear.sharing(theirs[0], math_mode="bf16")
    assert shared.weight is theirs[0].weight
    assert "math_mode=bf16" in repr(shared)
    copy.deepcopy(mine)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which PyTorch reads
@pytest.mark.usefixtures("lt")
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_torchs_own_checks_of_an_operator(torch, mode):
    x = operands(torch, (2, 3, 4), (4, 5), torch.float32)
    torch.library.opcheck(torch.ops.lowprec.matmul.default, (*x, mode, mode))
    low = operands(torch, (2, 3, 4), (4, 5), torch.bfloat16)
    torch.library.opcheck(torch.ops.lowprec.matmul.default, (*low, mode, mode, 0.5, "accumulator"))


def test_fake_tensors_and_flop_counters_see_the_product(torch):
    from torch.utils.flop_counter import FlopCounterMode

    with torch._subclasses.FakeTensorMode():
        found = lowprec.matmul(torch.ones(2, 3, 4), torch.ones(4, 5))
        assert (found.shape, found.dtype) == ((2, 3, 5), torch.float32)
        half = torch.ones(2, 2, dtype=torch.bfloat16)
        assert lowprec.matmul(half, half, out_dtype="float32").dtype == torch.float32
    with FlopCounterMode(display=False) as counter:
        lowprec.matmul(torch.ones(2, 3, 4), torch.ones(4, 5))
    assert counter.get_total_flops() == 2 * 2 * 3 * 4 * 5


# -- what is refused ------------------------------------------------------------------------------


#: Within it is FP64 alone, on every device: FP32's inputs are exact, and FP64's sums are rounded once.
ONLY_FP64 = 1e-7


@pytest.mark.parametrize("column", ["plain", "recorded", "vmap", "linear", "layer"])
def test_rtol_chooses_the_mode_of_forward_and_backward(torch, lt, column):
    x, y = operands(torch, (8, 64), (64, 4), torch.float32, grad=column != "plain")
    layer = lt.Linear.sharing(torch.nn.Linear(64, 4), rtol=ONLY_FP64)
    calls = {
        "vmap": lambda: torch.vmap(lambda x: lowprec.matmul(x, y, rtol=ONLY_FP64))(x[:, None]),
        "linear": lambda: lt.linear(x, y.mT, rtol=ONLY_FP64, bound="guaranteed"),
        "layer": lambda: layer(x),
    }
    with lowprec.profile() as profile:
        found = calls.get(column, lambda: lowprec.matmul(x, y, rtol=ONLY_FP64))()
        if found.requires_grad:
            found.sum().backward()
    assert {record.mode for record in profile.records} == {"fp64"}
    assert len(profile.records) == (1 if column == "plain" else 3)
    with lowprec.fp32_guard(), lowprec.profile() as profile:
        calls.get(column, lambda: lowprec.matmul(x, y, rtol=ONLY_FP64))()
    assert [record.mode for record in profile.records] == ["fp32"]
    assert "rtol=1e-07" in repr(layer)


@pytest.mark.parametrize("dynamic", [None, True])
def test_rtol_chooses_the_mode_of_a_graph_by_its_shapes(torch, counting, dynamic):
    x, y = operands(torch, (8, 64), (64, 4), torch.float32, grad=False)
    compiled = torch.compile(
        lambda x, y: lowprec.matmul(x, y, rtol=ONLY_FP64),
        fullgraph=True, backend=counting, dynamic=dynamic,
    )  # fmt: skip
    with lowprec.profile() as profile:
        compiled(x, y)
        with lowprec.fp32_guard():
            compiled(x, y)
        compiled(x, y)
        compiled(x[:, :32], y[:32])
    assert [record.mode for record in profile.records] == ["fp64", "fp32", "fp64", "fp64"]
    assert counting.frame_count == 3


def test_wrong_operands_are_reported_by_type(torch, lt):
    x = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(lowprec.ShapeError, match="does not have enough dimensions"):
        lt.matmul(torch.tensor(1.0), x)
    with pytest.raises(lowprec.ArrayError, match=r"b is a numpy\.ndarray together with tensors"):
        lowprec.matmul(x, np.ones((2, 2), np.float32))
    with pytest.raises(lowprec.ArrayError, match=r"^b: expected an array .*, got NoneType"):
        lowprec.matmul(x, None)
    with pytest.raises(lowprec.ShapeError, match=r"the weight has shape \(n, k\), got \(2,\)"):
        lt.linear(x, x[0])
    with pytest.raises(lowprec.ModeError, match="rtol must be a positive finite number"):
        lt.Linear(2, 2, rtol=0)
    with pytest.raises(lowprec.ModeError, match="bound"):
        lt.Linear(2, 2, rtol=0.1, bound="likely")
    with pytest.raises(
        lowprec.UnsupportedError, match=r"out= cannot be used here: .*, or omit out=$"
    ):
        lowprec.matmul(x, x, out=torch.ones(2, 2))


# -- gradients by batches, and what is kept for them ----------------------------------------------


@pytest.mark.parametrize("needed", [(True, False), (False, True), (True, True)])
def test_operands_that_no_gradient_uses_are_not_saved(torch, needed):
    """A weight may be updated between two backward passes; frozen weights keep no activations."""
    x, w = (
        t.requires_grad_(n)
        for t, n in zip(operands(torch, (3, 4), (4, 2), grad=False), needed, strict=True)
    )
    out = lowprec.matmul(x, w)
    saved = [t is not None for t in out.grad_fn.saved_tensors]
    assert saved == [needed[1], needed[0]]
    with torch.no_grad():
        for t, n in ((x, needed[1]), (w, needed[0])):
            if not n:
                t.add_(1)
    out.sum().backward()


# -- tensors without elements of their own --------------------------------------------------------


def test_meta_tensors_give_meta_results(torch, lt):
    x = torch.ones(5, 3, device="meta", dtype=torch.bfloat16)
    layer = lt.Linear(3, 4, device="meta")
    for found, shape, dtype in (
        (lowprec.matmul(x, torch.ones(2, 3, 4, device="meta")), (2, 5, 4), torch.float32),
        (lowprec.matmul(x, x.mT, out_dtype="float32"), (5, 5), torch.float32),
        (layer(x.float().requires_grad_()), (5, 4), torch.float32),
    ):
        assert (found.is_meta, tuple(found.shape), found.dtype) == (True, shape, dtype)
    found.sum().backward()
    assert layer.weight.grad.is_meta
    for a, b in ((x, torch.ones(3, 3)), (torch.ones(3, 5), x)):
        with pytest.raises(lowprec.DeviceError, match="move one of them"):
            lowprec.matmul(a, b)


@pytest.mark.parametrize("raises", [True, False])
def test_subclasses_that_lack_the_product_are_refused(torch, raises):
    class Int8Tensor(torch.Tensor):
        @staticmethod
        def __new__(cls, shape):
            return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

        @classmethod
        def __torch_dispatch__(cls, function, *_):
            if raises:  # as torchao's
                raise NotImplementedError(f"unimplemented operator {function}")
            return NotImplemented

    x, weight = torch.ones(4, 4), Int8Tensor((4, 4))
    for call in (
        lambda: lowprec.matmul(x, weight),
        lambda: lowprec.matmul(x.clone().requires_grad_(), weight),
        lambda: lowprec.matmul(x, x, c=weight, beta=1.0),
        lambda: lowprec.matmul(x, x, out=weight),
        lambda: lowprec.linear(x, weight),
        lambda: lowprec.einsum("ij,kj->ik", x, weight),
        lambda: lowprec.tensordot(x, weight, axes=1),
        lambda: lowprec.vecdot(x, weight),
        lambda: lowprec.quantize(weight, "mxfp8"),
    ):
        with pytest.raises(
            (lowprec.ArrayError, lowprec.UnsupportedError),
            match=r"Int8Tensor is not.*dequantize\(\)",
        ):
            call()


def test_out_of_inference_mode(torch):
    x = torch.eye(4)
    with torch.inference_mode():
        out = torch.zeros(4, 4)
        assert torch.equal(lowprec.matmul(x, x, out=out), x)
    with pytest.raises(
        lowprec.ArrayError, match=r"^out was made in inference mode.*pass out\.clone\(\)"
    ):
        lowprec.matmul(2 * x, x, out=out)
    assert torch.equal(out, x)


def test_subclasses_that_only_add_attributes_are_accepted(torch):
    class Tagged(torch.nn.Parameter):
        pass

    class Named(torch.Tensor):
        pass

    x, w = operands(torch, (3, 4), (4, 2), grad=False)
    tagged = Tagged(w)
    close(torch, lowprec.matmul(x.as_subclass(Named), w).as_subclass(torch.Tensor), x @ w)
    out = lowprec.matmul(x, tagged)
    close(torch, out.detach(), x @ w)
    out.sum().backward()
    close(torch, tagged.grad, x.sum(0)[:, None].expand(4, 2))


@pytest.mark.parametrize("alpha", [0.0, 0])
@pytest.mark.parametrize("grad", [False, True])
def test_a_product_times_zero_is_not_read(torch, lt, alpha, grad):
    c = torch.ones(3, 3)
    nan = torch.full((3, 3), torch.nan).requires_grad_(grad)
    found = lt.matmul(nan, c, c=c, alpha=alpha, beta=2.0)
    assert torch.equal(found.detach(), 2 * c)
    if grad:
        found.sum().backward()
        assert torch.equal(nan.grad, torch.zeros(3, 3))
