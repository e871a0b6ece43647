"""``LossScaler`` against PyTorch's ``GradScaler``, jmp's and Keras's rules, and its errors."""

import collections
import copy
import functools
import pickle

import ml_dtypes
import numpy as np
import pytest

from frameworks.backends import Backend, DLPackOnly
from frameworks.conftest import load_or_skip
from lowprec import DLPackArray, DTypeError, ShapeError
from lowprec.amp import GradientTypeError, LossScaler, ScalerStateError, SettingError, functional
from lowprec.amp.rules import ScaleRule
from lowprec.arrays.namespaces import dtype_name
from lowprec.backends.cpu import library
from lowprec.errors import ArrayError
from support import interrupts

# -- against PyTorch's ----------------------------------------------------------------------------


class Optimizer:
    """What ``GradScaler`` needs of an optimizer."""

    def __init__(self, torch):
        self.parameter = torch.zeros(2, requires_grad=True)
        self.param_groups = [{"params": [self.parameter]}]
        self.steps = 0

    def step(self):
        self.steps += 1
        return "stepped"


def random_arguments(rng):
    return {
        "init_scale": float(2.0 ** rng.integers(-3, 120)) * float(rng.choice([1.0, 1.1, 3.7])),
        "growth_factor": float(rng.choice([2.0, 1.5, 1.001, 7.3, 2.0**40])),
        "backoff_factor": float(rng.choice([0.5, 0.25, 0.1, 0.999])),
        "growth_interval": int(rng.integers(1, 5)),
    }


def compare_sequence(torch, seed):
    """Drive both scalers through one random sequence, and look at everything after every step."""
    rng = np.random.default_rng(seed)
    arguments = random_arguments(rng)
    ours, theirs = LossScaler(**arguments), torch.amp.GradScaler("cpu", **arguments)
    optimizers = [Optimizer(torch) for _ in range(int(rng.integers(1, 3)))]
    kinds = rng.choice(["finite", "inf", "nan"], size=(12, len(optimizers)), p=[0.8, 0.1, 0.1])
    theirs.scale(torch.ones(()))  # it makes its scale at the first use
    for number, row in enumerate(kinds):
        for name, (kind, optimizer) in enumerate(zip(row, optimizers, strict=True)):
            values = rng.standard_normal(2).astype(np.float32)
            if kind != "finite":
                values[rng.integers(2)] = np.inf if kind == "inf" else np.nan
            optimizer.parameter.grad = torch.from_numpy(values.copy())
            found = ours.unscale(values, optimizer=name)
            explicit = rng.integers(2)
            if explicit:
                theirs.unscale_(optimizer)
            stepped = theirs.step(optimizer)
            assert ours.step(lambda: "stepped", optimizer=name) == stepped
            np.testing.assert_array_equal(found, optimizer.parameter.grad.numpy())
        ours.update()
        theirs.update()
        assert ours.state_dict() == theirs.state_dict(), (seed, number)
        if rng.random() < 0.1:  # through a checkpoint, to the other library
            state = ours.state_dict()
            ours, theirs = LossScaler(), torch.amp.GradScaler("cpu")
            ours.load_state_dict(copy.deepcopy(state))
            theirs.load_state_dict(state)
            theirs.scale(torch.ones(()))


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_the_same_as_pytorch_at_every_step(torch, count):
    for seed in range(count):
        compare_sequence(torch, seed)


def test_the_arguments_and_defaults_are_pytorchs(torch):
    scaler = torch.amp.GradScaler("cpu")
    assert LossScaler().state_dict() == scaler.state_dict()
    assert (
        LossScaler(enabled=False).state_dict()
        == {}
        == torch.amp.GradScaler("cpu", enabled=False).state_dict()
    )


@pytest.mark.parametrize(
    ("arguments", "floor"), [({}, 2.0**-126), ({"min_scale": 2.0**-127}, 2.0**-127)]
)
def test_overflow_without_end_stops_at_a_floor(torch, arguments, floor):
    """PyTorch's scale falls to 0 and stays there; its state is taken, and the scale grows again."""
    ours, theirs = LossScaler(**arguments), torch.amp.GradScaler("cpu")
    state, rule = functional.init(np), ScaleRule(**arguments)
    optimizer = Optimizer(torch)
    theirs.scale(torch.ones(()))
    for _ in range(200):
        ours.unscale(np.float32([np.inf]))
        ours.update()
        state = functional.update(state, np.bool_(True), rule)
        optimizer.parameter.grad = torch.full((2,), np.inf)
        theirs.step(optimizer)
        theirs.update()
        assert ours.get_scale() == max(theirs.get_scale(), floor) == state.scale
    assert theirs.get_scale() == 0.0
    ours.load_state_dict(theirs.state_dict())
    assert ours.get_scale() == floor
    theirs.load_state_dict(ours.state_dict())
    assert theirs.get_scale() == floor
    assert (ours.unscale(np.float32([floor])) == 1).all()


def test_the_twin_is_the_scaler(xp):
    module = {"numpy": np, "torch": getattr(xp, "torch", None)}.get(xp.name)
    module = module or xp.jax.numpy
    rule = ScaleRule(growth_interval=2, min_scale=0.5, max_scale=2.0**12)
    scaler = LossScaler(2.0**10, growth_interval=2, min_scale=0.5, max_scale=2.0**12)
    state = functional.init(module, 2.0**10)
    rng = np.random.default_rng(7)
    for finite in [*(rng.random(40) < 0.6), *[False] * 16, *[True] * 30]:
        values = np.array([3.0, 1.0 if finite else -np.inf], np.float32)
        grads = {"w": xp.asarray(values)}
        found, found_inf = functional.unscale(grads, state)
        np.testing.assert_array_equal(
            xp.to_numpy(found["w"]), xp.to_numpy(scaler.unscale(grads)["w"])
        )
        assert bool(found_inf) is scaler.found_inf is not bool(finite)
        state = functional.update(state, found_inf, rule)
        scaler.update()
        expected = scaler.state_dict()
        assert (float(state.scale), int(state.growth_tracker)) == (
            expected["scale"],
            expected["_growth_tracker"],
        )


def test_limits_are_numbers_of_float32():
    rule = ScaleRule(min_scale=0.1, max_scale=2)
    floor = float(np.float32(0.1))
    state, overflow = functional.init(np, 0.15), np.bool_(True)
    assert rule.next(0.15, 0, True)[0] == functional.update(state, overflow, rule).scale == floor
    assert LossScaler(0.01, min_scale=0.1).get_scale() == floor
    capped = LossScaler(8.0, max_scale=2).get_scale()
    assert (capped, type(capped)) == (2.0, float)


def test_the_twin_under_jit(jax):
    jnp, rule = jax.numpy, ScaleRule(growth_interval=2)

    @jax.jit
    def train(state, w, x):
        loss = lambda w: functional.scale(jnp.sum(w * x), state)  # noqa: E731
        grads, found_inf = functional.unscale(jax.grad(loss)(w), state)
        w = functional.select(found_inf, w, w - 0.5 * grads)
        return functional.update(state, found_inf, rule), w

    state, w = functional.init(jnp, 1024.0), jnp.ones(2, jnp.float32)
    x = jnp.asarray([1.0, 2.0], jnp.float32)
    state, w = train(state, w, x)
    assert (w == jnp.asarray([0.5, 0.0])).all()
    state, w = train(state, w, x * jnp.inf)
    assert (w == jnp.asarray([0.5, 0.0])).all()
    assert (float(state.scale), int(state.growth_tracker)) == (512.0, 0)
    assert train._cache_size() == 1
    over = jax.lax.scan(lambda s, f: (functional.update(s, f, rule), s.scale), state, x < 0)[0]
    assert (float(over.scale), int(over.growth_tracker)) == (1024.0, 0)


def test_the_twin_refuses():
    state = functional.init(np)
    with pytest.raises(GradientTypeError, match="float16 gradients cannot be unscaled"):
        functional.unscale(np.ones(2, np.float16), state)
    with pytest.raises(ArrayError, match="no gradients to unscale"):
        functional.unscale([None], state)
    for dtype in ("complex64", "int32"):
        with pytest.raises(DTypeError, match=f"float32, float64, bfloat16, got {dtype}"):
            functional.unscale(np.ones(2, dtype), state)


# -- containers, out, types -----------------------------------------------------------------------

Pair = collections.namedtuple("Pair", ["w", "b"])


def test_containers_keep_their_structure(xp):
    one = lambda: xp.asarray(np.full(3, 8.0, np.float32))  # noqa: E731
    grads = {
        "layers": [Pair(one(), None), (one(),)],
        "more": collections.OrderedDict(x=one()),
        "rest": collections.defaultdict(list, y=one()),
    }
    scaler = LossScaler(4.0)
    found = scaler.unscale(grads)
    assert type(found["layers"][0]) is Pair
    assert found["layers"][0].b is None
    assert type(found["more"]) is collections.OrderedDict
    assert found["rest"].default_factory is list
    for x in (found["layers"][0].w, found["layers"][1][0], found["more"]["x"], found["rest"]["y"]):
        assert isinstance(x, xp.result_type)
        np.testing.assert_array_equal(xp.to_numpy(x), 2.0)
    np.testing.assert_array_equal(xp.to_numpy(grads["rest"]["y"]), 8.0)


def test_other_arrays_of_the_standard_and_of_dlpack():
    strict = pytest.importorskip("array_api_strict", reason="array_api_strict is not installed")
    scaler = LossScaler(2.0)
    found = scaler.unscale([strict.asarray([2.0, 4.0], dtype=strict.float32)])
    assert found[0].dtype == strict.float32
    assert (np.asarray(found[0]) == [1.0, 2.0]).all()
    assert not scaler.found_inf
    scaler.update()
    found = scaler.unscale([DLPackOnly(np.array([2.0, np.nan], np.float32))])
    assert isinstance(found[0], DLPackArray)
    assert np.asarray(found[0])[0] == 1.0
    assert scaler.found_inf


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 1000, 70_001, 300_003])
def test_every_element_is_divided_and_looked_at(dtype, n):
    rng = np.random.default_rng(n)
    x = rng.standard_normal(n).astype(getattr(ml_dtypes, dtype, dtype))
    inverse = np.float32(1 / 3.0)
    wide = np.float64 if dtype == "float64" else np.float32
    expected = (x.astype(wide) * wide(inverse)).astype(x.dtype)
    scaler = LossScaler(3.0, dynamic=False)
    np.testing.assert_array_equal(scaler.unscale(x), expected)
    assert not scaler.found_inf
    for place in {0, n // 2, n - 1} if n else ():
        for value in (np.inf, -np.inf, np.nan):
            bad = x.copy()
            bad[place] = value
            scaler.update()
            scaler.unscale(bad, out=bad)
            assert scaler.found_inf
            bad[place] = expected[place]
            np.testing.assert_array_equal(bad, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_numpy_computes_the_same_without_the_library(dtype, monkeypatch):
    rng = np.random.default_rng(1)
    # Of all magnitudes: subnormal results, overflows and ties are among them.
    x = (rng.standard_normal(70_003) * 2.0 ** rng.integers(-140, 125, 70_003)).astype(
        getattr(ml_dtypes, dtype, dtype)
    )
    scalers = [LossScaler(scale, dynamic=False) for scale in (3.0, 2.0**-7 / 3, 2.0**100)]
    first = [scaler.unscale(x) for scaler in scalers]
    monkeypatch.setattr(library, "library", lambda: None)
    for scaler, expected in zip(scalers, first, strict=True):
        assert not scaler.found_inf
        scaler.update()
        assert scaler.unscale(x).tobytes() == expected.tobytes()


def test_a_caller_that_flushes_subnormal_numbers(torch):
    if library.library() is None or not torch.set_flush_denormal(True):
        pytest.skip(
            "the kernels are not compiled, or this processor does not flush subnormal numbers"
        )
    try:
        found = LossScaler(4.0).unscale(np.full(9, 2.0**-126, np.float32))
    finally:
        torch.set_flush_denormal(False)
    assert (found.view(np.uint32) == 1 << 21).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("view", ["transposed", "reversed", "strided", "broadcast"])
def test_views_are_read_and_written_in_place(view, dtype):
    whole = np.arange(1.0, 41.0, dtype=np.float32).astype(dtype).reshape(8, 5)
    x = {
        "transposed": whole.T,
        "reversed": whole[::-1, ::-1],
        "strided": whole[::2, 1:4],
        "broadcast": np.broadcast_to(whole[0], (3, 5)),
    }[view]
    expected = (x.astype(np.float32) * np.float32(1 / 3)).astype(dtype)
    np.testing.assert_array_equal(LossScaler(3.0).unscale(x), expected)
    if view != "broadcast":
        before = whole.copy()
        assert LossScaler(3.0).unscale(x, out=x) is x
        np.testing.assert_array_equal(x, expected)
        assert np.count_nonzero(whole != before) == x.size


@pytest.mark.parametrize("n", [1000, 300_000])
def test_an_out_that_overlaps_partly(n):
    x = np.arange(n, dtype=np.float32)
    expected = x[:-1] * np.float32(0.25)
    LossScaler(4.0).unscale(x[:-1], out=x[1:])
    np.testing.assert_array_equal(x[1:], expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_losses_have_pytorchs_types(torch, xp, dtype):
    """A loss of no dimensions is scaled in float32 at least, beyond float16's range; others keep their type."""
    theirs, scaler = torch.amp.GradScaler("cpu"), LossScaler()
    for values in (1.5, [2.0**-10, 0.25]):
        loss = np.array(values, dtype)
        name = getattr(torch, np.dtype(dtype).name)
        expected = theirs.scale(torch.tensor(values, dtype=name))
        for found in (
            scaler.scale({"loss": xp.asarray(loss)})["loss"],
            functional.scale(xp.asarray(loss), functional.ScalerState(np.float32(2.0**16), 0)),
        ):
            assert dtype_name(found) == dtype_name(expected)
            np.testing.assert_array_equal(
                xp.to_numpy(found).astype(float), expected.double().numpy()
            )
    assert scaler.scale(0.5) == 2.0**15
    found = scaler.scale(np.float16(1.5))
    assert (found, found.dtype) == (1.5 * 2.0**16, np.float32)


# -- order, several optimizers, several processes -------------------------------------------------


def test_mistakes_in_the_order_are_refused():
    scaler, grads = LossScaler(), np.ones(2, np.float32)
    with pytest.raises(ScalerStateError, match=r"update\(\) before any gradients were unscaled"):
        scaler.update()
    with pytest.raises(RuntimeError, match=r"before unscale\(\); call unscale\(grads\) first"):
        scaler.step(print)
    scaler.unscale(grads)
    with pytest.raises(ScalerStateError, match=r"unscaled already; call update\(\)"):
        scaler.unscale(grads)
    scaler.step(lambda: None)
    with pytest.raises(ScalerStateError, match=r"unscale\(\) after step\(\)"):
        scaler.unscale(grads)
    with pytest.raises(ScalerStateError, match="was called since the last update"):
        scaler.step(print)
    scaler.update()
    scaler.unscale(grads)
    with pytest.raises(ScalerStateError, match=r"of optimizer 'b' before unscale"):
        scaler.step(print, optimizer="b")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("where", ["new", "in place", "out"])
def test_sparse_gradients_are_divided_as_by_pytorch(torch, dtype, where):
    for bad in (1.0, float("inf"), float("nan")):
        values = torch.tensor([3.0, 5.0, bad], dtype=getattr(torch, dtype))
        # The first place comes twice: what is not coalesced stays so.
        grad = torch.sparse_coo_tensor([[0, 0, 2]], values.clone(), (4,), check_invariants=True)
        empty = torch.sparse_coo_tensor(size=(4,), dtype=grad.dtype, check_invariants=True)
        theirs, optimizer = torch.amp.GradScaler("cpu", 4.0), Optimizer(torch)
        optimizer.parameter = torch.zeros(4, dtype=grad.dtype, requires_grad=True)
        optimizer.param_groups = [{"params": [optimizer.parameter]}]
        optimizer.parameter.grad = grad.clone()
        theirs.scale(torch.ones(()))
        theirs.unscale_(optimizer)
        expected = optimizer.parameter.grad
        ours, grads = LossScaler(4.0), {"w": grad, "tied": grad, "x": empty, "y": empty.clone()}
        outs = {name: empty.clone() for name in grads}
        found = ours.unscale(grads, out={"new": None, "in place": grads, "out": outs}[where])
        for name in ("w", "tied"):
            assert (found[name] is grad) is (where == "in place")
            assert found[name].is_coalesced() is False
            torch.testing.assert_close(
                found[name].coalesce(), expected.coalesce(), rtol=0, atol=0, equal_nan=True
            )
        assert (grad._values()[0] == 3) is not (where == "in place")
        assert found["x"]._nnz() == found["y"]._nnz() == 0
        assert ours.found_inf is (bad != 1)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_other_sparse_gradients_are_refused(torch):
    eye = torch.eye(3)
    for layout in ("csr", "csc"):
        grad = eye.to_sparse(layout=getattr(torch, f"sparse_{layout}"))
        with pytest.raises(ArrayError, match=r"a sparse gradient: pass grad\.values"):
            LossScaler().unscale([grad])
    coo = eye.to_sparse()
    with pytest.raises(ArrayError, match=r"a sparse gradient: pass grad\.coalesce\(\)\.values"):
        functional.unscale(coo, functional.init(torch))
    with pytest.raises(GradientTypeError, match="float16 gradients cannot be unscaled"):
        LossScaler().unscale([coo.half()])
    for grads, out in ((coo, eye), (eye, coo)):
        with pytest.raises(
            ArrayError, match="out is a sparse tensor if and only if the gradient is"
        ):
            LossScaler().unscale(grads, out=out)


GOOD, READ_ONLY = np.ones(2, np.float32), np.broadcast_to(np.float32(1), 2)
SCALAR = [np.float32(1)]  # of NumPy's, which cannot be written


@pytest.mark.parametrize(
    ("grads", "out", "error", "message"),
    [
        (
            [GOOD, GOOD.astype(np.float16)],
            [GOOD, GOOD],
            GradientTypeError,
            "float16 gradients cannot be unscaled",
        ),
        (np.ones(2, np.int64), None, DTypeError, "float32, float64, bfloat16, got int64"),
        (GOOD, np.ones(3, np.float32), ShapeError, r"out of shape \(3,\)"),
        ({"a": GOOD}, {"b": GOOD}, ShapeError, "different structures"),
        (GOOD, np.ones(2), DTypeError, "make both alike"),
        (SCALAR, SCALAR, DTypeError, "make both alike"),
        (["x"], None, ArrayError, "expected arrays in lists, tuples or dicts, got 'x'"),
        ({"w": None}, None, ArrayError, "no gradients to unscale"),
        (GOOD, READ_ONLY, ArrayError, "out is read-only"),
    ],
)
def test_refused_gradients_leave_the_scaler_ready(grads, out, error, message):
    scaler = LossScaler()
    with pytest.raises(error, match=message):
        scaler.unscale(grads, out=out)
    assert (GOOD == 1).all(), "nothing was written before the refusal"
    scaler.unscale(GOOD)
    scaler.update()


def test_two_views_of_the_same_elements(torch):
    """Tied weights, as one array or as views of one buffer, are divided once; two gradients need two arrays."""
    for whole in (np.full((3, 3), 8.0, np.float32), torch.full((3, 3), 8.0)):
        tied = whole + 0
        LossScaler(4.0).unscale([tied, tied], out=[tied, tied])
        assert (tied == 2).all()
        with pytest.raises(ArrayError, match="out contains one array for two gradients"):
            LossScaler(4.0).unscale([tied, tied + 1], out=[tied, tied])
        assert (tied == 2).all()
        views = [whole[:2], whole[:2], whole[2:], whole[:0], whole[:0]]
        scaler = LossScaler(4.0)
        assert scaler.unscale(views, out=views) is views
        assert (whole == 2).all()
        scaler.update()
        column, row = whole[:, 0], whole[0, :]
        scaler.unscale([column, row[1:]], out=[column, row[1:]])
        assert whole.tolist() == [[0.5, 0.5, 0.5], [0.5, 2, 2], [0.5, 2, 2]]
        with pytest.raises(ArrayError, match="out contains one array for two gradients"):
            LossScaler(4.0).unscale([whole + 1, whole + 2], out=[whole[:], whole[:]])


def test_jax_has_no_out():
    jnp = load_or_skip(Backend.JAX).jax.numpy
    x = jnp.ones(2, jnp.float32)
    with pytest.raises(ArrayError, match="omit out="):
        LossScaler().unscale(x, out=x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"growth_factor": 1.0}, "growth_factor must be above 1, got 1.0"),
        ({"growth_factor": float("nan")}, "growth_factor must be above 1, got nan"),
        ({"backoff_factor": 1.0}, "backoff_factor must be between 0 and 1, got 1.0"),
        ({"growth_factor": "2"}, "growth_factor must be above 1, got '2'"),
        ({"growth_interval": 0}, "growth_interval must be an integer of at least 1, got 0"),
        ({"growth_interval": 2.5}, "growth_interval must be an integer of at least 1, got 2.5"),
        ({"reduce": 3}, "reduce must be a function of one bool, got 3"),
        ({"init_scale": 0.0}, "init_scale must be a positive number that float32 holds, got 0.0"),
        ({"init_scale": 1e39}, "init_scale must be a positive number"),
        (
            {"init_scale": "big"},
            "init_scale must be a positive number that float32 holds, got 'big'",
        ),
        (
            {"min_scale": 2.0**-128},
            "min_scale must be at least 2\\^-127, so that float32 holds its inverse",
        ),
        ({"min_scale": 4.0, "max_scale": 2.0}, "min_scale=4.0 is above max_scale=2.0"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, message):
    with pytest.raises(SettingError, match=message):
        LossScaler(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": -1.0}, "scale must be a number from 0 on that float32 holds"),
        ({"scale": float("nan")}, "scale must be a number from 0 on that float32 holds, got nan"),
        ({"_growth_tracker": -1}, "_growth_tracker must be an integer of at least 0"),
        ({"_growth_tracker": 1.5}, "_growth_tracker must be an integer of at least 0, got 1.5"),
        ({"growth_factor": 0.5}, "growth_factor must be above 1"),
    ],
)
def test_a_damaged_state_is_refused_whole(change, message):
    scaler = LossScaler(32.0)
    before = scaler.state_dict()
    with pytest.raises(SettingError, match=message):
        scaler.load_state_dict({**before, "growth_interval": 5, **change})
    assert scaler.state_dict() == before
    with pytest.raises(SettingError, match=r"lacks scale, .* of an enabled scaler"):
        scaler.load_state_dict({})
    with pytest.raises(SettingError, match="the state dictionary must be a mapping, got None"):
        scaler.load_state_dict(None)
    with pytest.raises(SettingError, match="lacks scale, growth_factor"):
        scaler.load_state_dict({"growth_interval": 1, "_growth_tracker": 0})


def test_a_step_that_raises_may_be_repeated():
    scaler = LossScaler()
    scaler.unscale(np.ones(1, np.float32))

    def fails():
        raise KeyError("disk")

    with pytest.raises(KeyError, match="disk"):
        scaler.step(fails)
    assert scaler.step(lambda: 3) == 3


def test_scalars_of_numpy_are_gradients():
    scaler = LossScaler(4.0)
    found = scaler.unscale({"b": np.float32([1, 7]).sum(), "c": np.full((), 6.0)})
    assert (found["b"], found["b"].dtype, found["c"]) == (2.0, np.float32, 1.5)
    scaler.update()
    scaler.unscale([np.float32(np.nan)])
    assert scaler.found_inf


def test_a_traced_gradient_names_the_way_out(jax):
    with pytest.raises(ArrayError, match=r"use lowprec\.amp\.functional inside jit"):
        jax.jit(LossScaler().unscale)(jax.numpy.ones(2))


def test_an_interrupt_finds_no_half_update():
    scalers = [LossScaler(8.0)]
    scalers[0].unscale(np.array([np.inf], np.float32))
    for _ in interrupts.interrupted(lambda: scalers[-1].update()):
        pending = bool(scalers[-1]._optimizers)
        assert (scalers[-1].state_dict()["scale"], pending) in {(8.0, True), (4.0, False)}
        scalers.append(LossScaler(8.0))
        scalers[-1].unscale(np.array([np.inf], np.float32))
    assert len(scalers) > 5
    assert scalers[-1].get_scale() == 4.0


def test_processes_agree_by_a_reduction():
    here = [np.ones(1, np.float32), np.array([np.nan], np.float32)]
    calls = []
    scalers = [LossScaler(8.0, reduce=lambda found: calls.append(found) or True) for _ in here]
    for scaler, grads in zip(scalers, here, strict=True):
        scaler.unscale(grads)
        assert scaler.step(lambda: "stepped") is None
        assert scaler.found_inf
        scaler.update()
        assert scaler.get_scale() == 4.0
    assert calls == [False, True], "asked once for each optimizer and update"


def test_a_new_scale_is_taken():
    scaler = LossScaler(max_scale=64.0, init_scale=4.0)
    scaler.update(new_scale=32.0)
    assert scaler.get_scale() == 32.0
    with pytest.raises(SettingError, match="new_scale must be a positive number"):
        scaler.update(new_scale=-1.0)
    assert scaler.get_scale() == 32.0


def test_one_that_is_not_enabled_does_nothing():
    scaler, grads = LossScaler(enabled=False), np.array([np.inf], np.float32)
    assert scaler.scale(grads) is grads
    assert scaler.unscale(grads) is grads
    assert scaler.step(lambda: "stepped") == "stepped"
    scaler.update()
    scaler.load_state_dict({})
    assert scaler.get_scale() == 1.0
    assert repr(scaler) == "LossScaler(enabled=False)"


def test_it_is_shown_copied_and_pickled():
    scaler = LossScaler(32.0)
    assert repr(scaler) == "LossScaler(scale=32, dynamic, growth_tracker=0)"
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert twin.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("library", ["torch", "jax", "array_api_strict"])
def test_the_decision_is_asked_for_once(library, monkeypatch):
    """Each look at a number is a wait for a GPU: one per step. CuPy's are counted where its kernels are tested."""
    if library == "array_api_strict":
        xp = pytest.importorskip(library, reason=f"{library} is not installed")
    else:
        backend = load_or_skip(Backend(library))
        xp = backend.torch if library == "torch" else backend.jax.numpy
    grads = [xp.ones(i + 1, dtype=xp.float32) for i in range(20)]
    kind, asked = type(grads[0]), []
    for name in ("__bool__", "__float__", "__int__", "__array__", "item", "tolist"):
        if original := getattr(kind, name, None):
            counted = functools.partialmethod(
                lambda x, f, *args: asked.append(1) or f(x, *args), original
            )
            monkeypatch.setattr(kind, name, counted)
    scaler = LossScaler()
    for count in (1, 2, 3):
        scaler.unscale(grads)
        assert len(asked) == count - 1, "no number has been read yet"
        scaler.step(lambda: None)
        assert scaler.found_inf is False
        scaler.update()
        assert len(asked) == count
