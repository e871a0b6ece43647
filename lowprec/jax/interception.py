"""``intercept``: the products of an unmodified JAX program in a mode, by lowering rules of JAX's two primitives.

The rule reads a value that is part of JAX's key for compiled functions: functions that were compiled outside are
compiled again inside, and are used again outside.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from itertools import groupby
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.interpreters import mlir

from lowprec import policy
from lowprec.core.interception import Interception
from lowprec.core.interception_report import PassedBy
from lowprec.core.ledger import LedgerRow
from lowprec.core.recording import Kind, Recorder
from lowprec.core.rules import Layer, Rules, RulesLike, first_match, names
from lowprec.formats import dtype_from_name
from lowprec.jax import current_mode  # noqa: F401 - the guard and other scopes become part of JAX's key
from lowprec.jax.convolutions import convolve
from lowprec.jax.lowering import axes_of, multiply
from lowprec.jax.observing import Observer
from lowprec.modes import MathMode, Mode, row
from lowprec.util.per_thread import PerThread


class intercept(Interception):
    """Compute the products of JAX's own functions in a mode, in a block.

    All routes are seen that end in ``lax.dot_general`` or ``lax.conv_general_dilated``: ``@``, ``jnp.matmul``,
    ``einsum``, ``lax.dot``, convolutions, their gradients, and products under ``jit``, ``vmap`` and ``scan``. XLA
    computes them as in :func:`lowprec.jax.matmul`. Products of other element types, those with a ``precision=`` of
    their own, as in JAX's solvers, and convolutions on GPUs are XLA's; :meth:`report` names them.

    The block applies to this thread. A switch of JAX's default precision inside it is the program's choice. The report
    counts products when they are compiled: those of functions that an earlier block of the mode has compiled are in
    that block's report.

    Parameters
    ----------
    math_mode : str, MathMode, Recipe, mapping, list of pairs, or path
        Mode of the products, or rules as of :class:`lowprec.torch.intercept`. The layer of a product is the path of its
        functions under ``jit`` and its ``jax.named_scope`` blocks, such as ``"step.mlp.head"``; a pattern matches the
        path, or is one of its parts. An ``fp32_guard`` overrides the modes.
    statistics : bool
        Whether to measure some vectors of the operands of the 1st, 2nd, 4th, 8th... execution of a product, and the
        errors of all executions; see :class:`OperandStatistics`. Functions are compiled again.

    Raises
    ------
    ModeError
        A mode or a pattern is illegal.

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

    def __init__(self, math_mode: RulesLike, *, statistics: bool = False) -> None:
        recorder = Recorder(MathMode.FP64) if statistics else None
        super().__init__(math_mode, statistics)
        self.recorder = recorder
        self._observer: Observer | None = None

    def _key(self) -> Any:
        self.settle()
        if self.recorder is not None:
            self._observer = Observer(True, self.recorder.reference, self.alone)
        elif self.alone is not None:
            self._observer = Observer(False, None, self.alone)
        return (
            self.rules,
            _default_precision(jax.config.jax_default_matmul_precision),
            self._observer,
        )

    def settle(self) -> None:
        if self._observer is not None and self.recorder is not None:
            self._observer.settle(self.recorder)

    def _place_of(self, kind: Kind) -> str:
        return kind.layer.rpartition(", ")[0]

    def _install(self) -> None:
        _register(lax.dot_general_p, _lower_product)
        _register(lax.conv_general_dilated_p, _lower_convolution)
        for primitive in list(mlir._lowerings):
            if primitive.name in _CALLS:
                _register(primitive, _lower_call)

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
            "Counts are of compiled products, not of their executions; those that an earlier block of these rules has "
            "compiled are not counted again. Not seen are functions that were exported or compiled ahead of time "
            "outside, and Python callbacks such as jax.pure_callback."
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


#: Primitives that lower functions of their own. Each call is lowered for itself, with the names of its callers.
_CALLS = frozenset(["jit", "scan", "while", "cond", "remat2", "custom_jvp_call"])
#: Names of these, and the transforms around a name.
_STRUCTURE = re.compile(
    r"while/(?:body|cond)|checkpoint|rematted_computation|closed_call|[\w.]*\(|\)"
)


#: Whether a product's own operations are lowered; names around the function that is lowered, and JAX's names at its
#: call, which it may have, too.
_thread = PerThread(is_busy=False, callers=("", ""))


@functools.cache
def _register(primitive: Any, rule: Callable[..., Any]) -> None:
    """Put a rule in front of JAX's for each platform, once per process; outside of scopes it calls these."""
    tables = {None: mlir._lowerings, **mlir._platform_specific_lowerings}
    for platform, rules in tables.items():
        if primitive in rules:
            own = rules[primitive].rule
            # JAX would share the lowering of equal products of different layers.
            front = functools.partial(rule, own, platform)
            mlir.register_lowering(primitive, front, platform=platform, cacheable=False)


def _lower_product(
    own: Callable[..., Any], platform: str | None, ctx: Any, a: Any, b: Any, **params: Any
) -> Any:
    dimensions = params["dimension_numbers"]
    inner = prod(ctx.avals_in[0].shape[axis] for axis in dimensions[0][0])
    sharding = params.get("out_sharding")
    compute = functools.partial(multiply, dimensions=dimensions, out_sharding=sharding)
    return _lower(_mode_of_product, compute, inner, own, platform, ctx, a, b, params)


def _lower_convolution(
    own: Callable[..., Any], platform: str | None, ctx: Any, x: Any, weight: Any, **params: Any
) -> Any:
    _, channels, *kernel = params["dimension_numbers"].rhs_spec
    inner = prod(ctx.avals_in[1].shape[axis] for axis in (channels, *kernel))
    compute = functools.partial(convolve, params=params)
    return _lower(_mode_of_convolution, compute, inner, own, platform, ctx, x, weight, params)


def _lower(
    choose: Callable[..., tuple[Mode | None, PassedBy | None]],
    function: Callable[..., Any],
    inner: int,
    own: Callable[..., Any],
    platform: str | None,
    ctx: Any,
    a: Any,
    b: Any,
    params: dict[str, Any],
) -> Any:
    """Lower a product by a function in the mode that ``choose`` returns, or by JAX's own rule if it returns a reason.

    ``inner`` is the number of products in an element of the result.
    """
    if _thread.is_busy or _context.value is None:
        return own(ctx, a, b, **params)
    rules, default, observer = _context.value
    layer = ""
    if observer is not None:
        layer = observer.layer(ctx, _name_of(ctx), _is_gradient(ctx))
        rules = observer.rules_of(layer, rules)
    on_gpu = platform in ("cuda", "rocm")
    mode, reason = choose(ctx, rules, default, params, on_gpu)
    name = mode.value if mode is not None else ""
    _count(ctx, name, reason)
    records = observer is not None and observer.records
    if mode is None and not records:
        return own(ctx, a, b, **params)
    compute = functools.partial(ctx.primitive.bind, **params)
    again = None
    if mode is not None:
        out_dtype = ctx.avals_out[0].dtype.name
        compute = functools.partial(function, mode=name, out_dtype=out_dtype, on_gpu=on_gpu)
    if records:
        reference = observer.reference
        if mode is not None and reference and policy.resolve(reference).mode != mode:
            again = functools.partial(compute, mode=policy.resolve(reference).mode.value)
        compute = observer.observed(ctx, layer, name, params, inner, compute, again)
    return _lowered(compute, ctx, a, b)


def _lowered(compute: Callable[..., Any], ctx: Any, a: Any, b: Any) -> Any:
    """Lower the operations of a product by JAX's own rules."""
    _thread.is_busy = True
    try:
        return mlir.lower_fun(compute, multiple_results=False)(ctx, a, b)
    finally:
        _thread.is_busy = False


def _mode_of_product(
    ctx: Any, rules: Rules, default: Any, params: Any, on_gpu: bool
) -> tuple[Mode | None, PassedBy | None]:
    """Return the mode of a product by the rules, or the reason why it is XLA's."""
    free = [
        [aval.shape[axis] for axis in axes_of(aval, params["dimension_numbers"], number).free]
        for number, aval in enumerate(ctx.avals_in)
    ]
    routine = "dot" if prod(map(prod, free)) == 1 else "dot_general"
    asked = first_match(rules, _layer_of(ctx), routine)
    if asked is None:
        return None, PassedBy.VECTORS if routine == "dot" else PassedBy.LAYER
    if row(asked).quantizes and not all(free) and not names(rules, routine):
        asked = MathMode.BF16
    return _mode_of(ctx, asked, default, params["precision"])


def _mode_of_convolution(
    ctx: Any, rules: Rules, default: Any, params: Any, on_gpu: bool
) -> tuple[Mode | None, PassedBy | None]:
    if on_gpu:
        return None, PassedBy.CONVOLUTION
    asked = first_match(rules, _layer_of(ctx), ctx.primitive.name)
    if asked is None:
        return None, PassedBy.LAYER
    return _mode_of(ctx, asked, default, params["precision"])


def _mode_of(
    ctx: Any, asked: Any, default: Any, precision: Any
) -> tuple[Mode | None, PassedBy | None]:
    """Return the mode in force where the rules ask for one, or the reason why XLA computes."""
    mode = policy.resolve(asked).mode
    x, y = ctx.avals_in
    out = ctx.avals_out[0].dtype
    name = np.dtype(x.dtype).name
    is_sum = out == x.dtype or (x.dtype.itemsize == 2 and out == np.float32)
    if x.dtype != y.dtype or not is_sum or name not in _FLOATS:
        return None, PassedBy.ELEMENT_TYPE
    if not row(mode).acts(dtype_from_name(name)):
        return None, PassedBy.ELEMENT_TYPE
    if policy.is_guarded():  # which sets JAX's default
        default = _default_precision(jax.config.jax_default_matmul_precision)
    if precision not in (*_NO_CHOICE, default):
        return None, PassedBy.PRECISION
    return mode, None


def _layer_of(ctx: Any) -> Layer:
    """Return the path of a product's functions and scopes, with each of its parts as a class."""
    found = _STRUCTURE.sub("", "/".join(_names_of(ctx))).split("/")
    parts = [part for part, _ in groupby(filter(None, found))]
    path = ".".join(parts)
    return tuple((path, part) for part in parts)


def _name_of(ctx: Any) -> str:
    layer = _layer_of(ctx)
    return layer[0][0] if layer else ""


def _is_gradient(ctx: Any) -> bool:
    return any("transpose(" in name for name in _names_of(ctx))


def _names_of(ctx: Any) -> tuple[str, str]:
    """Return the names around the function that is lowered, and JAX's own."""
    outer, at_call = _thread.callers
    own = str(ctx.name_stack)
    if not own.startswith(at_call):
        outer = f"{outer}/{at_call}"
    return outer, own


def _lower_call(
    own: Callable[..., Any], platform: str | None, ctx: Any, *operands: Any, **params: Any
) -> Any:
    """Lower the call of a function under its name, for each of its callers if there are several rules."""
    if _context.value is None or _thread.is_busy:
        return own(ctx, *operands, **params)
    before = _thread.callers
    callers = _names_of(ctx)
    if ctx.primitive.name == "jit":
        path = "/".join((*callers, params["name"]))
        callers = (path, "")
        if len(_context.value[0]) > 1:
            params["name"] = path.strip("/").replace("/", ".")
    _thread.callers = callers
    try:
        return own(ctx, *operands, **params)
    finally:
        _thread.callers = before


@functools.lru_cache
def _default_precision(_: Any) -> Any:
    """Return the precision of products that choose none, which depends on JAX's switch, the argument."""
    (equation,) = jax.make_jaxpr(lax.dot)(*[jax.ShapeDtypeStruct((1, 1), np.float32)] * 2).eqns
    return equation.params["precision"]


def _count(ctx: Any, mode: str, reason: PassedBy | None) -> None:
    shapes = tuple(tuple(aval.shape) for aval in ctx.avals_in[:2])
    name = _name_of(ctx)
    dtype = ctx.avals_in[0].dtype.name
    found = LedgerRow(name, ctx.primitive.name, dtype, _is_gradient(ctx), mode, reason)
    if (block := intercept._innermost()) is not None:
        block.scope.ledger.add(found, 0, lambda: shapes)
