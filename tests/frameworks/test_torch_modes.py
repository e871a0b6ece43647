"""PyTorch's modes, tracers and transforms: they see torch's operations, and a product of lowprec's is none of them."""

import numpy as np
import pytest

import lowprec
from lowprec.errors import ArrayError, LowprecError

# torch's own: jit.trace is deprecated, and the first jvp of a process compiles its rules with jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


def flop_counter(torch):
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False)


# As each is entered, the function given to it runs once; what it returns is thrown away.
def in_mode(make):
    def run(torch, call):
        with make(torch):
            call()

    return run


def jit_trace(torch, call):
    def traced(x):
        call()
        return x + 1

    torch.jit.trace(traced, (torch.ones(2),), check_trace=False)


def fx_trace(**keywords):
    def run(torch, call):
        from torch.fx.experimental.proxy_tensor import make_fx

        make_fx(lambda x: (call(), x + 1)[1], **keywords)(torch.ones(2))

    return run


def transform(name):
    def run(torch, call):
        x = torch.ones(2)
        made = getattr(torch.func, name)
        inside = lambda x: (call(), x.sum())[1]  # noqa: E731
        made(inside, (x,), (x,)) if name == "jvp" else made(inside)(x)

    return run


INTERCEPTORS = {
    "fake": (in_mode(lambda torch: torch._subclasses.FakeTensorMode()), "FakeTensorMode is active"),
    "flop_counter": (in_mode(flop_counter), "FlopCounterMode is active"),
    "jit_trace": (jit_trace, "torch.jit.trace is recording"),
    "make_fx": (fx_trace(), "ProxyTorchDispatchMode is active"),
    "make_fx_symbolic": (fx_trace(tracing_mode="symbolic"), "ProxyTorchDispatchMode is active"),
    "make_fx_pre_dispatch": (fx_trace(pre_dispatch=True), "ProxyTorchDispatchMode is active"),
    "grad": (transform("grad"), "inside a torch.func transform"),
    "vmap": (transform("vmap"), "inside a torch.func transform"),
    "jvp": (transform("jvp"), "inside a torch.func transform"),
    "functionalize": (transform("functionalize"), "inside a torch.func transform"),
}

# The arguments that are tensors of torch.
PLACES = {
    "b": lambda t, x: lowprec.matmul(x, t),
    "out": lambda t, x: lowprec.matmul(x, x, out=t),
    "c": lambda t, x: lowprec.matmul(x, x, c=t, beta=1.0),
    "bias": lambda t, x: lowprec.matmul(x, x[:, :1], bias=t),
    "autotune": lambda t, x: lowprec.autotune(t, t),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("interceptor", INTERCEPTORS)
def test_real_tensors_are_refused_where_torch_is_intercepted(torch, interceptor, place):
    run, message = INTERCEPTORS[interceptor]
    host = np.ones((1, 1) if place == "bias" else (3, 3), np.float32)
    real = torch.full((1,) if place == "bias" else (3, 3), 7.0)
    expected = real.clone()
    version = real._version
    if interceptor != "jit_trace":
        # lowprec.matmul goes on by torch's own ways, for which all operands have to be torch's.
        if place in ("b", "c", "bias"):
            message = "a is a numpy.ndarray together with tensors"
        if place == "out":
            message = f"out= cannot be used here: .*{message}"
    with pytest.raises(LowprecError, match=message):
        run(torch, lambda: PLACES[place](real, host))
    assert real._version == version
    assert torch.equal(real, expected)
    # Nothing is left behind: the same call is served afterwards.
    PLACES[place](real, host)


def test_no_tangent_is_lost(torch):
    forward_ad = torch.autograd.forward_ad
    x, tangent = torch.eye(3), torch.full((3, 3), 2.0)
    host = np.eye(3, dtype=np.float32)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone(), tangent)
        for left, right in ((dual, x), (x, dual)):
            found = forward_ad.unpack_dual(lowprec.matmul(left, right))
            assert torch.equal(found.primal, x)
            assert torch.equal(found.tangent, tangent)
        with pytest.raises(ArrayError, match=r"a is a numpy\.ndarray together with tensors"):
            lowprec.matmul(host, dual)
        with pytest.raises(lowprec.UnsupportedError, match=r"out= cannot be used here: .*tangent"):
            lowprec.matmul(x, x, out=dual)
        with pytest.raises(ArrayError, match=r"has a tangent .*unpack_dual\(tensor\).primal"):
            lowprec.prepare(dual)
        # A level alone loses nothing, nor does an unused tangent.
        assert torch.equal(lowprec.matmul(x, tangent), tangent)
        assert torch.equal(lowprec.matmul(forward_ad.unpack_dual(dual).primal, tangent), tangent)
        with torch.inference_mode():
            assert torch.equal(lowprec.matmul(dual, tangent), tangent)


def test_a_product_inside_a_custom_function_is_served(torch):
    """torch leaves a transform before it calls a rule of ``autograd.Function``: that is the way to have one."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(a, b):
            return lowprec.matmul(a, b)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            a, b = ctx.saved_tensors
            return g @ b.T, a.T @ g  # inside the transform again

    a, b = torch.full((2, 2), 3.0), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    rows = [[3.0, 7.0], [3.0, 7.0]]  # the sums of b's rows
    assert torch.func.grad(lambda a: Product.apply(a, b).sum())(a).tolist() == rows
    leaf = a.clone().requires_grad_()
    Product.apply(leaf, b).sum().backward()
    assert leaf.grad.tolist() == rows
