"""Random calls, as plain arrays and in the ways in which a library multiplies itself: results and errors are equal.

Tensors that require grad, under ``vmap`` and compiled; arrays that JAX traces; Dask arrays; and ``plan``.
"""

import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowprec
from frameworks.backends import Backend
from frameworks.conftest import load_or_skip
from lowprec import recipes
from lowprec.arrays.prepared_view import PreparedView
from lowprec.backends.cpu import backend as cpu
from lowprec.core.call import PRODUCTS, bind

_TYPES = ("float32",) * 8 + (
    *(
        "float64",
        "float16",
        "float16",
        "bfloat16",
        "bfloat16",
        "complex64",
        "complex128",
        "int8",
        "int8",
        "int32",
    ),
    *("bool", "float8_e4m3fn"),
)
#: Values of each keyword; the first is its default.
_VALUES = {
    "alpha": (1.0, 0.0, 0, 2, 0.5, -1.5, np.float32(3), 2j, 1e39, "2", None),
    "beta": (0.0, 1.0, 0, 2, -0.5, 1j, 1e39, "1"),
    "activation": (None, "relu", "gelu", "tanh", ["relu"]),
    "out_dtype": (None, "float32", "bfloat16", "float16", "float64", "int32", "int16", "half"),
    "math_mode": (
        *(
            None,
            "fp32",
            "tf32",
            "bf16",
            "BF16X3",
            "fp64",
            "mxfp8",
            "int8",
            "fp8_rows",
            "mxfp8(scale_rule=rceil)",
        ),
        *(lowprec.Recipe.fp8_training(), "bf17", 3, "mxfp8(scale_rule=up)", "mxfp9/mxfp8"),
    ),
    "rtol": (None, 1e-2, 1e-6, 1e-30, "close", -1.0),
    "bound": (None, "probable", "guaranteed", "likely"),
}
_OF_DASK = ("out_dtype", "math_mode", "rtol", "bound")

#: A call: shapes and element types of a, b, c and bias (None for no array), and keywords.
Call = tuple[dict[str, tuple[tuple[int, ...], str] | None], dict[str, Any]]


def random_call(rng):
    """Return a call, which most often raises for one reason or for none."""
    wrong = rng.random() < 0.5  # other shapes and types
    kind = str(rng.choice(_TYPES))

    def dtype():
        return str(rng.choice(_TYPES)) if wrong and rng.random() < 0.3 else kind

    def size():
        return int(rng.choice([0, 1, 2, 3, 3, 5]))

    def off(shape):
        if not wrong or rng.random() < 0.7:
            return shape
        changes = [shape[1:], (2, *shape), (*shape[:-1], 4), (*[1] * len(shape[:1]), *shape[1:])]
        return changes[rng.integers(len(changes))]

    m, n, k, batch = size(), size(), size(), tuple(size() for _ in range(rng.integers(0, 3)))
    a, b = ((*batch[rng.integers(0, len(batch) + 1) :], *core) for core in ((m, k), (k, n)))
    a, b = (x if rng.random() < 0.85 else (k,) for x in (a, b))
    out = (*np.broadcast_shapes(a[:-2], b[:-2]), *a[-2:-1], *b[-1:][: len(b) - 1])
    has_c, has_bias = rng.random() < 0.35, rng.random() < 0.3
    arrays = {
        "a": (off(a), dtype()),
        "b": (off(b), dtype()),
        "c": (off(out[rng.integers(0, len(out) + 1) :]), dtype()) if has_c else None,
        "bias": (off(b[-1:] if len(b) > 1 else (1,)), dtype()) if has_bias else None,
    }
    keywords = {}
    for name, values in _VALUES.items():
        if rng.random() < (0.7 if name == "beta" and has_c else 0.12):
            legal = {
                "alpha": 7,
                "beta": 5,
                "activation": 3,
                "out_dtype": 4,
                "math_mode": 11,
                "rtol": 3,
                "bound": 3,
            }
            keywords[name] = values[rng.integers(0, len(values) if wrong else legal[name])]
    return arrays, keywords


def arrays_of(call, seed):
    """Return NumPy arrays of small integers, some transposed."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, spec in call[0].items():
        if spec is not None:
            shape, label = spec
            dtype = np.dtype(getattr(ml_dtypes, label, label))
            values = rng.integers(-2, 3, shape).astype(dtype)
            made[name] = (
                values.swapaxes(-1, -2).copy().swapaxes(-1, -2)
                if len(shape) > 1 and seed % 3 == 0
                else values
            )
    return made


def outcome(function):
    """Return class and message of an error of a call, or its result as ("", result)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "", function()
    except Exception as error:  # noqa: BLE001 - any other class is a difference
        # JAX adds a note to the messages of errors in traces.
        return type(error).__name__, str(error).partition("\n-----")[0]


def difference(plain, other, look=np.asarray):
    """Return the kind of the difference of two outcomes; "" if there is none."""
    if bool(plain[0]) is not bool(other[0]):
        return "contradiction"
    if plain[0]:
        return "" if plain == other else ("message" if plain[0] == other[0] else "class")
    x, y = look(plain[1]), look(other[1])
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return "type of the result"
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    # Small integers: only gelu, narrow results and the factors round.
    return (
        ""
        if np.allclose(x.astype(wide), y.astype(wide), rtol=0.05, atol=0.05, equal_nan=True)
        else "values"
    )


def compare(count, seed, ways):
    """Compare the outcomes that ``ways`` yields: the plain one first, then others with their names."""
    rng = np.random.default_rng(seed)
    seen = Counter()
    examples = {}
    raised = 0
    for i in range(count):
        call = random_call(rng)
        look, plain, others = ways(call, arrays_of(call, i), i)
        raised += bool(plain[0])
        for name, other in others:
            kind = difference(plain, other, look)
            if kind:
                seen[f"{name}: {kind}"] += 1
                examples.setdefault(f"{name}: {kind}", (call, plain, other))
    assert not seen, f"{dict(seen)} of {count}\n" + "\n".join(
        f"{k}: {v}" for k, v in examples.items()
    )
    assert 0.2 * count < raised < 0.8 * count, "both kinds of calls are compared"


#: In CI, and in all.
COUNTS = [pytest.param(2000, id="some"), pytest.param(20000, id="all", marks=pytest.mark.sweep)]


def _on_torch(call, arrays, i):
    xp, keywords = load_or_skip(Backend.TORCH), call[1]
    tensors = {name: xp.asarray(x) for name, x in arrays.items()}
    plain = outcome(
        lambda: lowprec.matmul(tensors["a"], tensors["b"], **_rest(tensors), **keywords)
    )
    recorded = {
        name: x.clone().requires_grad_()
        if (x.is_floating_point() or x.is_complex()) and (i >> bit) % 4 != 3
        else x
        for bit, (name, x) in enumerate(tensors.items())
    }
    product = lowprec.torch.matmul if i % 2 else lowprec.matmul
    others = [
        (
            "grad",
            outcome(lambda: product(recorded["a"], recorded["b"], **_rest(recorded), **keywords)),
        )
    ]
    names = sorted(tensors)

    def mapped(*stacks):
        each = dict(zip(names, stacks, strict=True))
        return lowprec.matmul(each["a"], each["b"], **_rest(each), **keywords)

    def vmapped():
        return xp.torch.vmap(mapped)(*(tensors[name][None] for name in names))[0]

    return xp.to_numpy, plain, [*others, ("vmap", outcome(vmapped))]


def _rest(arrays):
    return {name: x for name, x in arrays.items() if name not in "ab"}


@pytest.mark.parametrize("count", COUNTS)
def test_tensors_that_pytorch_records_or_maps(count):
    compare(count, 1, _on_torch)


@pytest.mark.parametrize(
    "count", [pytest.param(20, id="some"), pytest.param(250, id="all", marks=pytest.mark.sweep)]
)
def test_compiled_tensors(torch, count):
    xp = load_or_skip(Backend.TORCH)

    def ways(call, arrays, i):
        tensors, keywords = {name: xp.asarray(x) for name, x in arrays.items()}, call[1]

        def multiply(**arrays):
            return lowprec.matmul(arrays["a"], arrays["b"], **_rest(arrays), **keywords)

        torch._dynamo.reset()
        compiled = torch.compile(multiply, backend="eager", dynamic=[None, True][i % 2])
        return (
            xp.to_numpy,
            outcome(lambda: multiply(**tensors)),
            [("compiled", outcome(lambda: compiled(**tensors)))],
        )

    compare(count, 2, ways)


# Tracing takes most of the time.
@pytest.mark.parametrize(
    "count", [pytest.param(600, id="some"), pytest.param(6000, id="all", marks=pytest.mark.sweep)]
)
def test_arrays_that_jax_traces(jax, count):

    def ways(call, arrays, i):
        on_jax, keywords = {name: jax.numpy.asarray(x) for name, x in arrays.items()}, call[1]

        def multiply(**arrays):
            return lowprec.matmul(arrays["a"], arrays["b"], **_rest(arrays), **keywords)

        def traced():
            product = lowprec.jax.matmul if i % 2 else lowprec.matmul
            found = jax.eval_shape(lambda a, b, **rest: product(a, b, **rest, **keywords), **on_jax)
            return np.zeros(found.shape, found.dtype)

        plain = outcome(lambda: multiply(**on_jax))
        if i % 50 == 0:
            return np.asarray, plain, [("jit", outcome(lambda: jax.jit(multiply)(**on_jax)))]
        # Shape and type alone: XLA takes long to compile.
        plain = plain if plain[0] else ("", np.zeros(plain[1].shape, plain[1].dtype))
        return np.asarray, plain, [("traced", outcome(traced))]

    with jax.enable_x64(True):
        compare(count, 3, ways)


@pytest.mark.parametrize("count", COUNTS)
def test_dask_arrays(count):
    da = pytest.importorskip("dask.array", reason="dask is not installed")

    def ways(call, arrays, i):
        keywords = {name: x for name, x in call[1].items() if name in _OF_DASK}
        a, b = arrays["a"], arrays["b"]
        lazy = [
            da.from_array(x, chunks=2 if i % 2 and "rtol" not in keywords else -1) for x in (a, b)
        ]

        def multiply():
            found = lowprec.matmul(*lazy, **keywords)
            return (
                found.compute(scheduler="synchronous")
                if i % 5 == 0
                else np.zeros(found.shape, found.dtype)
            )

        plain = outcome(lambda: lowprec.matmul(a, b, **keywords))
        if i % 5 and not plain[0]:
            plain = "", np.zeros_like(plain[1])
        return np.asarray, plain, [("dask", outcome(multiply))]

    compare(count, 4, ways)


@pytest.mark.parametrize("count", COUNTS)
def test_plan_of_the_same_call(count):
    def ways(call, arrays, i):
        keywords = dict(call[1])
        if i % 4 == 0:
            keywords["k_chunk"] = [2, 0, 1.5, True][i // 4 % 4]
        if i % 7 == 0:  # some overlap an operand, some have the wrong shape or type
            keywords["out"] = arrays[["a", "b"][i % 2]]

        def result():
            product = lowprec.matmul(arrays["a"], arrays["b"], **_rest(arrays), **keywords)
            return np.zeros_like(product)

        def planned(a, b, **rest):
            plan = lowprec.plan(a, b, **rest, **keywords)
            return np.zeros(
                plan.out_shape, getattr(ml_dtypes, plan.out_dtype.label, plan.out_dtype.label)
            )

        described = {name: (x.shape, x.dtype.name) for name, x in arrays.items()}
        # First: the product may overwrite an operand.
        others = [
            ("plan", outcome(lambda: planned(**arrays))),
            ("description", outcome(lambda: planned(**described))),
        ]
        return np.asarray, outcome(result), others

    compare(count, 5, ways)


@pytest.mark.parametrize("dtype", ["float32", "complex128", "float16", "int8"])
def test_a_plan_from_descriptions_is_the_plan_from_arrays(dtype):
    a, b = np.ones((2, 3, 4), dtype), np.ones((4, 5), dtype)
    described, plan = lowprec.plan((a.shape, dtype), (b.shape, dtype)), lowprec.plan(a, b)
    assert described == plan
    assert hash(described) == hash(plan)


# -- the same call, seen in other places ----------------------------------------------------------


def test_one_table_names_the_products_of_libraries():
    """No other string of a lower layer names a module above it."""
    package = Path(lowprec.__file__).parent
    upper = "torch|jax|dask|numpy|linalg|amp|contractions|profiling|checking|cli|tuning|auditing|emulation|report"
    upper += "|interception"
    named = {}
    for folder in ("util", "arrays", "planning", "policy", "backends", "core"):
        for path in sorted((package / folder).rglob("*.py")):
            found = set(
                re.findall(rf'"(lowprec\.(?:{upper})(?:\.\w+)*)(?::[\w.]+)?"', path.read_text())
            )
            if found:
                named[path.relative_to(package).as_posix()] = found
    products = {module for module, _ in PRODUCTS.values()}
    assert named == {"core/call.py": products}


def test_the_profile_has_the_source_of_the_mode_of_a_recorded_product(torch):
    x = torch.ones(4, 4)
    w = x.clone().requires_grad_()
    bias = torch.ones(4)
    found = []
    for multiply in (
        lowprec.matmul,
        torch.vmap(lambda a, b, **k: lowprec.matmul(a, b, **k), in_dims=(0, 0)),
    ):
        with lowprec.profile() as prof:
            a, b = (x, w) if multiply is lowprec.matmul else (x[None], w[None])
            with lowprec.math_mode("bf16"):
                out = multiply(a, b)
            multiply(a, b, rtol=1e-2)
            multiply(a, b, math_mode="tf32")
            if multiply is lowprec.matmul:
                out = multiply(a, b, bias=bias, rtol=1e-2)
                out.sum().backward()
        found.append([record.source for record in prof.records])
    rtol, scope, argument = "rtol= argument", "with math_mode(...)", "math_mode= argument"
    assert found == [[scope, rtol, argument, rtol, rtol], [scope, rtol, argument]]


def test_plan_accepts_what_matmul_accepts(torch):
    w = torch.ones(4, 3, requires_grad=True)
    plan = lowprec.plan(torch.ones(2, 4), w, math_mode="bf16")
    assert (plan.out_shape, str(plan.mode)) == ((2, 3), "bf16")
    meta = torch.ones(4, 3, device="meta")
    assert lowprec.plan(torch.ones(2, 4, device="meta"), meta).out_shape == (2, 3)


def test_a_product_times_zero_is_checked_by_the_caller_s_shapes():
    a, b = np.ones((2, 3), np.float32), np.ones((4, 5), np.float32)
    with pytest.raises(lowprec.ShapeError, match=r"shapes \(2, 3\) and \(4, 5\)"):
        lowprec.matmul(a, b, alpha=0.0)
    call = bind(a, lowprec.prepare(b[:3]), alpha=0.0)
    assert type(call.y) is PreparedView, "on a GPU its memory is ordered by lowprec itself"


def test_an_out_that_overlaps_an_operand_has_one_executor(monkeypatch, fresh_executors):
    prepared = []
    prepare = cpu.prepare
    monkeypatch.setattr(cpu, "prepare", lambda plan: prepared.append(plan) or prepare(plan))
    a = np.arange(9, dtype=np.float32).reshape(3, 3)
    expected = a @ a
    lowprec.matmul(a, a, out=a)
    assert np.array_equal(a, expected)
    assert len(prepared) == 1
    with pytest.raises(lowprec.ShapeError, match="out has shape"):
        lowprec.matmul(a, a[:, :2], out=a)


# -- frames ---------------------------------------------------------------------------------------


def frames(function):
    """Return the number of Python functions that a warm call enters, itself included."""
    names = []

    def look(frame, event, argument):
        if event == "call":
            names.append(frame.f_code.co_name)

    for _ in range(3):
        function()
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(names) - 1


def test_a_warm_call_enters_few_functions():
    x = np.ones((8, 8), np.float32)
    assert frames(lambda: lowprec.matmul(x, x)) <= 14
    assert frames(lambda: lowprec.matmul(x, x, math_mode="bf16")) <= 14
    assert frames(lambda: lowprec.plan(x, x, math_mode="bf16")) <= 80
    if lowprec.plan(x, x).kernel_row.packs:
        for mode in recipes.MODES:
            assert frames(lambda mode=mode: lowprec.matmul(x, x, math_mode=mode)) <= 14, mode


def test_a_warm_recorded_call_enters_few_functions(torch):
    x, w = torch.ones(8, 8), torch.ones(8, 8, requires_grad=True)
    assert frames(lambda: lowprec.matmul(x, x)) <= 20
    assert frames(lambda: lowprec.matmul(x, w)) <= 35
