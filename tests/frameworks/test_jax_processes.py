"""The product inside JAX, in processes of their own: several devices, and the first import."""

import pytest

from support.programs import run_python

pytestmark = pytest.mark.usefixtures("jax")


SHARDED = """
import jax, numpy as np, lowprec
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
rng = np.random.default_rng(0)
a, b = (jax.numpy.asarray(rng.standard_normal(s, np.float32)) for s in ((64, 32), (32, 48)))
g = rng.standard_normal((64, 48), np.float32)
meshes = {k: jax.make_mesh((4,), ("x",), axis_types=(k,)) for k in (AxisType.Auto, AxisType.Explicit)}
SPLITS = {"m": (P("x"), P()), "n": (P(), P(None, "x")), "k": (P(None, "x"), P("x")), "none": (P(), P())}

def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))

def check(found, x, y, mode):
    bound = lowprec.plan(np.asarray(x), np.asarray(y), math_mode=mode).bound.relative
    found, x, y = (np.asarray(v, np.float64) for v in (found, x, y))
    error = np.linalg.norm(found - x @ y)
    assert 0 < error <= bound * np.linalg.norm(x) * np.linalg.norm(y), (error, bound)
    assert mode != "bf16" or error > 1e-4 * np.linalg.norm(x @ y)
"""

PARTITIONED = """
mesh, mode = meshes[AxisType.Auto], "bf16"
f = jax.jit(lambda a, b: lowprec.matmul(a, b, math_mode=mode))
for split, (sa, sb) in SPLITS.items():
    x, y = put(mesh, a, sa), put(mesh, b, sb)
    check(f(x, y), a, b, mode)
    check(lowprec.matmul(x, y, math_mode=mode), a, b, mode)  # at once
    text = f.lower(x, y).compile().as_text()
    assert "all-gather" not in text, (mode, split)
    assert ("all-reduce" in text) == (split == "k")
    assert f(x, y).sharding.is_equivalent_to(
        NamedSharding(mesh, P(*(["x"] if split == "m" else [None, "x"] if split == "n" else []))), 2
    ), split
    of_a, of_b = jax.jit(lambda a, b: jax.vjp(f, a, b)[1](g))(x, y)
    check(of_a, g, b.T, mode)
    check(of_b, a.T, g, mode)
"""

MANUAL = """
mesh, mode = meshes[AxisType.Auto], "bf16"
mm = lambda a, b: lowprec.matmul(a, b, math_mode=mode)
for types in (True, False):
    rows = jax.shard_map(mm, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=types)
    summed = jax.shard_map(
        lambda a, b: jax.lax.psum(mm(a, b), "x"),
        mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P(), check_vma=types,
    )
    for f in (rows, summed):
        check(jax.jit(f)(a, b), a, b, mode)
        of_a, of_b = jax.jit(lambda a, b: jax.vjp(f, a, b)[1](g))(a, b)
        check(of_a, g, b.T, mode)
        check(of_b, a.T, g, mode)
        u = jax.jit(lambda u: jax.jvp(lambda b: f(a, b), (b,), (u,))[1])(np.flip(b))
        check(u, a, np.flip(b), mode)
# What varies over devices meets what does not, in one body, and its gradient is summed over them. All are integers
# of at most 2^11, those that are rounded of at most 2^5, so that no mode makes an error.
p, q = (jax.numpy.asarray(rng.integers(-1, 2, s).astype(np.float32)) for s in ((64, 32), (32, 48)))
inside = jax.shard_map(lambda p, q: mm(mm(p, q), q.T), mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
found = jax.jit(jax.grad(lambda q: inside(p, q).sum()))(q)
x, y, one = np.asarray(p, int), np.asarray(q, int), np.ones((64, 32), int)
assert (np.asarray(found) == x.T @ (one @ y) + ((x @ y).T @ one).T).all()
"""

EXPLICIT = """
mesh, mode = meshes[AxisType.Explicit], "fp16x3"
jax.set_mesh(mesh)
f = jax.jit(lambda a, b: lowprec.matmul(a, b, math_mode=mode))
for split, (sa, sb) in SPLITS.items():
    x, y = put(mesh, a, sa), put(mesh, b, sb)
    if split == "k":  # as jax.numpy.matmul
        try:
            f(x, y)
        except Exception as error:
            assert "ambiguous" in str(error)
        else:
            raise SystemExit("accepted")
        continue
    found = f(x, y)
    check(found, a, b, mode)
    assert jax.typeof(found).sharding.spec == jax.typeof(jax.numpy.matmul(x, y)).sharding.spec
    other = put(mesh, g, jax.typeof(found).sharding.spec)
    of_a, of_b = jax.jit(lambda a, b, g: jax.vjp(f, a, b)[1](g))(x, y, other)
    check(of_a, g, b.T, mode)
    check(of_b, a.T, g, mode)
    assert jax.typeof(of_a).sharding.spec == jax.typeof(x).sharding.spec
    assert jax.typeof(of_b).sharding.spec == jax.typeof(y).sharding.spec
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(PARTITIONED, id="jit"),
        pytest.param(MANUAL, id="shard_map", marks=pytest.mark.sweep),
        pytest.param(EXPLICIT, id="explicit", marks=pytest.mark.sweep),
    ],
)
def test_arrays_spread_over_four_devices(program):
    run_python(
        SHARDED + program, warn="error", XLA_FLAGS="--xla_force_host_platform_device_count=4"
    )


def test_the_first_product_in_a_scope_is_in_its_mode_and_an_older_jax_is_refused():
    """``lowprec.jax`` is imported in the middle of the first trace, which must not be used again."""
    code = """
import jax, numpy as np, lowprec
traces = []
@jax.jit
def f(x):
    traces.append(1)
    return lowprec.matmul(x, x)
x = np.array([[1 + 2.0**-9 + 2.0**-12]], np.float32)
BF16, FP32 = 1.0, float(np.float32(float(x[0, 0]) ** 2))
version, jax.__version_info__ = jax.__version_info__, (0, 10, 0)
try:
    f(x)
except lowprec.UnsupportedError as error:
    assert "too old" in str(error)
else:
    raise SystemExit("an older JAX was accepted")
assert (lowprec.matmul(jax.numpy.ones((2, 2)), np.ones((2, 2), np.float32)) == 2).all()
jax.__version_info__ = version
traces.clear()
for _ in range(2):
    with lowprec.math_mode("bf16"):
        assert float(f(x)[0, 0]) == BF16
    assert float(f(x)[0, 0]) == FP32
assert len(traces) <= 3
"""
    run_python(code, warn="error")
