"""What PyTorch does to a function, and whether lowprec's product follows: rows of a test and of a table."""

from collections.abc import Callable
from typing import Any, NamedTuple

Function = Callable[[Any], Any]

#: The table's columns: ``lowprec.matmul`` called as it is, in ``torch.compile``, and ``torch.matmul`` in ``intercept``.
COLUMNS = ("as it is", "compiled", "intercepted")

#: How messages of refusals begin, and what the table says of them.
NO_TANGENT = "a forward-mode derivative of lowprec's product inside a graph or a mode"
NESTED = "nested forward-mode derivatives"
DOUBLE = "torch.compile with aot_autograd does not currently support double backward"
UNTRACED = "marked as skipped"
REFUSALS = {
    NO_TANGENT: "refused[^tangent]",
    NESTED: "refused[^nested]",
    DOUBLE: "refused by PyTorch",
    UNTRACED: "refused by PyTorch",
}


class Row(NamedTuple):
    """A transformation.

    Parameters
    ----------
    name : str
        As it is written in PyTorch.
    inside : callable
        From PyTorch and a function of a matrix to a function of one, which is compiled as a whole.
    around : callable, optional
        The same, of what was compiled.
    refused : dict of str to str
        By column: part of the message. Everywhere else the result is that of ``torch.matmul``.
    """

    name: str
    inside: Callable[[Any, Function], Function]
    around: Callable[[Any, Function], Function] = lambda torch, f: f
    refused: dict[str, str] = {}  # noqa: RUF012 - never written

    def make(self, torch, f, compiled=lambda f: f):
        """Return the function, transformed and perhaps compiled."""
        return self.around(torch, compiled(self.inside(torch, f)))


def _recorded(torch, f):
    def backward(x):
        leaf = x.detach().clone().requires_grad_()
        return torch.autograd.grad(f(leaf), leaf)[0]

    return backward


def _recorded_twice(torch, f):
    def backward(x):
        leaf = x.detach().clone().requires_grad_()
        (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
        return torch.autograd.grad(first.sum(), leaf)[0]

    return backward


def _checkpointed(torch, f):
    from torch.utils.checkpoint import checkpoint

    return lambda x: checkpoint(f, x, use_reentrant=False)


def _as_it_is(torch, f):
    return f


def _jvp(torch, f):
    return lambda x: torch.func.jvp(f, (x,), (x.sin(),))[1]


def _jvp_of_jvp(torch, f):
    return _jvp(torch, _jvp(torch, f))


def _linearized(torch, f):
    return lambda x: torch.func.linearize(f, x)[1](x.cos())


ROWS = (
    Row("forward", _as_it_is),
    Row("backward", _as_it_is, _recorded),
    Row("backward of backward", _as_it_is, _recorded_twice, {"compiled": DOUBLE}),
    Row("utils.checkpoint", _checkpointed, _recorded),
    Row("func.grad", lambda t, f: t.func.grad(f)),
    Row("func.grad of grad", lambda t, f: t.func.grad(lambda x: t.func.grad(f)(x).sum())),
    Row("func.vjp", lambda t, f: lambda x: t.func.vjp(f, x)[1](t.ones((), dtype=x.dtype))[0]),
    Row("func.jacrev", lambda t, f: t.func.jacrev(f)),
    Row("func.jvp", _jvp, refused={"compiled": NO_TANGENT}),
    Row("func.jacfwd", lambda t, f: t.func.jacfwd(f), refused={"compiled": NO_TANGENT}),
    Row("func.hessian", lambda t, f: t.func.hessian(f), refused={"compiled": NO_TANGENT}),
    Row("func.jvp of jvp", _jvp_of_jvp, refused={"as it is": NESTED, "compiled": NO_TANGENT}),
    Row("func.linearize", _linearized, refused={"as it is": NO_TANGENT, "compiled": UNTRACED}),
    Row("vmap", lambda t, f: lambda x: t.vmap(f)(t.stack([x, 2 * x]))),
    Row("vmap of grad", lambda t, f: lambda x: t.vmap(t.func.grad(f))(t.stack([x, 2 * x]))),
    Row("jacrev of vmap", lambda t, f: lambda x: t.func.jacrev(t.vmap(f))(t.stack([x, 2 * x]))),
    Row("func.functionalize", lambda t, f: t.func.functionalize(f), refused={"compiled": UNTRACED}),
)  # fmt: skip


def cubic(multiply):
    """Return a function of a matrix with two products, one of the other's result."""
    return lambda x: (multiply(multiply(x, x), x.sin()) * x).sum()
