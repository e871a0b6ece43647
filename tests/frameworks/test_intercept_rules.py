"""Rules of interceptions: vectors and solvers keep their precision, in every library, unless a rule names them."""

import pytest

import lowprec

pytestmark = pytest.mark.usefixtures("torch")

SOLVERS = {
    "lstsq": lambda t, a, b: t.linalg.lstsq(a, b).solution,
    "solve": lambda t, a, b: t.linalg.solve(a, b),
    "pinv": lambda t, a, b: t.linalg.pinv(a[:, :5]),
    "inv": lambda t, a, b: t.linalg.inv(a),
    "svdvals": lambda t, a, b: t.linalg.svdvals(a),
    "eigvalsh": lambda t, a, b: t.linalg.eigvalsh(a),
    "qr": lambda t, a, b: t.linalg.qr(a)[1],
    "lu": lambda t, a, b: t.linalg.lu(a)[1],
    "lowprec.linalg.inv": lambda t, a, b: lowprec.linalg.inv(a),
    "lowprec.linalg.eigvalsh": lambda t, a, b: lowprec.linalg.eigvalsh(a),
    "cholesky": lambda t, a, b: t.linalg.cholesky_ex(a + 8 * t.eye(8))[0],
}


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_and_their_gradients_keep_their_precision(torch, lt, name):
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(8, n, generator=draw, requires_grad=True) for n in (8, 3))

    def run():
        x = SOLVERS[name](torch, a, b)
        return [x.detach(), *torch.autograd.grad(x.square().sum(), a)]

    plain = run()
    with lt.intercept("bf16") as seen:
        found = run()
    for x, y in zip(found, plain, strict=True):
        # The bits of LAPACK depend on the alignment of memory; rounding to bfloat16 changes 2^-9 and more.
        assert float((x - y).norm()) <= 2.0**-14 * float(y.norm())
    report = seen.report()
    assert not report.taken
    assert {p.reason for p in report.passed} == {"a solver or a factorisation, not a product"}
    with lt.intercept({"lapack": "bf16"}) as seen:
        run()
    backward = [p for p in report.passed if p.backward and p.operator in ("mm", "bmm", "addmm")]
    assert bool(backward) <= bool(seen.report().taken)
    assert {p.mode for p in seen.report().taken} <= {"bf16"}
