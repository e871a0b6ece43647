"""Every product of a model that does not use lowprec: by kernels in PyTorch's dispatcher, and in compiled graphs."""

import asyncio
import sys
import threading
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

import lowprec
from support import interrupts
from support.programs import run_python

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

#: Unit roundoff of bfloat16, to which both operands of a product are rounded.
UNIT = 2.0**-8


@pytest.fixture
def intercept(torch, lt):
    yield lt.intercept
    assert not lt.intercept._holders


def registered(torch):
    """Whether a kernel of lowprec's is in front of PyTorch's."""
    return "lowprec" in torch._C._dispatch_dump("aten::mm")


def plain_attention():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


def draw(torch, *shape, dtype=None, seed=0):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made, dtype=dtype or torch.float32)


def counts(report):
    found = {}
    for p in report.taken:
        found[p.operator] = found.get(p.operator, 0) + p.count
    return found


# -- which products are taken ---------------------------------------------------------------------

PRODUCTS = {
    "mm": (lambda t, a, b: t.mm(a, b), ("mm",)),
    "mm, out": (lambda t, a, b: t.mm(a, b, out=a.new_empty(0)), ("mm",)),
    "mm, strided out": (lambda t, a, b: t.mm(a, b, out=a.new_empty(4, 4).T), ("mm",)),
    "matmul, a batch": (lambda t, a, b: t.matmul(a.expand(2, 4, 4), b), ("mm", "bmm")),
    "bmm": (lambda t, a, b: t.bmm(a[None], b[None]), ("bmm",)),
    "mv": (lambda t, a, b: a @ b[0], ("addmv",)),
    "dot": (lambda t, a, b: t.dot(a[0], b[0]), ("dot",)),
    "vdot": (lambda t, a, b: t.vdot(a[0], b[0]), ("dot", "vdot")),
    "addmm": (lambda t, a, b: t.addmm(b, a, b, beta=0.5, alpha=2), ("addmm",)),
    "addmm, a column": (lambda t, a, b: t.addmm(b[:, :1], a, b), ("addmm",)),
    "addmm, a number": (lambda t, a, b: t.addmm(b[0, 0], a, b), ("addmm",)),
    "addmm, nothing added": (
        lambda t, a, b: t.addmm(t.full_like(b, t.nan), a, b, beta=0),
        ("addmm",),
    ),
    "addmm_": (lambda t, a, b: b.clone().addmm_(a, b), ("addmm",)),
    "addmm, out": (lambda t, a, b: t.addmm(b[0], a, b, out=a.new_empty(4, 4)), ("addmm",)),
    "baddbmm": (lambda t, a, b: t.baddbmm(b[None], a[None], b[None], alpha=3), ("baddbmm",)),
    "addmv": (lambda t, a, b: t.addmv(b[0], a, b[1], alpha=2), ("addmv",)),
    "addbmm": (lambda t, a, b: t.addbmm(b, t.stack([a, b]), t.stack([b, a]), beta=2), ("addmm",)),
    "linear": (lambda t, a, b: t.nn.functional.linear(a, b, b[0]), ("addmm",)),
    "einsum": (lambda t, a, b: t.einsum("ij,jk->ki", a, b), ("bmm",)),
    "tensordot": (lambda t, a, b: t.tensordot(a, b, 1), ("mm",)),
    "chain": (lambda t, a, b: t.linalg.multi_dot([a, b, a]), ("mm",)),
    "distances": (lambda t, a, b: t.cdist(a, b, compute_mode="use_mm_for_euclid_dist"), ("mm",)),
    "matrix_exp": (lambda t, a, b: t.matrix_exp(a / 4), ("bmm",)),
    "a cell": (lambda t, a, b: t.gru_cell(a, b, b.repeat(3, 1), a.repeat(3, 1)), ("mm",)),
    "activation": (
        lambda t, a, b: t._addmm_activation(b[0], a, b, use_gelu=True),
        ("_addmm_activation",),
    ),
    "conjugated": (lambda t, a, b: t.complex(a, b).mH @ t.complex(b, a), ("mm",)),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_taken(torch, intercept, name, inference):
    call, operators = PRODUCTS[name]
    a, b = draw(torch, 4, 4), draw(torch, 4, 4, seed=1)
    true = call(torch, a.double(), b.double())
    rules = {"dot": "tf32", "*": "tf32"}
    with torch.inference_mode(inference), lowprec.profile() as profile, intercept(rules) as seen:
        found = call(torch, a, b)
    report = seen.report()
    assert counts(report).keys() & set(operators)
    assert not report.passed
    assert {r.mode for r in profile.records} == {"tf32"}
    assert found.shape == true.shape
    # Two operands rounded to 11 bits, sums of at most 8 products of normal deviates with factors up to 3, at most two
    # products deep; the exponential of attention stretches by less than what follows.
    torch.testing.assert_close(found.to(true.dtype), true, rtol=2**-8, atol=2**-6)


def test_out_receives_the_product(torch, intercept):
    a = draw(torch, 4, 4)
    out, strided = torch.zeros(4, 4), torch.zeros(4, 4).T
    with intercept("fp32"):
        assert torch.mm(a, a, out=out) is out
        assert torch.mm(a, a, out=strided) is strided
        a_copy = a.clone()
        assert a_copy.addmm_(a, a) is a_copy
    torch.testing.assert_close(out, a @ a)
    torch.testing.assert_close(strided, a @ a)
    torch.testing.assert_close(a_copy, a + a @ a)
    assert strided.stride() == (1, 4)


def mkldnn(torch, layer=None):
    from torch.utils.mkldnn import to_mkldnn

    return to_mkldnn(layer or torch.nn.Linear(4, 4))


def in_a_thread(function, *arguments):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


PASSED = {
    "vectors": (lambda t: t.dot(t.ones(4), t.ones(4)), "dot", "vectors are not rounded"),
    "a row and a column": (lambda t: t.ones(1, 4) @ t.ones(4, 1), "mm", "vectors are not rounded"),
    "float64": (
        lambda t: t.eye(2, dtype=t.float64) @ t.eye(2, dtype=t.float64),
        "mm",
        "the mode does not act",
    ),
    "integers": (
        lambda t: t.eye(2, dtype=t.int64) @ t.eye(2, dtype=t.int64),
        "mm",
        "the mode does not act",
    ),
    "convolution": (
        lambda t: mkldnn(t, t.nn.Conv2d(1, 1, 2))(t.ones(1, 1, 3, 3).to_mkldnn()),
        "mkldnn_convolution",
        "a convolution in one kernel",
    ),
    "solver": (lambda t: t.linalg.inv(t.eye(2)), "linalg_inv_ex", "a solver or a factorisation"),
    "attention": (
        lambda t: t.nn.functional.scaled_dot_product_attention(
            *[t.ones(1, 1, 2, 2, dtype=t.float64)] * 3
        ),
        "attention",
        "does not act on this element type",
    ),
    "dynamic quantisation": (
        lambda t: t.ao.nn.quantized.dynamic.Linear(4, 4)(t.ones(2, 4)),
        "linear_dynamic",
        "a fused kernel",
    ),
    "sparse": (
        lambda t: t.eye(2).to_sparse() @ t.eye(2),
        "mm",
        "sparse, quantised or nested storage",
    ),
    "mkldnn": (lambda t: mkldnn(t)(t.ones(2, 4).to_mkldnn()), "mkldnn_linear", "a fused kernel"),
    "thread": (
        lambda t: in_a_thread(t.mm, t.eye(2), t.eye(2)),
        "mm",
        "another thread or task, outside the block",
    ),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", PASSED)
def test_products_passed_by_are_reported_with_a_reason(torch, intercept, name):
    call, operator, why = PASSED[name]
    with torch.no_grad(), intercept("bf16") as seen:
        call(torch)
    (passed,) = seen.report().passed
    assert (passed.operator, passed.count, passed.mode) == (operator, 1, "")
    assert why in passed.reason
    assert not counts(seen.report())
    assert operator in str(seen.report())


def test_multiplications_of_fused_kernels(torch, intercept):
    """Attention has two products of heads, five backward; an LSTM one per gate and weight, and two backward."""
    q, k = (draw(torch, 2, heads, rows, 8).requires_grad_() for heads, rows in ((6, 5), (3, 7)))
    lstm, x = torch.nn.LSTM(3, 4), draw(torch, 5, 2, 3)
    with intercept({"attention": "fp32"}) as seen:
        torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True).sum().backward()
        lstm(x)[0].sum().backward()
    found = {
        (p.operator.partition("_backward")[0], p.backward): p.multiplications
        for p in (*seen.report().taken, *seen.report().passed)
    }
    scores = 2 * 6 * 5 * 7 * 8
    gates = 5 * 2 * (4 * 4 * 3 + 4 * 4 * 4)
    assert found == {
        ("attention", False): 2 * scores,
        ("attention", True): 5 * scores,
        ("mkldnn_rnn_layer", False): gates,
        ("mkldnn_rnn_layer", True): 2 * gates,
    }


def test_a_loaded_package_is_not_visible(intercept, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.package.package", types.ModuleType("package"))
    with intercept("bf16") as seen:
        pass
    for _ in range(2):
        (row,) = seen.report().passed
        assert (row.operator, row.count, row.multiplications) == ("AOTInductor", 0, 0)
        assert row.reason.startswith("not visible")


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", ["pinv", "lstsq"])
def test_complex_solvers_conjugate_inside_the_block(torch, intercept, name, inference):
    """PyTorch's kernels conjugate lazily, which it excludes below a mode."""
    leaves = [draw(torch, 3, n, dtype=torch.complex64, seed=n).requires_grad_() for n in (3, 2)]

    def call():
        x = [leaf.detach() for leaf in leaves] if inference else leaves
        if name == "pinv":
            found = torch.linalg.pinv(x[0]) @ x[1]
        else:
            found = torch.linalg.lstsq(*x).solution
        if inference:
            return [found]
        return [found.detach(), *torch.autograd.grad(found.abs().sum(), leaves)]

    with torch.inference_mode(inference):
        true = call()
        with intercept("fp32"):
            found = call()
    # The same kernels but for the order of sums of three products; the condition number is below 2^5.
    torch.testing.assert_close(found, true, rtol=2.0**-12, atol=2.0**-12)


def test_a_resized_out_is_warned_of_where_the_program_calls(torch, intercept):
    a = draw(torch, 4, 4)
    outs = {"empty": torch.empty(0), "resized": torch.empty(2, 3)}
    with warnings.catch_warnings(record=True) as warned, intercept("fp32") as seen:
        warnings.simplefilter("always")
        for out in outs.values():
            assert torch.mm(a, a, out=out) is out
    (warning,) = warned
    assert "An output with one or more elements was resized since it had shape [2, 3]" in str(
        warning.message
    )
    assert warning.filename == __file__
    assert counts(seen.report()) == {"mm": 2}
    for out in outs.values():
        torch.testing.assert_close(out, a @ a)


#: In-place operators on elements that share memory, and whether PyTorch computes something.
SHARED = {
    "addmv_": (lambda t, a: a.new_ones(1).expand(4).addmv_(a, a[0]), True),
    "baddbmm_": (
        lambda t, a: (
            a.new_ones(1, 1, 1).expand(2, 4, 4).baddbmm_(a.expand(2, 4, 4), a.expand(2, 4, 4))
        ),
        True,
    ),
    "addmm_": (lambda t, a: a.new_ones(1, 1).expand(4, 4).addmm_(a, a), False),
    "mm, out": (lambda t, a: t.mm(a, a, out=a.new_ones(1, 1).expand(4, 4)), False),
}


@pytest.mark.parametrize("name", SHARED)
def test_results_that_share_memory_are_left_to_torch(torch, intercept, name):
    call, is_computed = SHARED[name]
    a = draw(torch, 4, 4)
    with intercept("fp32") as seen:
        if is_computed:
            found = call(torch, a)
            assert torch.equal(found, call(torch, a))
        else:
            with pytest.raises(RuntimeError, match="single memory location"):
                call(torch, a)
    passed = [(p.operator, p.count, p.detail) for p in seen.report().passed]
    why = "elements of the result share memory"
    assert passed == ([(name.removesuffix("_"), 2, why)] if is_computed else [])
    assert not seen.report().taken
    if is_computed:
        assert torch.equal(found, call(torch, a))


ADDED = {
    "addmm": lambda t, c, a, b, **k: t.addmm(c, a, b, **k),
    "addmm_": lambda t, c, a, b, **k: c.clone().addmm_(a, b, **k),
    "addmv": lambda t, c, a, b, **k: t.addmv(c[0], a, b[0], **k),
    "addbmm": lambda t, c, a, b, **k: t.addbmm(c, a[None], b[None], **k),
}


@pytest.mark.parametrize("beta", [0, 0.5, 1])
@pytest.mark.parametrize("name", ADDED)
def test_alpha_of_zero_reads_no_product(torch, intercept, name, beta):
    call, c, nan = ADDED[name], draw(torch, 3, 3), torch.full((3, 3), torch.nan)
    with intercept("fp32"):
        found = call(torch, c, nan, nan, alpha=0, beta=beta)
    assert torch.equal(found, beta * (c[0] if found.ndim == 1 else c))


#: PyTorch's reads the product for an alpha of zero, too.
ADDED_TO_STACKS = {"baddbmm": lambda t, c, a, b, **k: t.baddbmm(c[None], a[None], b[None], **k)[0]}


@pytest.mark.parametrize("name", [*ADDED, *ADDED_TO_STACKS])
@pytest.mark.parametrize("factors", [{"beta": True}, {"beta": False}, {"alpha": True, "beta": 2}])
def test_factors_may_be_bool(torch, intercept, factors, name):
    call, c, x = (ADDED | ADDED_TO_STACKS)[name], draw(torch, 3, 3), torch.eye(3)
    true = call(torch, c, x, x, **factors)
    with intercept("fp32") as seen:
        found = call(torch, c, x, x, **factors)
    assert torch.equal(found, true)
    assert seen.report().taken
    assert not seen.report().passed


def test_a_function_is_decorated(torch, intercept):
    seen = intercept("bf16")
    x = torch.full((4, 4), 1 + 2.0**-9)

    @seen
    def product(n):
        """Multiply."""
        if n:
            product(n - 1)
        return float((x @ x)[0, 0])

    assert product.__doc__ == "Multiply."
    assert product(1) == 4
    assert float((x @ x)[0, 0]) > 4
    assert counts(seen.report()) == {"mm": 2}

    @seen
    async def task():
        return product(0)

    assert asyncio.run(task()) == 4
    assert counts(seen.report()) == {"mm": 3}


#: What PyTorch refuses, and lowprec would take.
REFUSED = {
    "bmm broadcasts": (
        lambda t: t.bmm(t.ones(1, 2, 2), t.ones(3, 2, 2)),
        "Expected size for first",
    ),
    "mm of other shapes": (lambda t: t.ones(2, 3) @ t.ones(2, 3), "cannot be multiplied"),
    "mm of a stack": (lambda t: t.mm(t.ones(3, 2, 2), t.ones(2, 2)), "must be a matrix"),
    "out of another type": (
        lambda t: t.mm(t.ones(2, 2), t.ones(2, 2), out=t.ones(2, 2, dtype=t.float64)),
        "out tensor to have dtype",
    ),
    "addend of another type": (
        lambda t: t.addmm(t.ones(2, dtype=t.float16), t.ones(2, 2), t.ones(2, 2)),
        "must have the same dtype",
    ),
    "in place of another shape": (
        lambda t: t.ones(3).addmm_(t.ones(2, 4), t.ones(4, 3)),
        "Bad in-place call",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_of_torch_stay_errors(torch, intercept, name):
    call, message = REFUSED[name]
    with intercept("fp32") as seen, pytest.raises(RuntimeError, match=message):
        call(torch)
    assert seen.report().products == ()


# -- an encoder -----------------------------------------------------------------------------------


def encoder(torch, layers=2):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def step(torch, model, run=None):
    """Return the output and the gradients of a step, by the name of the parameter."""
    model.zero_grad()
    y = (model if run is None else run)(draw(torch, 2, 5, 16))
    (y * draw(torch, 2, 5, 16, seed=1)).sum().backward()
    return {"output": y.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()}


#: Of one layer of an encoder: the projection of q, k and v, two of attention, one behind it, two of the feed-forward
#: part; each twice in the backward pass, but for the gradient of the input of the first one.
FORWARD, BACKWARD = 6, 12


def test_an_encoder_is_taken_forward_and_backward(torch, intercept):
    model = encoder(torch)
    with plain_attention(), intercept("bf16") as seen, lowprec.profile() as profile:
        low = step(torch, model)
    with plain_attention():
        full = step(torch, model)
        with intercept("fp32"):
            found = step(torch, model)
    report = seen.report()
    assert not report.passed
    assert not [text for text in report.remarks if "backward" in text]
    assert sum(p.count for p in report.taken if not p.backward) == 2 * FORWARD
    assert sum(p.count for p in report.taken if p.backward) == 2 * BACKWARD - 1
    assert len(profile) == 2 * (FORWARD + BACKWARD) - 1
    assert {r.mode for r in profile.records} == {"bf16"}
    assert not torch.equal(low["output"], full["output"])
    # In FP32 the same products but for the order of sums of up to 32 products, 20 in a row: 2^-24 * 32 * 20, and what
    # LayerNorm makes of it.
    torch.testing.assert_close(found, full, rtol=2.0**-12, atol=2.0**-12)


# -- around the block -----------------------------------------------------------------------------


def test_a_backward_pass_after_the_block_is_reported(torch, intercept):
    layer = torch.nn.Linear(4, 4)
    with intercept("bf16") as seen:
        y = layer(torch.ones(2, 4))
    y.sum().backward()
    assert "No backward pass ran inside the block" in str(seen.report())
    assert sum(p.count for p in seen.report().taken) == 1


def test_nested_blocks_and_other_modes(torch, intercept):
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.full((4, 4), 1 + 2.0**-9)
    with FlopCounterMode(display=False) as flops, intercept("bf16") as seen:
        assert float((x @ x)[0, 0]) == 4
        torch.addmm(x, x, x, out=torch.empty(0))
    assert flops.get_total_flops() == 2 * 2 * 4**3
    assert sum(p.count for p in seen.report().taken) == 2
    with intercept("fp32") as outer, intercept("bf16") as inner:
        assert float((x @ x)[0, 0]) == 4
    assert counts(inner.report()) == {"mm": 1}
    assert not counts(outer.report())
    with inner, inner:
        x @ x
    assert counts(inner.report()) == {"mm": 2}


def test_blocks_overlap_in_threads(torch, intercept):
    x = torch.full((4, 4), 1 + 2.0**-9)
    entered, leave = threading.Event(), threading.Event()

    def other():
        with intercept("fp32"):
            entered.set()
            leave.wait(60)
            found.append(float((x @ x)[0, 0]))

    found = []
    thread = threading.Thread(target=other)
    with intercept("bf16"):
        thread.start()
        assert entered.wait(60)
        assert float((x @ x)[0, 0]) == 4
    assert float((x @ x)[0, 0]) > 4
    leave.set()
    thread.join()
    assert found[0] > 4


@pytest.mark.parametrize("kept_by", ["nothing", "another thread", "a backward pass"])
def test_idle_kernels_are_removed(torch, intercept, kept_by, monkeypatch):
    x = torch.ones(2, 2)
    before = set(threading.enumerate())  # threads of earlier tests, which do not multiply
    monkeypatch.setattr(
        threading, "active_count", lambda: 1 + len(set(threading.enumerate()) - before)
    )

    def multiply(*_):
        for _ in range(999):
            torch.mm(x, x)
        assert registered(torch)
        torch.mm(x, x)

    for _ in range(2):  # the second block registers them again
        with intercept("bf16") as seen:
            x @ x
        assert counts(seen.report()) == {"mm": 1}
        if kept_by == "another thread":
            end = threading.Event()
            thread = threading.Thread(target=end.wait, args=(60,))
            thread.start()
            multiply()
            assert registered(torch)
            end.set()
            thread.join()
        elif kept_by == "a backward pass":
            y = x.clone().requires_grad_().sum()
            y.register_hook(multiply)
            y.backward()
            assert registered(torch)
        multiply()
        assert not registered(torch)


def test_an_exit_in_another_thread_ends_the_block(torch, intercept):
    x = torch.ones(2, 2)
    seen = intercept("bf16").__enter__()
    x @ x
    text = "left in another thread or task than it was entered in"
    with ThreadPoolExecutor(1) as pool, pytest.warns(lowprec.LowprecWarning, match=text):
        pool.submit(seen.__exit__, None, None, None).result()
    x @ x
    with intercept("fp32"):
        x @ x
    assert counts(seen.report()) == {"mm": 1}


def test_a_block_after_an_interrupt_at_any_step(torch, intercept):
    x = torch.ones(2, 2)

    def block():
        with intercept("bf16"):
            x @ x

    def check():
        assert torch.is_grad_enabled()
        with intercept("fp32") as seen:
            x @ x
        assert counts(seen.report()) == {"mm": 1}

    block()  # what is looked up once
    assert interrupts.count(block, check, KeyboardInterrupt) > 50
    for entry in intercept._holders:  # of an interrupt before the first line of `__exit__`
        intercept._end(entry)


@pytest.mark.usefixtures("torch")
def test_subclasses_of_tensors_pass():
    # They have operators of their own, as prim::device. An exception in the mode would end the process.
    run_python("""
        import torch
        from torch._subclasses import FakeTensorMode
        from lowprec.torch import intercept

        layer, x = torch.nn.Linear(4, 2), torch.ones(3, 4)
        with intercept("bf16") as seen:
            torch.export.export(layer, (x,))
            with FakeTensorMode():
                torch.nn.Linear(4, 2)(torch.ones(3, 4))
            assert not seen.report().products
            jagged = torch.nested.nested_tensor([x, x], layout=torch.jagged)
            torch.layer_norm(layer(jagged), (2,))
        assert [p.operator for p in seen.report().taken] == ["addmm"]
    """)


# -- compiled graphs ------------------------------------------------------------------------------


def passes_alone(mode):
    """Return a backend of torch.compile that runs Inductor's graphs after lowprec's passes, without its kernels."""
    from functorch.compile import default_partition, make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    import lowprec.torch as lt

    options = lt.inductor_options(mode)

    def whole(graph, *args):
        options["joint_custom_pre_pass"](graph.graph)
        graph.recompile()
        return make_boxed_func(graph.forward)

    def partition(graph, *args, **keywords):
        options["joint_custom_pre_pass"](graph.graph)
        graph.recompile()
        return default_partition(graph, *args, **keywords)

    def half(graph, *args):
        return make_boxed_func(graph.forward)

    def backend(graph, inputs):
        options["pre_grad_custom_pass"](graph.graph)
        graph.recompile()
        return aot_autograd(
            fw_compiler=half, bw_compiler=half, inference_compiler=whole, partition_fn=partition
        )(graph, inputs)

    return backend


@pytest.fixture
def fresh(torch):
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("mode", "dtype", "other"),
    [("fp64_emulated", "float64", "float32"), ("bf16", "float32", "float64")],
)
def test_a_mode_takes_the_element_types_on_which_it_acts(torch, intercept, mode, dtype, other):
    """In a block and in a compiled graph; PyTorch computes the others."""
    x = torch.arange(16.0).reshape(4, 4).to(getattr(torch, dtype))
    y = x.to(getattr(torch, other))
    exact = x @ x
    with intercept(mode) as seen:
        assert torch.equal(x @ x, exact)
        assert torch.equal(y @ y, exact.to(y.dtype))
    assert [(p.dtype, p.mode) for p in seen.report().taken] == [(dtype, mode)]
    assert [(p.dtype, p.reason) for p in seen.report().passed] == [
        (other, "the mode does not act on this element type")
    ]
    compiled = torch.compile(
        lambda x, y: (x @ x, y @ y), fullgraph=True, backend=passes_alone(mode)
    )
    with torch.no_grad(), lowprec.profile() as profile:
        found, rest = compiled(x, y)
    assert torch.equal(found, exact)
    assert torch.equal(rest, exact.to(y.dtype))
    assert [(r.a_dtype, r.mode) for r in profile.records] == [(dtype, mode)]


@pytest.mark.usefixtures("fresh")
def test_an_encoder_compiled_agrees_with_the_block(torch, intercept):
    model = encoder(torch, 1)
    with plain_attention(), intercept("bf16"):
        eager = step(torch, model)
    compiled = torch.compile(model, fullgraph=True, backend=passes_alone("bf16"))
    with lowprec.profile() as profile:
        found = step(torch, model, compiled)
    assert len(profile) == FORWARD + BACKWARD - 1
    assert {r.mode for r in profile.records} == {"bf16"}
    for name, value in eager.items():
        # The same products of the same operands; what differs is where a bias is added, by a rounding of FP32, which
        # may send a later operand to the next bfloat16.
        torch.testing.assert_close(found[name], value, rtol=UNIT, atol=UNIT)
    with torch.no_grad(), lowprec.profile() as profile:
        compiled(draw(torch, 2, 5, 16))
    assert len(profile) == FORWARD


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_sum_in_a_graph_is_rounded_once(torch, intercept, dtype):
    """As in the block, where the epilogue adds the bias; both factors are powers of two."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 512).to(getattr(torch, dtype))

    def sums(x):
        return (
            layer(x),
            torch.addmm(x, x, x.T @ x, beta=2, alpha=0.5),
            torch.addmm(layer.bias, x, layer.weight.T, beta=True),
        )

    x = torch.randn(4, 256).to(layer.weight.dtype)
    compiled = torch.compile(sums, fullgraph=True, backend=passes_alone("mxfp8"))
    with torch.no_grad(), lowprec.profile() as profile:
        found = compiled(x)
    assert [r.mode for r in profile.records] == ["mxfp8"] * 4
    with torch.no_grad(), intercept({"": "mxfp8", "addmv": "mxfp8", "*": "mxfp8"}):
        expected = sums(x)
    for y, eager in zip(found, expected, strict=True):
        assert y.dtype == eager.dtype
        assert torch.equal(y, eager)


@pytest.mark.usefixtures("fresh")
def test_rules_in_a_graph(torch):
    """The layers of both passes, also behind copies of weights; two vectors stay in FP32."""
    nn = torch.nn
    norm = nn.utils.parametrizations.weight_norm
    model = nn.ModuleDict(
        {
            "body": nn.Linear(4, 4),
            "blocks": nn.ModuleList([norm(nn.Linear(4, 4))]),
            "head": norm(nn.Linear(4, 3)),
        }
    )
    rules = {"head": "fp32", "blocks.*": "tf32", nn.Linear: "bf16", "*": "fp16"}

    def run(x):
        y = model["head"](model["blocks"][0](model["body"](x)))
        return (x @ x.T).sum() + (x[:1] @ x[:1].T).sum() + y.sum()

    compiled = torch.compile(run, fullgraph=True, backend=passes_alone(rules))
    with lowprec.profile() as profile:
        compiled(draw(torch, 5, 4)).backward()
    found = {}
    for r in profile.records:
        found[r.mode] = found.get(r.mode, 0) + 1
    assert found == {"bf16": 2, "tf32": 3, "fp32": 3, "fp16": 1}


@pytest.mark.usefixtures("fresh")
def test_products_that_a_graph_leaves_to_torch_are_reported(torch):
    model = encoder(torch, 1).eval()
    compiled = torch.compile(model, backend=passes_alone("bf16"))
    with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        compiled(draw(torch, 2, 5, 16))
    (warning,) = [w for w in warned if issubclass(w.category, lowprec.LowprecWarning)]
    assert "leaves products to PyTorch: _transformer_encoder_layer_fwd" in str(warning.message)


@pytest.mark.usefixtures("fresh", "quick_inductor")
def test_inductor_takes_the_options_and_knows_the_mode(torch, lt):
    x = torch.full((4, 4), 1 + 2.0**-9, requires_grad=True)
    f = lambda x: torch.addmm(x, x, x, beta=0, alpha=2)  # noqa: E731
    full = 8 * (1 + 2.0**-9) ** 2
    for mode, value in {"bf16": 8.0, "fp32": full, "tf32": full}.items():
        compiled = torch.compile(f, fullgraph=True, options=lt.inductor_options(mode))
        y = compiled(x)
        assert float(y.detach()[0, 0]) == value
        (gradient,) = torch.autograd.grad(y, x, torch.full((4, 4), 1.0))
        # Both operands are the same, and each gives sums of four numbers by the factor of two.
        assert float(gradient[0, 0]) == (16.0 if mode == "bf16" else 16 * (1 + 2.0**-9))
    keys = {p.uuid() for m in ("bf16", "tf32") for p in lt.inductor_options(m).values()}
    assert len(keys) == 4
    with pytest.raises(lowprec.ModeError, match="bf17"):
        lt.inductor_options("bf17")


def test_a_subclass_takes_the_products_of_all_entries(torch, lt):
    mine = type("mine", (lt.intercept,), {"__module__": "__main__"})
    x = torch.full((4, 4), 1 + 2.0**-9)
    with mine("bf16") as seen:
        assert float((x @ x)[0, 0]) == 4.0
    assert [p.count for p in seen.report().taken] == [1]
    assert not lt.intercept._holders
