"""``intercept``: the products of an unmodified JAX program in a mode, by a lowering rule of ``dot_general``.

The rule reads a value that is part of JAX's key for compiled functions: functions that were compiled outside are
compiled again inside, and are used again outside.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.interpreters import mlir

from lowprec import policy
from lowprec.core.interception import Interception
from lowprec.core.interception_report import LedgerRow, PassedBy
from lowprec.formats import dtype_from_name
from lowprec.jax import current_mode  # noqa: F401 - the guard and other scopes become part of JAX's key
from lowprec.jax.lowering import multiply
from lowprec.modes import ModeLike, parse_mode, row


class intercept(Interception):
    """Compute the products of JAX's own functions in a mode, in a block.

    All routes are seen that end in ``lax.dot_general``: ``@``, ``jnp.matmul``, ``einsum``, ``lax.dot``, their
    gradients, and products under ``jit``, ``vmap`` and ``scan``. XLA computes them as in :func:`lowprec.jax.matmul`.
    Convolutions, products of other element types and those with a ``precision=`` of their own, as in JAX's solvers, are
    XLA's; :meth:`report` names them.

    The block applies to this thread. A switch of JAX's default precision inside it is the program's choice. The report
    counts products when they are compiled: those of functions that an earlier block of the mode has compiled are in
    that block's report.

    Parameters
    ----------
    math_mode : str, MathMode or Recipe
        Mode of the products; an ``fp32_guard`` overrides it.

    Raises
    ------
    ModeError
        The mode is unknown.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> x = jnp.full((5, 5), 1 + 2.0**-9, "float32")
    >>> with intercept("bf16") as seen:
    ...     float((x @ x)[0, 0])
    5.0
    >>> {p.operator for p in seen.report().taken}
    {'dot_general'}
    """

    def __init__(self, math_mode: ModeLike) -> None:
        super().__init__(parse_mode(math_mode))

    def _key(self) -> Any:
        return self.rules[0][1].value, _default_precision(jax.config.jax_default_matmul_precision)

    def _install(self) -> None:
        _register(lax.dot_general_p, _lower_product)
        _register(lax.conv_general_dilated_p, _lower_other)

    def _opened(self) -> None:
        """Put the innermost mode of this thread, or the mode of the process, into JAX's key."""
        block = self._innermost()
        if block is None:
            _outside.__exit__(None, None, None)
            return
        if block is self._of_process:
            _context.set_global(block.key)
        _context(block.key).__enter__()

    def _remarks(self) -> list[str]:
        text = (
            "Counts are of compiled products, not of their executions; equal products of a graph count once, and those "
            "that an earlier block of this mode has compiled are not counted again. Not seen are functions that were "
            "exported or compiled ahead of time outside, and Python callbacks such as jax.pure_callback."
        )
        return [text]


_FLOATS = ("float32", "complex64", "float64", "complex128", "float16", "bfloat16")
#: Precisions of products that choose none, in addition to JAX's default when the block began.
_NO_CHOICE = (None, (lax.Precision.DEFAULT, lax.Precision.DEFAULT), lax.DotAlgorithmPreset.DEFAULT)
#: The key of the block.
_context = jax.make_user_context(None)
#: Its exit clears the value of the current thread.
_outside = _context(None)
_outside.__enter__()
_outside.__exit__(None, None, None)


class _LoweringThread(threading.local):
    is_busy = False  # while a product's own operations are lowered


_thread = _LoweringThread()


@functools.cache
def _register(primitive: Any, rule: Callable[..., Any]) -> None:
    """Put a rule in front of JAX's for each platform, once per process; outside of scopes it calls these."""
    tables = {None: mlir._lowerings, **mlir._platform_specific_lowerings}
    for platform, rules in tables.items():
        if primitive in rules:
            own = rules[primitive].rule
            mlir.register_lowering(primitive, functools.partial(rule, own, platform), platform=platform)


def _lower_product(own: Callable[..., Any], platform: str | None, ctx: Any, a: Any, b: Any, **params: Any) -> Any:
    if _thread.is_busy or _context.value is None:
        return own(ctx, a, b, **params)
    asked, default = _context.value
    mode = policy.resolve(asked).mode
    kinds = [aval.dtype for aval in (*ctx.avals_in, ctx.avals_out[0])]
    name = np.dtype(kinds[0]).name
    acts = len(set(kinds)) == 1 and name in _FLOATS and row(mode).acts(dtype_from_name(name))
    if policy.is_guarded():  # which sets JAX's default
        default = _default_precision(jax.config.jax_default_matmul_precision)
    if not acts or params["precision"] not in (*_NO_CHOICE, default):
        reason = PassedBy.PRECISION if acts else PassedBy.ELEMENT_TYPE
        _count(ctx, "dot_general", "", reason)
        return own(ctx, a, b, **params)
    _count(ctx, "dot_general", mode.value, None)
    compute = functools.partial(
        multiply, dimensions=params["dimension_numbers"], out_sharding=params.get("out_sharding"), mode=mode.value,
        out_dtype=name, on_gpu=platform in ("cuda", "rocm"),
    )  # fmt: skip
    _thread.is_busy = True
    try:
        return mlir.lower_fun(compute, multiple_results=False)(ctx, a, b)
    finally:
        _thread.is_busy = False


@functools.lru_cache
def _default_precision(_: Any) -> Any:
    """Return the precision of products that choose none, which depends on JAX's switch, the argument."""
    (equation,) = jax.make_jaxpr(lax.dot)(*[jax.ShapeDtypeStruct((1, 1), np.float32)] * 2).eqns
    return equation.params["precision"]


def _lower_other(own: Callable[..., Any], platform: str | None, ctx: Any, *operands: Any, **params: Any) -> Any:
    if _context.value and not _thread.is_busy:
        _count(ctx, "conv_general_dilated", "", PassedBy.CONVOLUTION)
    return own(ctx, *operands, **params)


def _count(ctx: Any, operator: str, mode: str, reason: PassedBy | None) -> None:
    shapes = tuple(tuple(aval.shape) for aval in ctx.avals_in[:2])
    found = LedgerRow("", operator, ctx.avals_in[0].dtype.name, False, mode, reason)
    if (block := intercept._innermost()) is not None:
        block.scope.ledger.add(found, 0, lambda: shapes)
