"""Products on every kernel path of the CPU: within their bounds, NaN and Inf as in IEEE 754, nothing else touched."""

import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

import lowprec
from backends.kernel_path_examples import examples
from backends.kernel_paths import KERNEL_PATHS, numpy_dtype, promoted
from lowprec.backends.cpu import products, threads
from lowprec.modes import row
from support import cpu_units, machines, oracles
from support.kernel_oracles import bits

_SINGLE = 2.0**-24

#: What of float32's range may be left before the end, whatever the order of the sums.
_SAFE = {"float32": 2.0**126, "complex64": 2.0**125, "float64": 2.0**1000, "complex128": 2.0**1000}


def _bits(x):
    """Return the bits of an array, with one NaN for all."""
    x = np.atleast_1d(x)
    return bits(x).tobytes()


def _operands(example, plan):
    """Return the operands as they are multiplied, in the type of the product; those that are split as they are."""
    stored = (example.a.array, example.b.array)
    dtype = numpy_dtype(promoted(*(x.dtype.name for x in stored)))
    wide = [x.astype(dtype) for x in stored]
    if row(plan.runs_as).parts > 1 or not plan.mode_has_effect:
        return wide[0], wide[1]
    x, y = oracles.round_both(*wide, str(plan.runs_as))
    # Numbers of the mode's own format stay what they are, however far apart they are.
    kept = [s.dtype == np.float16 and plan.runs_as == "fp16" for s in stored]
    return wide[0] if kept[0] else x, wide[1] if kept[1] else y


def _sums(x, y, of):
    """Return sums over rows of a and columns of b, such as go with the result."""
    a, b = of(oracles.magnitude(x)), of(oracles.magnitude(y))
    return a.sum(-1, keepdims=b.ndim > 1), b.sum(max(-2, -b.ndim), keepdims=min(a.ndim, b.ndim) > 1)


def _product_error(example, plan, x, y):
    """Return a bound of the product's error, element by element."""
    stored = (example.a.array, example.b.array)
    scheme = str(plan.runs_as)
    dtype = numpy_dtype(promoted(*(s.dtype.name for s in stored)))
    if plan.mode_has_effect and scheme == "fp64":
        how = oracles.arithmetic(np.float64(0), np.float64(0), "fp32")
        return 2 * oracles.accumulation_bound(x, y, scheme, how)
    if not plan.mode_has_effect or row(plan.runs_as).parts == 1:
        probes = stored if stored[0].dtype == stored[1].dtype else (np.zeros(0, dtype),) * 2
        how = oracles.arithmetic(*probes, scheme if plan.mode_has_effect else "fp32")
        return 1.01 * oracles.accumulation_bound(x, y, scheme, how) + 2.0**-148
    bound = plan.bound
    size = np.matmul(oracles.magnitude(x), oracles.magnitude(y))
    # Where an element was not finite it is FP32's own.
    error = oracles.gamma(2 * x.shape[-1], _SINGLE) * size
    if bound.by_norms:
        # Each row of a and column of b is scaled by itself, so the bound of norms holds for every pair of them.
        rows, columns = _sums(x, y, np.square)
        error = error + bound.relative * np.sqrt(rows) * np.sqrt(columns)
    else:
        rows, columns = _sums(x, y, np.asarray)
        loss = bound.operand_absolute
        error = error + bound.relative * size + loss * (rows + columns + bound.k * loss)
    return error + bound.result_absolute + 2.0**-148


def _has_subnormals(*operands):
    return any(((x != 0) & (np.abs(x) < 2.0**-126)).any() for x in operands)


def _reach(example, x, y, c):
    """Return how large sums of finite numbers may become on the way."""

    def finite(z):
        return np.where(np.isfinite(z), oracles.magnitude(z), 0.0)

    then = example.then
    found = max(1.0, abs(then.alpha)) * np.matmul(finite(x), finite(y))
    if then.beta:
        assert c is not None
        found = found + max(1.0, abs(then.beta)) * finite(oracles.widen(c))
    return found if then.bias is None else found + finite(oracles.widen(then.bias))


def _check(example, plan, c, result):
    """Compare a result with float64, under the roundings of the product, the epilogue and the result's type."""
    then, wide = example.then, plan.accumulator.label
    x, y = _operands(example, plan)
    if then.alpha == 0:  # as in BLAS, the operands are not read
        x, y = np.zeros_like(x), np.zeros_like(y)
    u = 2.0**-53 if wide in ("float64", "complex128") else _SINGLE
    with np.errstate(all="ignore"):
        value = oracles.product(x, y)
        unknown = _reach(example, x, y, c) > _SAFE[wide]
        if plan.kernel_row.summation != "sequential" and _has_subnormals(x, y):
            unknown |= np.isinf(value)  # they count as zero, also next to an infinity
        size = np.matmul(oracles.magnitude(x), oracles.magnitude(y))
        error = abs(then.alpha) * _product_error(example, plan, x, y)
        value, size = then.alpha * value if then.alpha != 1 else value, abs(then.alpha) * size
        if then.beta:
            assert c is not None
            value, size = (
                value + then.beta * oracles.widen(c),
                size + abs(then.beta) * oracles.magnitude(c),
            )
        if then.bias is not None:
            value, size = value + oracles.widen(then.bias), size + oracles.magnitude(then.bias)
        error = error + oracles.gamma(8, u) * size + 8 * (2.0**-150 if u == _SINGLE else 2.0**-1074)
        error = np.where(np.isfinite(value), error, 0.0)
        if then.activation == "relu":
            value = np.where(value < 0, 0.0, value)
        elif then.activation == "gelu":
            error = 1.13 * error + 8 * u * np.where(np.isfinite(value), np.abs(value), 0.0)
            # Below, the result is less than 2^-149; the formula makes a NaN of the infinity.
            value = np.where(value < -44, 0.0, oracles.gelu(value))
        # Of complex numbers, both components are rounded.
        stored = oracles.storage_bound(np.abs(value) + error, result.dtype.name)
        error = error + (1.5 * stored if result.dtype.kind == "c" else stored)
    got = oracles.widen(result)
    largest = float(ml_dtypes.finfo(result.dtype).max)
    with np.errstate(all="ignore"):
        close = np.abs(got - value) <= error
        overflows = np.isinf(got) & (np.abs(value) + error >= largest)
        # what (Inf + 0i) (1 + 1i) is, each BLAS answers in its own way
        if result.dtype.kind == "c":
            same = ~np.isfinite(got)
        else:
            same = (got == value) | (np.isnan(got) & np.isnan(value))
            overflows &= (np.sign(got) == np.sign(value)) | (np.abs(value) <= error)
        ok = np.where(np.isfinite(value), close | overflows, same) | unknown
    if not ok.all():
        where = tuple(map(int, np.argwhere(~ok)[0]))
        raise AssertionError(
            f"{(~ok).sum()} of {ok.size} differ, first {where}: got {got[where]}, expected {value[where]}, "
            f"allowed {error[where]}; {example}"
        )


def _check_integers(example, result):
    value = example.a.array.astype(np.int64) @ example.b.array.astype(np.int64)
    if example.then.bias is not None:
        value = value + example.then.bias
    limits = np.iinfo(np.int32)
    value = np.clip(value, limits.min, limits.max)
    if example.then.activation == "relu":
        value = np.maximum(value, 0)
    np.testing.assert_array_equal(result, value)


def _run(example, b, out, c):
    then = example.then
    given_arrays = {"out": out, "c": c, "bias": then.bias}
    return np.asarray(
        lowprec.matmul(
            example.a.array, b, alpha=then.alpha, beta=then.beta, activation=then.activation, math_mode=example.mode,
            out_dtype=example.out_dtype, **{k: x for k, x in given_arrays.items() if x is not None},
        )
    )  # fmt: skip


def check(example, path):
    """Run a product in all ways that must not matter, and compare it with what it must be."""
    then, out = example.then, example.out and example.out.array
    read = [x.memory for x in (example.a, example.b, *example.around)]
    before = [x.tobytes() for x in read]
    in_place = out is not None and then.c is out
    c = then.c.copy() if in_place else then.c
    plan = lowprec.plan(
        example.a.array, example.b.array, math_mode=example.mode, out_dtype=example.out_dtype, alpha=then.alpha,
        beta=then.beta, activation=then.activation,
        **{k: x for k, x in {"out": out, "c": then.c, "bias": then.bias}.items() if x is not None},
    )  # fmt: skip
    assert plan.kernel == path.kernel, f"{plan.kernel}: {example}"
    results = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for count in (1, 2, 5):
            monkeypatch.setattr(threads, "num_threads", lambda count=count: count)
            if in_place:
                out[...] = c
            elif out is not None:
                out[...] = np.array(77).astype(out.dtype)
            results.append(_run(example, example.b.array, out, then.c).copy())
            if out is not None:
                example.out.check()
        if example.prepared is not None:
            b = lowprec.prepare(example.b.array, math_mode=example.prepared)
            for _ in range(2):  # the first makes what the second finds
                if in_place:
                    out[...] = c
                results.append(_run(example, b, out, then.c).copy())
    for x, known in zip(read, before, strict=True):
        assert x.tobytes() == known, "an operand was changed"
    first, *others = results
    assert (first.shape, first.dtype.name) == (plan.out_shape, str(plan.out_dtype))
    for x in others:
        assert _bits(x) == _bits(first), (
            f"other bits with other threads, or a prepared operand: {example}"
        )
    if first.dtype == np.int32:
        _check_integers(example, first)
    else:
        _check(example, plan, c, first)


def _paths():
    marks = {
        name: [cpu_units.needs(path.unit)] if path.unit else []
        for name, path in KERNEL_PATHS.items()
    }
    return [pytest.param(path, id=name, marks=marks[name]) for name, path in KERNEL_PATHS.items()]


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("path", _paths())
def test_a_product_is_right(path, count):
    # An example is given by its seeds; a search for a simpler one would take minutes and show no more.
    @given(examples(path))
    @settings(max_examples=count, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    def test(example):
        check(example, path)

    if settings.default.derandomize:  # each in its own way
        test = seed(zlib.crc32(repr((path.kernel, path.dtypes, path.modes)).encode()))(test)
    with machines.only(path.unit), pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_ALONE", 0)
        test()
