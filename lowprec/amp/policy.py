"""Policies: element types of a network's weights, products and results, and lists of functions by type.

Sources: NVIDIA apex's optimization levels O0 to O3 and its lists of functions (``apex.amp``); DeepMind's jmp (the three
types of a policy and their string form); PyTorch's autocast (float64 is not cast; operands of different types get the
widest).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lowprec.amp.arguments import by_list, cast_float
from lowprec.amp.containers import is_module, leaves, mapped, norms_by_name, norms_of, paths
from lowprec.amp.rules import SettingError, check_scale
from lowprec.amp.scaler import LossScaler
from lowprec.errors import quoted, warn
from lowprec.policy.variables import AMP_LISTS

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
_WORDS = {"true": True, "false": False}

#: jmp's names of a policy's entries and of element types.
_KEYS = {"p": "params", "c": "compute", "o": "output"}
_TYPES = {
    "full": "float32", "f32": "float32", "half": "float16", "f16": "float16", "bf16": "bfloat16",
}  # fmt: skip


def _list_table(moves: tuple[tuple[str, str], ...]) -> dict[str, str]:
    table = {name: which for which in LISTS for name in DEFAULT_LISTS[which].split()}
    for which in LISTS:
        for name in AMP_LISTS[which, "REMOVE"].current() or ():
            if table.get(name) == which:
                del table[name]
    for which in LISTS:
        table.update(dict.fromkeys(AMP_LISTS[which, "ADD"].current() or (), which))
    for name, which in moves:
        if which == "none":
            table.pop(name, None)
        else:
            table[name] = which
    return table


@dataclass(frozen=True)
class Policy:
    """The types of a mixed-precision program, a value with a text form.

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
    EnvironmentVariableError
        A variable ``LOWPREC_AMP_...`` contains anything but names of functions.

    Examples
    --------
    >>> policy = Policy(compute="bfloat16")
    >>> str(policy)
    'params=float32,compute=bfloat16,output=float32'
    >>> Policy.parse(str(policy)) == policy
    True
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
    _lists: dict[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, legal in (("params", _STORAGE), ("compute", _COMPUTE), ("output", _STORAGE)):
            if getattr(self, name) not in legal:
                raise SettingError(f"{name} must be one of {', '.join(legal)}, got {quoted(getattr(self, name))}")
        for name in ("functions", "norms_float32", "masters"):
            if not isinstance(getattr(self, name), bool):
                raise SettingError(f"{name} must be True or False, got {quoted(getattr(self, name))}")
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
        object.__setattr__(self, "_lists", _list_table(self.moves))

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
            Parameters of the class; one that contradicts another gives a warning.

        Raises
        ------
        SettingError
            The level, a property or a value is unknown.

        Examples
        --------
        >>> str(Policy.preset("O2"))
        'params=float16,compute=float16,output=float32,functions=false,norms_float32=true,masters=true'
        """
        own = {f.name for f in fields(cls) if f.init}
        unknown = sorted(overrides.keys() - own)
        if unknown:
            raise SettingError(f"a policy has no {', '.join(unknown)}; it has {', '.join(sorted(own))}")
        policy = cls(**{**_level(level, half), **overrides})
        for remark in _contradictions(policy, overrides):
            warn(f"{level}: {remark}")
        return policy

    def __str__(self) -> str:
        plain = Policy(self.params, self.compute, self.output)
        parts = [f"params={self.params}", f"compute={self.compute}", f"output={self.output}"]
        for name in ("functions", "norms_float32", "masters", "loss_scale"):
            value = getattr(self, name)
            if value != getattr(plain, name):
                word = str(value).lower() if isinstance(value, bool) else value
                parts.append(f"{name}={word}")
        for which in (*LISTS, "none"):
            names = [name for name, to in self.moves if to == which]
            parts += [f"{which}={'+'.join(names)}"] if names else []
        return ",".join(parts)

    @classmethod
    def parse(cls, text: str | Policy) -> Policy:
        """Return the policy of a text: a level, ``name=value`` pairs, or both.

        A policy is returned unchanged. ``deny=gelu+relu`` moves functions to a list, ``none=`` removes them from all.
        Texts of jmp (``"half"``, ``"c=f16"``) keep its meaning: ``c`` defaults to ``p``, ``o`` to ``c``, and functions
        cast if ``c`` differs from ``p``.

        Raises
        ------
        SettingError
            ``text`` is not a str, or a part of it is neither a level nor a pair.

        Examples
        --------
        >>> Policy.parse("O1,compute=bfloat16,deny=tanh").list_of("tanh")
        'deny'
        >>> str(Policy.parse("p=f32,c=bf16,o=f32"))
        'params=float32,compute=bfloat16,output=float32'
        """
        if isinstance(text, cls):
            return text
        if not isinstance(text, str):
            raise SettingError(f"policy must be a Policy or its text, got {quoted(text)}")
        level, *rest = (part.strip() for part in text.split(","))
        if "=" in level:
            level, rest = "", [level, *rest]
        elif _TYPES.get(level, level) in _STORAGE:
            level, rest = "", [f"p={level}", *rest]
        values: dict[str, Any] = {}
        moves: dict[str, str] = {}
        is_jmps = False
        for part in rest:
            name, equals, value = (x.strip() for x in part.partition("="))
            is_jmps |= name in _KEYS
            name = _KEYS.get(name, name)
            if name in (*LISTS, "none") and equals:
                moves.update(dict.fromkeys(value.split("+"), name))
            elif equals and name in {f.name for f in fields(cls) if f.init} - {"moves"}:
                values[name] = _value(name, value)
            else:
                raise SettingError(f"{quoted(part)} is not an item of a policy; write name=value")
        if moves:
            values["moves"] = tuple(moves.items())
        if is_jmps and not level:
            compute = values.setdefault("compute", values.setdefault("params", "float32"))
            values.setdefault("output", compute if compute in _STORAGE else "float32")
            values.setdefault("functions", compute != values.get("params", "float32"))
        if values and not level:
            return cls(**values)
        half = values.get("compute", "float16")
        return cls.preset(level, half=half if half != "float32" else "float16", **values)

    def list_of(self, name: str) -> str | None:
        """Return a function's list: ``"allow"``, ``"deny"``, ``"infer"`` or None."""
        return self._lists.get(name)

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
            found = by_list(self.compute, which, args, kwargs)
            with found.scope():
                return fn(*found.args, **found.kwargs)

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
            params, model = params.state_dict(), params
        return self._cast_params(params, None if model is None else norms_of(model))

    def _cast_params(self, params: Any, norms: frozenset[str] | None) -> Any:
        all_names = [".".join(path) for path in paths(params)]
        norms = norms_by_name(all_names) if norms is None else norms
        following = iter(all_names)

        def one(x: Any) -> Any:
            is_norm = next(following) in norms and self.norms_float32
            return cast_float(x, "float32" if is_norm else self.params)

        leaves(params)  # raises for leaves that are no arrays before the first cast
        return mapped(one, params)

    def cast_inputs(self, inputs: Any) -> Any:
        """Return the inputs in ``params``; unchanged if functions cast them."""
        if self.functions:
            return inputs
        return mapped(lambda x: cast_float(x, self.params), inputs)

    def cast_output(self, output: Any) -> Any:
        """Return the network's results in ``output``."""
        return mapped(lambda x: cast_float(x, self.output), output)

    def scaler(self, **keywords: Any) -> LossScaler:
        """Return a loss scaler for ``loss_scale``; ``keywords`` are passed to it."""
        if self.loss_scale == "dynamic":
            return LossScaler(**keywords)
        return LossScaler(**{"init_scale": self.loss_scale, "dynamic": False, **keywords})


def _check_list(which: Any, *more: str) -> None:
    if which not in (*LISTS, *more):
        raise SettingError(f"the list must be one of {', '.join((*LISTS, *more))}, got {quoted(which)}")


def _value(name: str, text: str) -> Any:
    if name in ("functions", "norms_float32", "masters"):
        if text.lower() not in _WORDS:
            raise SettingError(f"{name} must be true or false, got {quoted(text)}")
        return _WORDS[text.lower()]
    if name == "loss_scale" and text != "dynamic":
        return check_scale("loss_scale", text)
    return _TYPES.get(text, text)


def _level(level: str, half: str) -> dict[str, Any]:
    halves = ("float16", "bfloat16", "tf32") if level == "O1" else ("float16", "bfloat16")
    if half not in halves:
        raise SettingError(f"half must be one of {', '.join(halves)} at {level}, got {quoted(half)}")
    levels: dict[str, dict[str, Any]] = {
        "O0": {"compute": "float32", "functions": False},
        "O1": {"compute": half},
        "O2": {
            "params": half, "compute": half, "functions": False, "norms_float32": True, "masters": True,
        },
        "O3": {
            "params": half, "compute": half, "output": half, "functions": False, "loss_scale": 1.0,
        },
    }  # fmt: skip
    if level not in tuple(levels):  # also for unhashable values
        raise SettingError(f"the level must be one of {', '.join(levels)}, got {quoted(level)}")
    return levels[level]


def _contradictions(policy: Policy, overrides: Mapping[str, Any]) -> list[str]:
    """Return the reasons why chosen properties have no effect or do harm."""
    is_wide = policy.params == "float32"
    checks = {
        "masters": policy.masters and is_wide and "masters=True has no effect: the weights are float32 themselves",
        "norms_float32": policy.norms_float32 and is_wide
        and "norms_float32=True has no effect: all weights are float32",
        "functions": policy.functions and (
            (policy.compute == "float32" and "functions=True has no effect: the functions compute in float32 anyway")
            or (not is_wide and "functions=True casts operands of a 16-bit model a second time")
        ),
        "loss_scale": (
            (policy.loss_scale == "dynamic" and policy.compute != "float16"
             and f"a dynamic loss scale is of no use: {policy.compute} has float32's exponents")
            or (policy.loss_scale == 1.0 and policy.compute == "float16"
                and "loss_scale=1 with float16 loses gradients below 6e-8")
        ),
        "params": not is_wide and not policy.masters
        and f"weights in {policy.params} without masters lose updates below "
        f"{'1/4096' if policy.params == 'float16' else '1/512'} of a weight",
    }  # fmt: skip
    if "masters" in overrides:
        checks["masters"] = checks["masters"] or checks["params"]
    return list(dict.fromkeys(x for name, x in checks.items() if name in overrides and x))
