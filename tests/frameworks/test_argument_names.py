"""Which argument an error is about: its name is in the message, by the public function that was called."""

import gc
import itertools
import re
import weakref

import numpy as np
import pytest

import lowprec
from lowprec import linalg

F32 = np.ones((3, 3), np.float32)


def product_of_all(function):
    """Return a function with all arrays of ``matmul``, and their names."""
    return lambda a, b, out, c, bias: function(a, b, out=out, c=c, beta=1.0, bias=bias), (
        "a",
        "b",
        "out",
        "c",
        "bias",
    )


#: Public functions, by their arrays in order: called with these, they multiply.
FUNCTIONS = {
    "matmul": product_of_all(lowprec.matmul),
    "plan": product_of_all(lowprec.plan),
    "autotune": product_of_all(lowprec.autotune),
    "linear": (lowprec.linear, ("x", "weight", "bias")),
    "einsum": (
        lambda *x: lowprec.einsum("ij,jk,kl->il", *x),
        ("operands[0]", "operands[1]", "operands[2]"),
    ),
    "tensordot": (lambda a, b: lowprec.tensordot(a, b, axes=1), ("a", "b")),
    "vecdot": (lowprec.vecdot, ("a", "b")),
    "solve": (linalg.solve, ("a", "b")),
}

WRONG = {
    "dtype": (F32.astype(np.int64), "int64"),
    "list": ([[1.0]], "expected an array"),
    "masked": (np.ma.ones((3, 3)), "MaskedArray is not accepted"),
}

CASES = [
    (function, name, wrong)
    for function, (_, names) in FUNCTIONS.items()
    for name, wrong in itertools.product(names, WRONG)
]


def arrays_of(names, name, wrong):
    """Arrays of the right kind, but for one."""
    given = [F32[0] if n == "bias" else F32.copy() for n in names]
    given[names.index(name)] = wrong
    return given


@pytest.mark.parametrize(("function", "name", "wrong"), CASES)
def test_the_argument_is_named(function, name, wrong):
    multiply, names = FUNCTIONS[function]
    value, message = WRONG[wrong]
    with pytest.raises(lowprec.LowprecError, match=message) as caught:
        multiply(*arrays_of(names, name, value))
    text = str(caught.value)
    assert text.startswith(f"{name}: ") or f"and {name} is " in text
    assert caught.value.argument in (name, None)


@pytest.mark.parametrize("function", ["matmul", "plan", "linear", "tensordot"])
def test_a_type_of_the_result_is_named(function):
    with pytest.raises(lowprec.DTypeError, match=r"^out_dtype: dtype 'f4' is not supported"):
        getattr(lowprec, function)(F32, F32, out_dtype="f4")


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (((4, -4), "float32"), r"^b: shape must hold non-negative integers"),
        (((4, 4), "half"), r"^b: dtype 'half' is not supported"),
        ((4, 4), r"^b: \(4, 4\) is a shape without an element type"),
        (lowprec.ShapeDtype, r"^b: expected an array .*, got type"),
    ],
)
def test_a_description_is_named(described, message):
    with pytest.raises(lowprec.LowprecError, match=message):
        lowprec.plan(F32, described)


def test_only_single_arguments_are_named():
    with pytest.raises(lowprec.DTypeError, match=r"^operands of dtypes float32 and int8") as caught:
        lowprec.matmul(F32, F32.astype(np.int8))
    assert caught.value.argument is None


def test_a_tensor_with_grad_is_named_where_no_gradient_can_be_had(torch):
    x, bias = torch.ones(3, 3), torch.ones(3, requires_grad=True)
    with pytest.raises(lowprec.UnsupportedError, match=r"here: bias: the torch tensor requires"):
        lowprec.matmul(x, x, bias=bias, k_chunk=2)
    with pytest.raises(lowprec.DTypeError, match=r"^b: dtype 'int64'"):
        lowprec.matmul(x.clone().requires_grad_(), x.to(torch.int64))


@pytest.mark.parametrize("function", ["matmul", "plan", "linear", "einsum", "solve"])
def test_an_error_keeps_nothing_alive(function):
    """Not even until garbage is collected: arrays may be large."""
    multiply, names = FUNCTIONS[function]
    given = arrays_of(names, names[1], F32.astype(np.int64))
    alive = weakref.ref(given[0])
    gc.disable()
    try:
        with pytest.raises(lowprec.DTypeError, match="int64"):
            multiply(*given)
        del given
        assert alive() is None
    finally:
        gc.enable()


def _sparse(library):
    if library == "scipy":
        sparse = pytest.importorskip("scipy.sparse", reason="scipy is not installed")
        return sparse.csr_array(np.eye(3, dtype=np.float32)), "toarray"
    if library == "jax":
        sparse = pytest.importorskip("jax.experimental.sparse", reason="jax is not installed")
        return sparse.BCOO.fromdense(np.eye(3, dtype=np.float32)), "todense"
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return torch.eye(3).to_sparse(), "to_dense"


@pytest.mark.parametrize("library", ["scipy", "jax", "torch"])
def test_sparse_operands_have_advice_that_works(library):
    x, method = _sparse(library)
    dense = getattr(x, method)()
    products = {
        "a": lowprec.matmul, "weight": lowprec.linear, "operands[0]": lambda x, y: lowprec.einsum("ij,jk", x, y)
    }  # fmt: skip
    for name, product in products.items():
        left, right = (dense, x) if name == "weight" else (x, dense)
        with pytest.raises(lowprec.ArrayError, match=rf"^{re.escape(name)}: .*pass .*{method}\(\)"):
            product(left, right)
        assert np.array_equal(np.asarray(product(dense, dense)), np.eye(3, dtype=np.float32))
    with pytest.raises(lowprec.ArrayError, match=rf"^a: .*{method}"):
        lowprec.plan(x, dense)


@pytest.mark.parametrize(
    "scalar", [np.complex64(1), np.float32(1), np.int8(1)], ids=lambda x: x.dtype.name
)
@pytest.mark.parametrize("function", [lowprec.matmul, lowprec.plan])
def test_a_numpy_scalar_is_no_array(function, scalar):
    with pytest.raises(
        lowprec.ArrayError, match=r"^c: expected an array .*wrap it with numpy.asarray"
    ):
        function(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), c=scalar, beta=1.0)
