"""Policies: element types of a network's weights, products and results, and lists of functions by type.

Sources: NVIDIA apex's optimization levels O0 to O3 and its lists of functions (``apex.amp``); DeepMind's jmp (the three
types of a policy); PyTorch's autocast (float64 is not cast; operands of different types get the widest).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowprec.amp.casting import by_list, cast_float
from lowprec.amp.containers import is_module, leaves, mapped, norms_by_name, norms_of, paths
from lowprec.amp.rules import check_scale
from lowprec.amp.scaler import LossScaler
from lowprec.errors import SettingError, quoted

LISTS = ("allow", "deny", "infer")

#: Products; functions that lose most in 16 bits; functions that use the widest type of their operands. Names are those
#: of the Array API, of its ``linalg``, and of functions that networks define.
DEFAULT_LISTS = {
    "allow": "matmul tensordot vecdot einsum linear conv conv1d conv2d conv3d attention",
    "deny": (
        "exp expm1 log log1p log2 log10 logaddexp pow reciprocal sqrt rsqrt tan sinh cosh acos asin acosh asinh atanh "
        "sum prod mean std var cumulative_sum cumulative_prod vector_norm matrix_norm norm softmax log_softmax "
        "logsumexp layer_norm batch_norm group_norm cross_entropy mse_loss l1_loss nll_loss kl_div dist"
    ),
    "infer": (
        "add subtract multiply divide floor_divide remainder maximum minimum hypot atan2 copysign nextafter where "
        "concat stack equal not_equal less less_equal greater greater_equal clip"
    ),
}

_STORAGE = ("float32", "bfloat16", "float16")
_COMPUTE = ("float32", "tf32", "bfloat16", "float16")
_TYPES = {"params": _STORAGE, "compute": _COMPUTE, "output": _STORAGE}

#: The list of each function.
_TABLE = {name: which for which in LISTS for name in DEFAULT_LISTS[which].split()}

#: The levels of apex; ``half`` is the narrow type.
_LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"compute": "float32", "functions": False},
    "O1": {"compute": "half"},
    "O2": {
        "params": "half",
        "compute": "half",
        "functions": False,
        "norms_float32": True,
        "masters": True,
    },
    "O3": {
        "params": "half",
        "compute": "half",
        "output": "half",
        "functions": False,
        "loss_scale": 1.0,
    },
}


@dataclass(frozen=True)
class Policy:
    """The types of a mixed-precision program.

    Where a policy is expected, the name of a level (see :meth:`preset`) and ``dataclasses.asdict`` of a policy are
    accepted, too.

    Parameters
    ----------
    params : {"float32", "bfloat16", "float16"}
        Type of the weights that the network computes with.
    compute : {"float32", "tf32", "bfloat16", "float16"}
        Type of the functions on the allow list; ``"tf32"`` is float32 in that math mode.
    output : {"float32", "bfloat16", "float16"}
        Type of the network's results.
    functions : bool
        Whether each function casts its operands, by the lists.
    norms_float32 : bool
        Whether weights and statistics of normalizations (see :meth:`cast_params`) stay float32.
    masters : bool
        Whether an optimizer should keep float32 weights in addition to those in ``params``.
    loss_scale : float or "dynamic", optional
        By default ``"dynamic"`` for ``compute="float16"``, and 1 for the other types, which have float32's exponents.
    moves : tuple of (str, str)
        Names of functions, each with its new list: ``"allow"``, ``"deny"``, ``"infer"`` or ``"none"``.

    Raises
    ------
    SettingError
        A value is illegal.

    Examples
    --------
    >>> policy = Policy(compute="bfloat16")
    >>> policy.list_of("matmul"), policy.list_of("exp"), policy.list_of("add"), policy.list_of("reshape")
    ('allow', 'deny', 'infer', None)
    """

    params: str = "float32"
    compute: str = "float16"
    output: str = "float32"
    functions: bool = True
    norms_float32: bool = False
    masters: bool = False
    loss_scale: float | str | None = None
    moves: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, legal in _TYPES.items():
            value = getattr(self, name)
            if value not in legal:
                raise SettingError(f"{name} must be one of {', '.join(legal)}, got {quoted(value)}")
        for name in ("functions", "norms_float32", "masters"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise SettingError(f"{name} must be True or False, got {quoted(value)}")
        scale = self.loss_scale
        if scale is None:
            scale = "dynamic" if self.compute == "float16" else 1.0
        if scale != "dynamic":
            scale = check_scale('loss_scale, if it is not "dynamic",', scale)
        try:
            moves = dict(self.moves)
        except (TypeError, ValueError):
            raise SettingError(
                f"moves must be pairs of a function's name and a list, got {quoted(self.moves)}"
            ) from None
        for name, which in moves.items():
            _check_list(which, "none")
            if not (isinstance(name, str) and name.isidentifier()):
                raise SettingError(f"{quoted(name)} is not the name of a function")
        object.__setattr__(self, "loss_scale", scale)
        object.__setattr__(self, "moves", tuple(sorted(moves.items())))

    @classmethod
    def preset(cls, level: str, *, half: str = "float16", **overrides: Any) -> Policy:
        """Return the policy of one of apex's levels, with ``overrides``.

        Parameters
        ----------
        level : {"O0", "O1", "O2", "O3"}
            O0: float32. O1: functions cast by the lists. O2: a 16-bit model, float32 norms and masters. O3: all 16-bit.
        half : {"float16", "bfloat16", "tf32"}
            The narrow type; ``"tf32"`` only for O1.
        **overrides
            Parameters of the class.

        Raises
        ------
        SettingError
            The level or a value is unknown.

        Examples
        --------
        >>> Policy.preset("O2").params, Policy.preset("O2", half="bfloat16", masters=False).params
        ('float16', 'bfloat16')
        """
        if level not in tuple(_LEVELS):  # a tuple, so that unhashable values are compared
            raise SettingError(
                f"policy must be a Policy or one of {', '.join(_LEVELS)}, got {quoted(level)}"
            )
        values = {
            name: half if value == "half" else value for name, value in _LEVELS[level].items()
        }
        return cls(**{**values, **overrides})

    def list_of(self, name: str) -> str | None:
        """Return a function's list: ``"allow"``, ``"deny"``, ``"infer"`` or None."""
        which = dict(self.moves).get(name) or _TABLE.get(name)
        if which == "none":
            return None
        return which

    def moved(self, which: str, *names: str) -> Policy:
        """Return a policy with functions moved to a list, or to ``"none"``.

        Raises SettingError for another list or an illegal name.

        Examples
        --------
        >>> Policy.preset("O1").moved("deny", "matmul").list_of("matmul")
        'deny'
        """
        _check_list(which, "none")
        moves = {**dict(self.moves), **dict.fromkeys(names, which)}
        return replace(self, moves=tuple(moves.items()))

    def register(self, fn: Any, which: str | None = None) -> Any:
        """Return a function that casts its operands by a list, or a decorator.

        Parameters
        ----------
        fn : callable or str
            The function; or the list, to return a decorator.
        which : {"allow", "deny", "infer"}
            The list, as by apex's ``half_function``, ``float_function`` and ``promote_function``.

        Raises
        ------
        SettingError
            The list is unknown, or ``fn`` is not callable.

        Examples
        --------
        >>> import numpy as np
        >>> @Policy(compute="float16").register("allow")
        ... def gate(x, y):
        ...     return x * y
        >>> gate(np.ones(2, np.float32), np.ones(2, np.float32)).dtype
        dtype('float16')
        """
        if which is None:
            _check_list(fn)
            return functools.partial(self.register, which=fn)
        _check_list(which)
        if not callable(fn):
            raise SettingError(f"register takes a function and a list, got {quoted(fn)}")

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs, _, scope = by_list(self.compute, which, args, kwargs)
            with scope:
                return fn(*args, **kwargs)

        return call

    def cast_params(self, params: Any, model: Any = None) -> Any:
        """Return weights in ``params``, those of normalizations by ``norms_float32``.

        Parameters
        ----------
        params : container of arrays or torch.nn.Module
            For a module, its state dictionary is cast and returned; the module is unchanged.
        model : torch.nn.Module, optional
            The module of these weights. Normalizations are its submodules of classes named "...Norm" ("...Norm1d" and
            so on) or derived from one. Without ``model`` they are the weights whose names have a word that is "bn" or
            ends with "norm" (``LayerNorm_0``), and those next to running statistics.

        Returns
        -------
        container of arrays
            As ``params``; a dict for a module.

        Raises
        ------
        ArrayError
            A leaf of the container is not an array, or ``model`` is not a module.
        """
        if is_module(params):
            model = params
            params = model.state_dict()
        norms = None if model is None else norms_of(model)
        return self._cast_params(params, norms)

    def _cast_params(self, params: Any, norms: frozenset[str] | None) -> Any:
        all_names = [".".join(path) for path in paths(params)]
        if norms is None:
            norms = norms_by_name(all_names)
        following = iter(all_names)

        def one(x: Any) -> Any:
            is_norm = next(following) in norms
            if is_norm and self.norms_float32:
                return cast_float(x, "float32")
            return cast_float(x, self.params)

        leaves(params)  # raises for leaves that are no arrays before the first cast
        return mapped(one, params)

    def cast_inputs(self, inputs: Any) -> Any:
        """Return the inputs in ``params``; unchanged if functions cast them."""
        if self.functions:
            return inputs
        return mapped(lambda x: cast_float(x, self.params), inputs)

    def cast_output(self, output: Any) -> Any:
        return mapped(lambda x: cast_float(x, self.output), output)

    def scaler(self, **keywords: Any) -> LossScaler:
        """Return a loss scaler for ``loss_scale``; ``keywords`` are passed to it."""
        if self.loss_scale == "dynamic":
            return LossScaler(**keywords)
        return LossScaler(**{"init_scale": self.loss_scale, "dynamic": False, **keywords})


def _check_list(which: Any, *more: str) -> None:
    legal = (*LISTS, *more)
    if which not in legal:
        raise SettingError(f"the list must be one of {', '.join(legal)}, got {quoted(which)}")


def as_policy(policy: Policy | str | Mapping[str, Any]) -> Policy:
    """Return a policy, the policy of a level, or that of saved fields."""
    if isinstance(policy, Mapping):
        return Policy(**policy)
    if isinstance(policy, Policy):
        return policy
    return Policy.preset(policy)
