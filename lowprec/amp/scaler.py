"""The loss scaler: a factor on the loss keeps small gradients within float16's range."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowprec.amp.casting import scaled_loss
from lowprec.amp.containers import mapped
from lowprec.amp.rules import ScalerStateError, ScaleRule, check_count, check_entries, check_scale
from lowprec.amp.unscaling import unscale
from lowprec.errors import SettingError, quoted


@dataclass
class _Optimizer:
    """An optimizer whose gradients were unscaled since the last update."""

    flags: list[Any]
    has_stepped: bool = False
    found_inf: bool | None = None  # None until it is read, which waits for the devices of the flags


class LossScaler:
    """Scale a loss so that gradients fit float16, and skip steps that overflow.

    Arguments, defaults, arithmetic and state dictionaries are those of PyTorch's ``GradScaler``, except that its scale
    can fall to 0. Arrays may be of any library, in nested lists, tuples and dicts. A scaler is for one thread.

    Parameters
    ----------
    init_scale : float
        A positive number, rounded to float32.
    growth_factor, backoff_factor, growth_interval, dynamic, min_scale, max_scale
        As for :class:`ScaleRule`. With ``dynamic=False``, too, steps with Inf or NaN are skipped. The state dictionary
        does not include ``min_scale`` and ``max_scale``.
    enabled : bool
        If False, ``scale`` and ``unscale`` return their argument, and ``step`` always steps.
    reduce : callable, optional
        For training in several processes: receives whether this process found Inf or NaN, and returns whether any did.
        Called once per optimizer and update.

    Raises
    ------
    SettingError
        A number is out of its range.

    Examples
    --------
    >>> import numpy as np
    >>> scaler = LossScaler(init_scale=1024.0)
    >>> weight = np.array([1.0, 2.0], np.float32)
    >>> scaled = weight * scaler.scale(np.float32(0.25))  # in place of a backward pass
    >>> grads = scaler.unscale({"w": scaled})
    >>> scaler.step(lambda: weight - grads["w"])
    array([0.75, 1.5 ], dtype=float32)
    >>> scaler.update()
    >>> scaler.state_dict()["_growth_tracker"]
    1
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        dynamic: bool = True,
        min_scale: float | None = None,
        max_scale: float | None = None,
        reduce: Callable[[bool], bool] | None = None,
    ) -> None:
        self._rule = ScaleRule(
            growth_factor, backoff_factor, growth_interval, min_scale, max_scale, dynamic
        )
        if reduce is not None and not callable(reduce):
            raise SettingError(f"reduce must be a function of one bool, got {quoted(reduce)}")
        self._enabled = bool(enabled)
        self._reduce = reduce
        self._scale = self._rule.limited(check_scale("init_scale", init_scale))
        self._tracker = 0
        self._optimizers: dict[Hashable, _Optimizer] = {}

    def __repr__(self) -> str:
        if not self._enabled:
            return "LossScaler(enabled=False)"
        kind = "dynamic" if self._rule.dynamic else "static"
        return f"LossScaler(scale={self._scale:g}, {kind}, growth_tracker={self._tracker})"

    def get_scale(self) -> float:
        """Return the scale; 1 if the scaler is disabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        return self._enabled

    @property
    def rule(self) -> ScaleRule:
        return self._rule

    @property
    def found_inf(self) -> bool:
        """Whether gradients since the last update have Inf or NaN; waits for the GPU."""
        return any(map(self._decide, self._optimizers.values()))

    def scale(self, loss: Any) -> Any:
        """Return the loss, or a container of losses, multiplied by the scale.

        Parameters
        ----------
        loss : array, number or container of arrays
            The type is kept, with one rounding for 16-bit numbers. As in PyTorch, a 16-bit scalar loss becomes
            float32, so that it does not overflow.

        Raises
        ------
        ArrayError
            A leaf is neither an array nor a number.
        """
        if not self._enabled:
            return loss
        return mapped(self._scaled, loss, numbers=True)

    def _scaled(self, x: Any) -> Any:
        if isinstance(x, int | float):  # so is NumPy's float64
            return x * self._scale
        return scaled_loss(x, self._scale)

    def unscale(self, grads: Any, *, out: Any = None, optimizer: Hashable = None) -> Any:
        """Return gradients divided by the scale, and check them for Inf and NaN.

        Parameters
        ----------
        grads : container of arrays
            float32, float64 or bfloat16; None for a missing gradient. For PyTorch's sparse tensors (COO) the values are
            divided, as by ``GradScaler``.
        out : container of arrays, optional
            Receives the results; ``grads`` itself for in-place division. An array that occurs twice (the gradient of
            tied weights) is divided once; other overlaps are not detected. An interrupt can leave it half done.
        optimizer : hashable, optional
            Name of the optimizer of these gradients, where there are several.

        Returns
        -------
        container of arrays
            ``out`` if given.

        Raises
        ------
        ScalerStateError
            This optimizer's gradients were unscaled, or it stepped, since the last update.
        GradientTypeError
            A gradient is float16.
        DTypeError, ShapeError, ArrayError
            A gradient has another type, does not match ``out`` or is traced by JAX, or there are no gradients.
        """
        if not self._enabled:
            return grads
        state = self._optimizers.get(optimizer)
        if state is not None:
            text = f"the gradients{_of(optimizer)} are unscaled already; call update() after each iteration, and "
            text += "accumulate gradients before unscale()"
            if state.has_stepped:
                text = f"unscale() after step(){_of(optimizer)}; call it before step(), and update() after that"
            raise ScalerStateError(text)
        results, flags = unscale(grads, self._scale, out)
        self._optimizers[optimizer] = _Optimizer(flags)
        return results

    def step(
        self, fn: Callable[..., Any], *args: Any, optimizer: Hashable = None, **kwargs: Any
    ) -> Any:
        """Call a function if all gradients were finite; return its result, or None.

        The only call in which the program waits for a GPU.

        Parameters
        ----------
        fn : callable
            Updates the weights.
        *args, **kwargs
            Its arguments.
        optimizer : hashable, optional
            As in :meth:`unscale`.

        Raises
        ------
        ScalerStateError
            The gradients were not unscaled, or this optimizer stepped since the last update.
        """
        if not self._enabled:
            return fn(*args, **kwargs)
        state = self._optimizers.get(optimizer)
        if state is None:
            raise ScalerStateError(
                f"step(){_of(optimizer)} before unscale(); call unscale(grads) first, and use its result"
            )
        if state.has_stepped:
            raise ScalerStateError(
                f"step(){_of(optimizer)} was called since the last update(); call update() once at the end of each "
                "iteration"
            )
        result = None
        if not self._decide(state):
            result = fn(*args, **kwargs)
        state.has_stepped = True
        return result

    def update(self, new_scale: float | None = None) -> None:
        """Reduce the scale after Inf or NaN; increase it after many steps without.

        Parameters
        ----------
        new_scale : float, optional
            The new scale, instead of that of the rule.

        Raises
        ------
        ScalerStateError
            No gradients were unscaled since the last update.
        SettingError
            ``new_scale`` is not a positive number.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            scale = self._rule.limited(check_scale("new_scale", new_scale))
            self._scale, self._optimizers = scale, {}
        elif not self._optimizers:
            raise ScalerStateError(
                "update() before any gradients were unscaled; call unscale(grads) and step(fn) in each iteration"
            )
        else:
            scale, tracker = self._rule.next(self._scale, self._tracker, self.found_inf)
            # One statement, so that no signal handler runs between the assignments.
            self._scale, self._tracker, self._optimizers = scale, tracker, {}

    def _decide(self, state: _Optimizer) -> bool:
        if state.found_inf is None:
            found_inf = any(map(bool, state.flags))
            if self._reduce is not None:
                found_inf = bool(self._reduce(found_inf))
            state.found_inf = found_inf
        return state.found_inf

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of PyTorch's ``GradScaler``; empty if disabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._rule.growth_factor,
            "backoff_factor": self._rule.backoff_factor,
            "growth_interval": self._rule.growth_interval,
            "_growth_tracker": self._tracker,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this class or of PyTorch's ``GradScaler``.

        Raises
        ------
        SettingError
            An entry is missing (a disabled scaler has an empty state) or illegal.
        """
        if not self._enabled:
            return
        remedy = "save it with state_dict() of an enabled scaler"
        check_entries("the state dictionary", state_dict, self.state_dict(), remedy)
        names = ("growth_factor", "backoff_factor", "growth_interval")
        rule = replace(self._rule, **{name: state_dict[name] for name in names})
        tracker = check_count("_growth_tracker", state_dict["_growth_tracker"], 0)
        scale = rule.limited(check_scale("scale", state_dict["scale"], zero=True))
        self._rule, self._scale, self._tracker = rule, scale, tracker


def _of(optimizer: Hashable) -> str:
    if optimizer is None:
        return ""
    return f" of optimizer {quoted(optimizer)}"
