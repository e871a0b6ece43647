"""Interception in PyTorch's programs: layers, transforms, graphs, processes; and PyTorch's own samples of operators."""

import gc
import threading
from collections import Counter

import numpy as np
import pytest

import lowprec
from support.programs import posix, run_python

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:.*deprecated")

#: Rounds to 1 in bfloat16.
ABOVE = 1 + 2.0**-9


@pytest.fixture
def intercept(torch, lt):
    yield lt.intercept
    # The kernels stay registered, idle, because some tests leave threads of PyTorch's behind.
    assert not lt.intercept._holders


def counts(products):
    found = Counter()
    for p in products:
        found[p.operator] += p.count
    return found


# -- layers ---------------------------------------------------------------------------------------


class Block:
    """A model with an attention-like part, whose three products share an activation, a feed-forward part and a head."""

    def __new__(cls, torch):
        nn = torch.nn

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.q, self.k, self.v = (nn.Linear(16, 16) for _ in "qkv")
                self.mlp = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
                self.lm_head = nn.Linear(16, 8, bias=False)

            def forward(self, x):
                y = self.q(x) * self.k(x) + self.v(x)
                return self.lm_head(self.mlp(y))

        torch.manual_seed(0)
        return Model()


#: Products of a layer in a training step: forward, gradient of the input, gradient of the weight.
STEP = {("lm_head", "fp32"): 3, ("mlp.0", "bf16"): 3, ("mlp.2", "bf16"): 3}
STEP |= {(name, "tf32"): 2 for name in "qkv"}  # the input needs no gradient
MODES = {"lm_head": "fp32", "mlp.*": "bf16", "*": "tf32"}


@pytest.mark.parametrize("needs_input", [False, True])
@pytest.mark.parametrize("way", ["eager", "checkpoint", "graph"])
def test_each_layer_has_its_mode(torch, intercept, way, needs_input):
    model = Block(torch)
    x = torch.randn(5, 16, requires_grad=needs_input)
    run = model
    if way == "checkpoint":
        run = lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)  # noqa: E731
    if way == "graph":
        torch._dynamo.reset()
        run = torch.compile(model, backend="aot_eager")
    with intercept(MODES) as seen:
        run(x).square().sum().backward()
    found = Counter()
    for p in seen.report().taken:
        found[p.layer, p.mode] += p.count
    expected = Counter(STEP)
    if needs_input:
        expected.update({(name, "tf32"): 1 for name in "qkv"})
    # recomputed: all but the last product, of whose result only the gradient is needed
    if way == "checkpoint":
        expected.update({key: 1 for key in STEP if needs_input or key[0] != "lm_head"})
    if way == "graph":
        # A graph shows no parameter of a weight gradient, and one activation is the operand of three layers.
        assert found["q|k|v", "tf32"] == 3
        expected.update({("q|k|v", "tf32"): 3})
        expected.subtract({(name, "tf32"): 1 for name in "qkv"})
    if way != "checkpoint":
        assert found == expected
    assert dict(found.keys()) == dict(expected.keys())
    torch._dynamo.reset()


def test_layers_are_found_by_class_after_moves_and_in_new_models(torch, intercept):
    nn = torch.nn
    with intercept({nn.Linear: "bf16"}) as seen:
        first = nn.Sequential(nn.Linear(4, 4), nn.Bilinear(4, 4, 2))
        x = torch.ones(2, 4)
        first[1](first[0](x), x)
        for _ in range(2):
            first.double().float()  # other memory
            first[0](x)
        nn.Linear(4, 3)(x)
        bare = nn.Parameter(torch.ones(4, 4))  # of no layer
        for _ in range(2):
            x @ bare
    report = seen.report()
    assert {(p.layer, p.operator): p.count for p in report.taken} == {
        ("0", "addmm"): 3,
        ("Linear", "addmm"): 1,
    }
    assert {p.reason for p in report.passed} == {
        "no mode for this layer",
        "vectors are not rounded",
    }
    embedding = nn.Embedding(8, 4)
    head = nn.Linear(4, 8, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"wte": embedding, "head": head})
    with intercept({"head": "bf16", "*": "fp32"}) as seen:
        model["head"](model["wte"](torch.tensor([1, 2]))).sum().backward()
    assert {(p.layer, p.mode) for p in seen.report().taken} == {("head", "bf16")}
    with pytest.raises(lowprec.ModeError, match=r"a name, a class or a function, got 1$"):
        intercept({1: "bf16"})
    with pytest.raises(lowprec.ModeError, match="has no rule"):
        intercept({})
    with pytest.raises(lowprec.ModeError, match="bf17"):
        intercept("bf17")


#: One process that shards a model with itself, whose storages are resized to zero and back.
SHARDED = """
    import collections, gc, sys
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from lowprec.torch import intercept

    torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    sharded, parallel = (torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(5)]) for _ in range(2))
    for each in (*sharded, sharded):
        fully_shard(each, mesh=mesh, reshard_after_forward=True)
    parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})

    def check(model, steps):
        with intercept({"0": "bf16", "*": "fp32"}) as seen:
            for _ in range(steps):
                model(torch.ones(4, 8, requires_grad=True)).sum().backward()
        counts = collections.Counter()  # both gradients, in rows by shape
        for p in seen.report().taken:
            counts[p.layer, p.mode, p.backward] += p.count
        found = sorted((*key, count) for key, count in counts.items())
        modes = ["bf16", *["fp32"] * 4]
        rows = [(str(i), modes[i], backward, (1 + backward) * steps) for i in range(5) for backward in (False, True)]
        assert found == rows, found

    check(parallel, 1)
    check(sharded, 1)
    searches = []
    search = gc.get_objects
    gc.get_objects = lambda: searches.append(1) or search()
    check(sharded, 5)
    assert not searches, len(searches)
    torch.distributed.destroy_process_group()
"""


def test_layers_of_sharded_and_parallel_models(torch, tmp_path):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch was built without gloo")
    run_python(SHARDED, str(tmp_path / "meeting"))


def test_memory_of_a_deleted_layer_belongs_to_no_layer(torch, intercept):
    memory = np.ones((8, 8), np.float32)
    layer = torch.nn.Linear(8, 8, bias=False)
    layer.weight = torch.nn.Parameter(torch.from_numpy(memory))
    with torch.no_grad(), intercept("fp32") as seen:
        layer(torch.ones(2, 8))
        del layer
        gc.collect()
        again = torch.from_numpy(memory)
        again.mm(again)
    assert {p.layer: p.count for p in seen.report().taken} == {"Linear": 1, "": 1}


def test_layers_of_different_modes_that_share_a_product_are_noted(torch, intercept):
    torch._dynamo.reset()
    model = torch.compile(Block(torch), backend="aot_eager")
    with intercept({"q": "fp32", "*": "bf16"}) as seen:
        model(torch.randn(5, 16)).sum().backward()
    torch._dynamo.reset()
    assert "q|k|v have different modes" in str(seen.report())


def test_products_of_few_shapes_have_rows_of_their_own(torch, intercept):
    layer = torch.nn.Linear(4, 4)
    with torch.no_grad(), intercept("fp32") as seen:
        for n in (1, 2, 3, 4, 2, 2):
            layer(torch.ones(n, 4))
    found = {p.shapes[0]: (p.count, p.multiplications) for p in seen.report().products}
    assert found == {(1, 4): (1, 16), (2, 4): (3, 96), (3, 4): (1, 48), (4, 4): (1, 64)}
    with torch.no_grad(), seen:
        layer(torch.ones(5, 4))
    assert [(p.count, p.shapes[0]) for p in seen.report().products] == [(7, (5, 4))]


def test_rows_do_not_grow_with_shapes(torch, intercept):
    layer = torch.nn.Linear(4, 4)
    with torch.no_grad(), intercept("fp32", statistics=True) as seen:
        for n in range(1, 50):
            layer(torch.full((n, 4), 3.0))
    (row,) = seen.report().products
    assert (row.count, row.shapes, row.multiplications) == (
        49,
        ((49, 4), (4, 4)),
        16 * sum(range(50)),
    )
    assert (row.a.magnitude, row.a.underflow, row.error) == (3, 0, pytest.approx(0, abs=1e-6))
    with intercept("fp16", statistics=True) as seen:
        torch.mm(torch.tensor([[1.0, 2.0**-15, 0.0, -(2.0**-20)]]), torch.ones(4, 2))
    assert [(p.a.underflow, p.b.underflow) for p in seen.report().products] == [(0.5, 0)]
    assert "underflow" in str(seen.report())


def test_ledgers_are_bounded():
    from lowprec.core.ledger import _MOST_ROWS, Ledger, LedgerRow

    ledger = Ledger()
    for n in range(_MOST_ROWS + 100):
        ledger.add(
            LedgerRow(f"layer {n}", "mm", "float32", mode="bf16"), 8, lambda: ((2, 2), (2, 2)), None
        )
    report = ledger.report("", (), False)
    assert len(report.products) == _MOST_ROWS + 1
    assert {p.count for p in report.products if p.layer == "(further layers)"} == {100}


def test_a_layer_of_lowprec_uses_the_functions_of_its_weight(torch, lt):
    """As torchao.quantize_ replaces weights of torch.nn.Linear and its subclasses."""

    class Quantised(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.nn.functional.linear:
                return "quantised"
            return super().__torch_function__(func, types, args, kwargs or {})

    layer = lt.Linear(4, 2, math_mode="bf16")
    layer.weight = torch.nn.Parameter(
        layer.weight.detach().as_subclass(Quantised), requires_grad=False
    )
    assert layer(torch.ones(3, 4)) == "quantised"


# -- transforms, graphs, backward passes ----------------------------------------------------------


def cond(t, x):
    return t.cond(x.sum() > 0, lambda x: x @ x, lambda x: x + 1, (x,))


def while_loop(t, x):
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x @ x), (t.tensor(0), x))[1]


def flex_attention(t, x):
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(*[x.repeat(32, 4)[None, None]] * 3)


def dual(t, x):
    with t.autograd.forward_ad.dual_level():
        return t.autograd.forward_ad.unpack_dual(t.autograd.forward_ad.make_dual(x, x) @ x).tangent


def jagged(t, x):
    return t.nn.functional.linear(t.nested.nested_tensor([x, x[:2]], layout=t.jagged), x).values()


PROGRAMS = {
    "cond": (cond, {"mm": 1}),
    "while_loop": (while_loop, {"mm": 3}),
    "flex_attention": (flex_attention, {"bmm": 2}),
    "vmap": (lambda t, x: t.vmap(lambda y: y @ x)(x.expand(3, 4, 4)), {"bmm": 1}),
    "jvp": (lambda t, x: t.func.jvp(lambda y: y @ x, (x,), (x,))[1], {"mm": 3}),
    "dual numbers": (dual, {"mm": 3}),
    "grad": (lambda t, x: t.func.grad(lambda y: (y @ x).sum())(x), {"mm": 2}),
    "jit.trace": (lambda t, x: t.jit.trace(lambda y: y @ y, (x,), check_trace=False)(x), {"mm": 2}),
    "jagged": (jagged, {"mm": 1}),
    "a subclass": (lambda t, x: x.as_subclass(type("Sub", (t.Tensor,), {})) @ x, {"mm": 1}),
    "a list": (lambda t, x: t._foreach_mm([x, x], [x, x])[1], {"mm": 2}),
    "grouped": (
        lambda t, x: t._grouped_mm(
            x.repeat(1, 2), x.repeat(2, 2)[None], t.tensor([4], dtype=t.int32)
        ),
        {"mm": 1},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_products_of_a_program_are_taken(torch, intercept, name):
    call, expected = PROGRAMS[name]
    torch._dynamo.reset()
    x = torch.full((4, 4), ABOVE)
    full = call(torch, x)
    with intercept("bf16") as seen:
        found = call(torch, x)
    assert counts(seen.report().taken) == expected
    found, full = (y.as_subclass(torch.Tensor) for y in (found, full))
    assert not torch.equal(found, full)
    torch.testing.assert_close(found, full, rtol=2.0**-5, atol=0)
    torch._dynamo.reset()


def test_modes_of_functions_see_the_products_of_the_program_alone(torch, intercept):
    from torch.overrides import TorchFunctionMode

    class Recording(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **(kwargs or {}))

    called = []
    x = torch.ones(4, 4)
    with intercept("bf16") as seen, Recording():
        torch.mm(x, x)
    assert called == [torch.mm]
    assert counts(seen.report().taken) == {"mm": 1}


@pytest.mark.usefixtures("quick_inductor")
def test_compiled_products_are_taken_without_an_option(torch, intercept):
    torch._dynamo.reset()
    layer = torch.nn.Linear(64, 64)
    x = torch.full((32, 64), ABOVE)
    compiled = torch.compile(lambda x: layer(x).relu())
    full = compiled(x)
    full.sum().backward()
    with intercept("bf16") as seen:
        compiled(x).sum().backward()
        low = compiled(x)
    report = seen.report()
    assert {(p.layer, p.backward, p.count) for p in report.taken} == {
        ("Linear", False, 2),
        ("Linear", True, 1),
    }
    assert "Compiled graphs ran" in str(report)
    assert not torch.equal(low, full)
    assert torch.equal(compiled(x), full)
    torch._dynamo.reset()


@pytest.mark.parametrize("where", ["around", "inside"])
def test_the_compiler_does_not_trace_the_kernels(torch, intercept, where):
    """Frames after a graph break inside ``try`` are compiled one by one, with those that they call."""
    torch._dynamo.reset()
    layer, x = torch.nn.Linear(4, 4), torch.full((4, 4), ABOVE)

    def program(x):
        try:
            y = layer(x)
            torch._dynamo.graph_break()
            return layer(y)
        finally:
            x + 1

    def with_scope(x):
        with intercept("bf16") as seen:
            y = program(x)
        reports.append(seen.report())
        return y

    reports = []
    with torch.no_grad():
        if where == "inside":
            found = torch.compile(with_scope, backend="eager")(x)
        else:
            with intercept("bf16") as seen:
                found = torch.compile(program, backend="eager")(x)
            reports.append(seen.report())
        expected = with_scope(x)
    assert torch.equal(found, expected)
    assert [[(p.layer, p.count) for p in report.taken] for report in reports] == [
        [("Linear", 2)]
    ] * 2
    torch._dynamo.reset()


@pytest.mark.usefixtures("quick_inductor")
def test_products_of_a_frozen_graph_are_reported(torch, intercept):
    torch._dynamo.reset()
    layer, x = torch.nn.Linear(64, 64).eval(), torch.ones(32, 64)
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        compiled = torch.compile(lambda x: layer(x))
        compiled(x)
        with intercept("bf16") as seen:
            compiled(x)
    products = seen.report().products
    assert len(products) == 1
    assert products[0].mode or products[0].reason.startswith("a fused kernel")
    torch._dynamo.reset()


def of_pytorch_2_11(torch):
    """Return the entry of backward passes in versions that do not pass the context to other threads."""
    engine = torch.autograd.Variable._execution_engine
    return lambda outputs, *args, **kwargs: engine.run_backward(outputs, *args, **kwargs)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_backward_pass_on_other_threads_has_the_mode(torch, intercept, monkeypatch, is_old):
    """PyTorch runs a backward pass that is nested deeper than 60 on a thread of its own."""
    for module in (torch.autograd, torch.autograd.graph) if is_old else ():
        monkeypatch.setattr(module, "_engine_run_backward", of_pytorch_2_11(torch))
    x = torch.full((4, 4), ABOVE)
    depth = 61

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, level):
            ctx.level = level
            return y.clone()

        @staticmethod
        def backward(ctx, gradient):
            threads.add(threading.get_ident())
            found.append(float((x @ x)[0, 0]))
            if ctx.level:
                with torch.enable_grad():
                    Nested.apply(x.clone().requires_grad_(), ctx.level - 1).sum().backward()
            return gradient, None

    found = []
    threads = set()
    with intercept("bf16") as seen:
        Nested.apply(x.clone().requires_grad_(), depth).sum().backward()
    assert len(threads) > 1
    assert found == [4.0] * (depth + 1)
    assert counts(p for p in seen.report().taken if p.backward) == {"mm": depth + 1}
    found.clear()
    with intercept("bf16"), lowprec.fp32_guard(frameworks=False):
        Nested.apply(x.clone().requires_grad_(), depth).sum().backward()
    assert min(found) > 4


# -- processes ------------------------------------------------------------------------------------


@posix
@pytest.mark.usefixtures("torch")
def test_forked_workers_of_a_run_are_in_the_report(tmp_path):
    run_python(
        f"""
        import multiprocessing, os, sys
        import torch
        from lowprec.torch import intercept

        def work():
            torch.ones(4, 4) @ torch.ones(4, 4)

        torch.set_num_threads(1)
        seen = intercept("bf16")
        seen.apply_to_process({str(tmp_path / "sums")!r}, True, str)
        work()
        worker = multiprocessing.get_context("fork").Process(target=work)
        worker.start()
        worker.join()
        if os.fork() == 0:
            work()
            sys.exit()
        os.wait()
        (row,) = seen.report().products
        assert row.count == 3, row
        assert "in 3 processes" in str(seen.report())
        """
    )


@posix
@pytest.mark.usefixtures("torch")
def test_a_fork_during_the_first_product_of_another_thread():
    """A child with the import lock of a module that another thread imported would wait for it forever."""
    run_python(
        """
        import os, signal, sys, threading, time, warnings
        import torch
        from lowprec.torch import intercept

        warnings.simplefilter("ignore")  # forks with threads
        started = threading.Event()

        def pause(frame, event, arg):
            code = frame.f_code
            if code.co_name == "<module>" and code.co_filename.endswith(("numpy/ma/__init__.py", "torch_library.py")):
                started.set()
                time.sleep(0.5)

        def multiply():
            with intercept("bf16"):
                torch.ones(4, 4) @ torch.ones(4, 4)

        torch.set_num_threads(1)
        thread = threading.Thread(target=lambda: sys.setprofile(pause) or multiply())
        thread.start()
        assert started.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            multiply()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        thread.join()
        """
    )


# -- PyTorch's samples ----------------------------------------------------------------------------

#: The samples of PyTorch's own tests change settings of the process when they are imported.
SAMPLES = """
    import sys, types, unittest, warnings
    from collections import Counter
    from itertools import islice

    stub = types.ModuleType("expecttest")  # needed by PyTorch's own tests
    stub.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stub)
    warnings.simplefilter("ignore")

    import torch
    from torch.testing._internal.common_methods_invocations import op_db
    from lowprec.torch import intercept
    from lowprec.torch.aten import PRODUCTS, reason_of

    QUICK = ["matmul", "addmm", "addbmm", "addmv", "baddbmm", "einsum", "cdist", "linalg.pinv", "vdot", "sparse.mm"]
    QUICK += ["nn.functional.bilinear", "nn.functional.conv2d", "nn.functional.scaled_dot_product_attention"]
    is_quick = sys.argv[1] == "quick"
    seen_any, compared = Counter(), 0
    for op in op_db:
        if torch.float32 not in op.dtypes or (op.name in QUICK) is not is_quick:
            continue
        for sample in islice(op.sample_inputs("cpu", torch.float32), 3):
            torch.manual_seed(0)
            try:
                true = op(sample.input, *sample.args, **sample.kwargs)
            except (RuntimeError, AssertionError):  # a sample of an error, or for a GPU
                continue
            activities = [torch.profiler.ProfilerActivity.CPU]
            with intercept("fp32") as seen, torch.profiler.profile(activities=activities) as profile:
                torch.manual_seed(0)
                found = op(sample.input, *sample.args, **sample.kwargs)
            names = [e.name for e in profile.events() if e.name.startswith("aten::")]
            ran = Counter(name.removeprefix("aten::").removesuffix("_") for name in names)
            reported = Counter()
            for p in seen.report().products:
                reported[p.operator] += p.count
            for name in PRODUCTS:
                assert ran[name] == reported[name], (op.name, name, ran[name], reported[name])
            if any(reason_of(name) for name in ran) and getattr(sample.input, "numel", int)():
                assert reported, (op.name, ran)
            seen_any.update(reported)
            compared += 1
            if isinstance(found, torch.Tensor) and found.is_floating_point() and "empty" not in op.name:
                torch.testing.assert_close(found, true, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert not is_quick or set(PRODUCTS) - {"_addmm_activation"} <= set(seen_any), seen_any
    assert compared > (25 if is_quick else 1000), compared
"""


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("which", ["quick", pytest.param("others", marks=pytest.mark.sweep)])
def test_the_report_agrees_with_the_profiler(which):
    run_python(SAMPLES, which)
