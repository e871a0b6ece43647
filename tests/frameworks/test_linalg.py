"""``lowprec.linalg`` over every array library: the library's functions, the guard around them, and what is refused."""

import importlib
import pickle
import sys
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import lowprec
from frameworks.backends import Backend, DLPackOnly
from lowprec import linalg
from support import oracles
from support.programs import run_python

#: By function: the further arguments of a call with one or two matrices.
FUNCTIONS = {
    "cholesky": (1, ()), "det": (1, ()), "eigh": (1, ()), "inv": (1, ()), "lstsq": (2, ()), "matrix_power": (1, (3,)),
    "matrix_rank": (1, ()), "norm": (1, ()), "pinv": (1, ()), "qr": (1, ("complete",)), "slogdet": (1, ()),
    "solve": (2, ()), "svd": (1, ()), "tensorinv": (1, (1,)),
}  # fmt: skip
#: Modules of each library.
MODULES = {
    "numpy": "numpy.linalg",
    "torch": "torch.linalg",
    "jax": "jax.numpy.linalg",
    "dlpack_only": "numpy.linalg",
}


def make(rng, *shape, dtype="float32"):
    return oracles.random_matrix(rng, shape, dtype)


wide = oracles.widen


def accept(xp, result, shape, dtype):
    """Check library, shape and dtype of a result; return its elements in float64 or complex128."""
    assert isinstance(result, xp.result_type)
    elements = xp.to_numpy(result)
    assert (elements.shape, elements.dtype.name) == (shape, dtype)
    return wide(elements)


# -- solve ----------------------------------------------------------------------------------------


def test_only_a_vector_is_a_vector(xp, rng):
    # For these shapes torch.linalg.solve takes three vectors, the Array API one matrix.
    a, b = make(rng, 3, 3, 3), make(rng, 3, 3)
    x = accept(xp, linalg.solve(xp.asarray(a), xp.asarray(b)), (3, 3, 3), "float32")
    np.testing.assert_allclose(wide(a) @ x, np.broadcast_to(wide(b), a.shape), atol=1e-4)


def test_mixed_types_are_solved_in_the_wider(xp):
    a, b = operands("solve")
    accept(xp, linalg.solve(xp.asarray(a.astype("float64")), xp.asarray(b)), b.shape, "float64")
    accept(xp, linalg.solve(xp.asarray(a), xp.asarray(b.astype("complex64"))), b.shape, "complex64")


# -- functions of the library ---------------------------------------------------------------------


def operands(function, dtype="float32"):
    """Well conditioned, positive definite matrices."""
    return ((np.eye(4) * 3 + 0.5).astype(dtype),) * FUNCTIONS[function][0]


def call(function, xp, arrays):
    return getattr(linalg, function)(*map(xp.asarray, arrays), *FUNCTIONS[function][1])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_library_is_called_inside_the_guard_and_its_result_returned(function, xp, monkeypatch):
    module, seen, results = importlib.import_module(MODULES[xp.name]), [], []
    original = getattr(module, function)

    def spy(*args, **keywords):
        seen.append(str(lowprec.get_math_mode()))
        results.append(original(*args, **keywords))
        return results[-1]

    monkeypatch.setattr(module, function, spy)
    with lowprec.math_mode("bf16"):
        result = call(function, xp, operands(function))
        assert str(lowprec.get_math_mode()) == "bf16"
    assert seen == ["fp32"]
    if xp.name != "dlpack_only":
        assert result is results[0]
        return
    assert getattr(result, "_fields", None) == getattr(results[0], "_fields", None)
    pairs = (
        zip(result, results[0], strict=True)
        if isinstance(result, tuple)
        else [(result, results[0])]
    )
    for got, want in pairs:
        assert isinstance(got, lowprec.DLPackArray)
        np.testing.assert_array_equal(np.asarray(got), want)


def test_arguments_are_passed_as_they_are(xp):
    a = np.diag([4.0, 3.0, 1.0]).astype("float32")
    x = xp.asarray(a)
    # JAX's is absolute
    assert int(xp.to_numpy(linalg.matrix_rank(x, rtol=0.5))) == (3 if xp.name == "jax" else 2)
    np.testing.assert_array_equal(xp.to_numpy(linalg.multi_dot([x, x, x])), a @ a @ a)
    np.testing.assert_array_equal(xp.to_numpy(linalg.norm(x, ord=2)), 4)
    name = {"torch": "A"}.get(xp.name, "a")
    np.testing.assert_allclose(xp.to_numpy(linalg.inv(**{name: x})), np.linalg.inv(a), rtol=1e-6)


@pytest.mark.parametrize("function", ["expm", "cdist", "sqrtm", "lu_factor"])
def test_functions_of_other_modules(function, xp):
    if xp.name in ("numpy", "dlpack_only"):
        pytest.importorskip("scipy", reason="scipy is not installed")
    a = operands("inv")[0]
    x = xp.asarray(a)
    if (function, xp.name) in {("cdist", "jax"), ("sqrtm", "torch")}:
        with pytest.raises(
            lowprec.UnsupportedError,
            match=rf"^{xp.name} .* has no function {function} \({xp.name}\.",
        ):
            getattr(linalg, function)(x, x)
        return
    found = getattr(linalg, function)(*((x, x) if function == "cdist" else (x,)))
    values, vectors = np.linalg.eigh(wide(a))
    powers = {"expm": np.exp(values), "sqrtm": np.sqrt(values)}
    if function in powers:
        np.testing.assert_allclose(
            xp.to_numpy(found), (vectors * powers[function]) @ vectors.T, rtol=1e-4
        )
    elif function == "cdist":
        np.testing.assert_allclose(xp.to_numpy(found), 3 * np.sqrt(2) * (1 - np.eye(4)), rtol=1e-5)
    else:
        np.testing.assert_allclose(np.triu(xp.to_numpy(found[0]))[0], a[0])


def test_pivots_are_integers(torch):
    a = torch.eye(3) * 2
    x = linalg.lu_solve(*linalg.lu_factor(a), torch.ones(3, 1))
    np.testing.assert_array_equal(x.numpy(), np.full((3, 1), 0.5))


def test_a_function_is_one_object_that_can_be_pickled():
    assert linalg.inv is linalg.inv
    assert pickle.loads(pickle.dumps(linalg.inv)) is linalg.inv
    assert (linalg.inv.__name__, linalg.inv.__module__) == ("inv", "lowprec.linalg")


def test_names_are_those_of_the_loaded_libraries(torch):
    assert {"SolveReport", "solve", "expm", "cdist", "inv", "multi_dot", "ldl_factor"} <= set(
        dir(linalg)
    )
    assert not {"LinAlgError", "test", "annotations", "functions"} & set(dir(linalg))


@pytest.mark.parametrize(
    ("name", "close"), [("invv", "inv"), ("slove", "solve"), ("LinAlgError", "")]
)
def test_a_misspelt_name_is_an_error(name, close):
    hint = "; names close to it: .*" * bool(close) + close
    text = rf"no loaded library has a function {name!r} of linear algebra{hint}"
    with pytest.raises(AttributeError, match=text):
        getattr(linalg, name)
    with pytest.raises(AttributeError, match="has no attribute '__path2__'"):
        getattr(linalg, "__path2__")  # noqa: B009


@pytest.mark.parametrize("xp", [Backend.NUMPY, Backend.DLPACK_ONLY], indirect=True)
def test_views_are_read_as_they_are(xp, rng):
    base = make(rng, 8, 8)
    for view in (base.T, base[::-1], base[::2, ::2], base[:, ::-1]):
        found = xp.to_numpy(linalg.det(xp.asarray(view)))
        np.testing.assert_array_equal(found, np.linalg.det(view))


def test_a_result_for_dlpack_is_an_operand_again():
    a = DLPackOnly(np.eye(3, dtype=np.float32) * 2)
    x = linalg.solve(a, linalg.inv(a))
    assert isinstance(x, lowprec.DLPackArray)
    np.testing.assert_array_equal(np.asarray(x), np.eye(3, dtype=np.float32) / 4)
    assert linalg.matrix_rank(a).dtype == "int32"


# -- the guard inside ----------------------------------------------------------------------------


def test_jax_compiles_at_the_highest_precision(jax):
    with jax.default_matmul_precision("bfloat16"):
        program = jax.jit(linalg.matrix_power, static_argnums=1).lower(
            jax.numpy.eye(4, dtype="float32"), 3
        )
    assert "precision = [HIGHEST, HIGHEST]" in program.as_text()
    assert "precision = [DEFAULT, DEFAULT]" not in program.as_text()


def test_jax_transforms_take_it(jax, rng):
    a, b = make(rng, 3, 5, 2), make(rng, 3, 5)
    found, *_ = jax.jit(jax.vmap(linalg.lstsq))(jax.numpy.array(a), jax.numpy.array(b))
    want = np.stack([np.linalg.lstsq(wide(x), wide(y))[0] for x, y in zip(a, b, strict=True)])
    np.testing.assert_allclose(found, want, rtol=1e-4)
    gradient = jax.grad(linalg.det)(2 * jax.numpy.eye(3))
    np.testing.assert_allclose(gradient, 4 * np.eye(3), rtol=1e-6)


def test_scipy_is_imported_for_its_functions_only():
    code = """
        import sys
        import numpy as np
        import lowprec

        lowprec.linalg.solve(np.eye(2), np.ones(2)), lowprec.linalg.inv(np.eye(2)), dir(lowprec.linalg)
        print("scipy" in sys.modules)
    """
    assert run_python(code) == "False"


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("function", ["solve", "lstsq", "inv", "norm"])
@pytest.mark.sampled(3)
def test_other_types_are_refused(function, dtype, xp):
    narrow = np.dtype(getattr(ml_dtypes, dtype, dtype))
    name = "a" if function == "solve" else "an array"
    with pytest.raises(
        lowprec.DTypeError, match=rf"^{function} takes float32, .*, and {name} is {dtype}; convert"
    ):
        call(function, xp, tuple(x.astype(narrow) for x in operands(function)))
    if FUNCTIONS[function][0] == 2 and dtype != "int8":
        a, b = operands(function)
        with pytest.raises(
            lowprec.DTypeError,
            match=f"and {'b' if function == 'solve' else name} is {dtype}; convert",
        ):
            call(function, xp, (a, b.astype(narrow)))


@pytest.mark.parametrize("function", ["solve", "lstsq"])
def test_two_libraries_are_refused(function, xp, other_xp):
    if xp.name == other_xp.name:
        return
    a, b = operands(function)
    names = [n.removesuffix("_only") for n in (xp.name, other_xp.name)]
    with pytest.raises(
        lowprec.ArrayError, match=f"^{function} takes .* one library, got {names[0]} and {names[1]}"
    ):
        getattr(linalg, function)(xp.asarray(a), other_xp.asarray(b))


def test_objects_that_are_no_arrays_are_refused():
    for wrong, text in ([[1.0]], "list; wrap it with numpy"), (3, "int"), (None, "None"):
        with pytest.raises(lowprec.ArrayError, match=f"got {text}"):
            linalg.inv(wrong)
    with pytest.raises(lowprec.ArrayError, match="got int"):
        linalg.lstsq(3, np.eye(2))
    with pytest.raises(lowprec.ArrayError, match="MaskedArray is not accepted"):
        linalg.inv(np.ma.masked_array(np.eye(2)))


@pytest.mark.parametrize("function", ["expm", "cdist"])
def test_without_scipy(function, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)
    text = rf"^numpy \d.* has no function {function} \(.*scipy\..*\); scipy is not installed: .*pip install scipy"
    with pytest.raises(lowprec.UnsupportedError, match=text):
        getattr(linalg, function)(np.eye(2), *([np.eye(2)] * (function == "cdist")))


# -- CuPy, and CUDA memory, without a GPU ---------------------------------------------------------


class OnDevice(np.ndarray):
    """A substitute for a CuPy array."""

    def __dlpack_device__(self):
        return (2, 0)


class OnlyOnDevice:
    """CUDA memory of a library that is known only by DLPack."""

    def __init__(self, memory):
        self.memory = memory

    def __dlpack__(self, **keywords):
        raise AssertionError("memory of a GPU is exported to a library of the GPU only")

    def __dlpack_device__(self):
        return (2, 0)


def to_device(x):
    return x.view(OnDevice) if isinstance(x, np.ndarray) else np.asarray(x).view(OnDevice)


@pytest.fixture
def cupy(monkeypatch):
    """A substitute for CuPy, whose functions NumPy computes."""
    module, functions = ModuleType("cupy"), ModuleType("cupy.linalg")

    def function_of(name):
        def compute(*arrays):
            assert all(isinstance(x, OnDevice) for x in arrays), "an array of CuPy"
            result = getattr(np.linalg, name)(*map(np.asarray, arrays))
            return tuple(map(to_device, result)) if isinstance(result, tuple) else to_device(result)

        return compute

    for name in ("inv", "slogdet", "solve"):
        setattr(functions, name, function_of(name))
    types = {"f": 0}
    core = SimpleNamespace(get_compute_type=types.get, set_compute_type=types.__setitem__)
    found = {"ndarray": OnDevice, "linalg": functions, "__version__": "14.0.0", "_core": core}
    found["from_dlpack"] = lambda array: to_device(array.memory)
    vars(module).update(found)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy.linalg", functions)
    return module


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("function", ["inv", "slogdet", "solve"])
def test_cupys_functions_are_called(function):
    arrays = operands(function)
    for wrap in (to_device, OnlyOnDevice):
        result, want = (
            getattr(linalg, function)(*map(wrap, arrays)),
            getattr(linalg, function)(*arrays),
        )
        pairs = zip(result, want, strict=True) if isinstance(want, tuple) else [(result, want)]
        for got, expected in pairs:
            assert isinstance(got, OnDevice)
            np.testing.assert_array_equal(got, expected)


@pytest.mark.usefixtures("cupy")
def test_functions_missing_from_cupy():
    with pytest.raises(
        lowprec.UnsupportedError, match=r"cupy 14.* expm \(cupy\.linalg\.expm or .*; cupyx is not"
    ):
        linalg.expm(to_device(np.eye(3)))


def test_cuda_memory_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(lowprec.UnsupportedError, match=r"DLPack arrays on cuda:0: .*import cupy"):
        linalg.inv(OnlyOnDevice(np.eye(2)))
