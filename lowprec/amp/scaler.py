"""The loss scaler: small gradients kept above float16's smallest number by a factor on the loss."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from lowprec.amp.arguments import scaled_loss
from lowprec.amp.containers import mapped
from lowprec.amp.rules import ScalerStateError, ScaleRule, SettingError, check_count, check_entries, check_scale
from lowprec.amp.unscaling import unscale
from lowprec.errors import quoted


class _Stage(Enum):
    READY = auto()
    UNSCALED = auto()
    STEPPED = auto()


class _Optimizer:
    def __init__(self) -> None:
        self.stage = _Stage.READY
        self.flags: list[Any] = []
        #: Once it was asked for, which waits for the devices of the flags.
        self.found_inf: bool | None = None


class LossScaler:
    """Scale a loss so that gradients fit float16, and skip steps that overflow.

    Arguments, defaults, arithmetic and state dictionaries are those of PyTorch's ``GradScaler``, whose scale may fall
    to 0; arrays may be of any library, in nested lists, tuples and dicts. One scaler belongs to one thread.

    Parameters
    ----------
    init_scale : float
        A positive number; it is rounded to float32.
    growth_factor, backoff_factor, growth_interval, dynamic, min_scale, max_scale
        As :class:`ScaleRule` takes them. With ``dynamic=False`` steps with Inf or NaN are skipped nevertheless. Floor
        and cap are no part of the state dictionary.
    enabled : bool
        With False, ``scale`` and ``unscale`` return their argument, and ``step`` always steps.
    reduce : callable, optional
        For training in several processes: takes whether this process found Inf or NaN, returns whether any did. It is
        called once for each optimizer and update.

    Raises
    ------
    SettingError
        If a number is out of its range.

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
        self._rule = ScaleRule(growth_factor, backoff_factor, growth_interval, min_scale, max_scale, dynamic)
        if reduce is not None and not callable(reduce):
            raise SettingError(f"reduce is a function of one bool, got {quoted(reduce)}")
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
        """Return the scale; 1 if the scaler is not enabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether the scaler does anything."""
        return self._enabled

    @property
    def rule(self) -> ScaleRule:
        """How the scale changes."""
        return self._rule

    @property
    def found_inf(self) -> bool:
        """Whether gradients since the last update held Inf or NaN; synchronizes."""
        return any(map(self._decide, self._optimizers.values()))

    def scale(self, loss: Any) -> Any:
        """Return the loss, or a container of losses, multiplied by the scale.

        Parameters
        ----------
        loss : array, number or container of arrays
            Elements keep their type, and a product with a 16-bit number is rounded once; as in PyTorch, a 16-bit loss
            of no dimensions becomes float32, whose range includes numbers beyond float16's.
        """
        if not self._enabled:
            return loss
        return mapped(self._scaled, loss, numbers=True)

    def _scaled(self, x: Any) -> Any:
        if isinstance(x, int | float):  # float64 of NumPy's is one, too
            return x * self._scale
        return scaled_loss(x, self._scale)

    def unscale(self, grads: Any, *, out: Any = None, optimizer: Hashable = None) -> Any:
        """Return gradients divided by the scale, checked for Inf and NaN on the way.

        Parameters
        ----------
        grads : container of arrays
            float32, float64 or bfloat16; None for a missing gradient. Of PyTorch's sparse tensors
            (COO) the values are divided, as ``GradScaler`` does.
        out : container of arrays, optional
            Receives the results: ``grads`` itself for a division in place. A duplicate, such as the gradient of tied
            weights does, is divided once; other overlaps are not looked for. An exception from outside (a signal
            handler's) can leave it half done.
        optimizer : hashable, optional
            Which optimizer the gradients belong to, where there are several: any name.

        Returns
        -------
        container of arrays
            ``out`` where that is given.

        Raises
        ------
        ScalerStateError
            If this optimizer's gradients were unscaled, or it stepped, since the last update.
        GradientTypeError
            If gradients are float16.
        DTypeError, ShapeError, ArrayError
            If gradients are of another type, do not fit to ``out``, are traced by JAX, or there is none.
        """
        if not self._enabled:
            return grads
        state = self._optimizers.get(optimizer) or _Optimizer()
        if state.stage is _Stage.UNSCALED:
            raise ScalerStateError(
                f"the gradients{_of(optimizer)} are unscaled already; call update() after each iteration, and "
                "accumulate gradients before unscale()"
            )
        if state.stage is _Stage.STEPPED:
            raise ScalerStateError(
                f"unscale() after step(){_of(optimizer)}; call it before step(), and update() after that"
            )
        results, state.flags = unscale(grads, self._scale, out)
        state.stage = _Stage.UNSCALED
        self._optimizers[optimizer] = state
        return results

    def step(self, fn: Callable[..., Any], *args: Any, optimizer: Hashable = None, **kwargs: Any) -> Any:
        """Call a function if all gradients were finite; return its result, or None.

        This is where the program waits for a GPU, once.

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
            If the gradients were not unscaled, or this optimizer stepped since the last update.
        """
        if not self._enabled:
            return fn(*args, **kwargs)
        state = self._optimizers.get(optimizer)
        if state is None:
            raise ScalerStateError(
                f"step(){_of(optimizer)} before unscale(); call unscale(grads) first, and use its result"
            )
        if state.stage is _Stage.STEPPED:
            raise ScalerStateError(
                f"step(){_of(optimizer)} was called since the last update(); call update() once at the end of each "
                "iteration"
            )
        result = None if self._decide(state) else fn(*args, **kwargs)
        state.stage = _Stage.STEPPED
        return result

    def update(self, new_scale: float | None = None) -> None:
        """Change the scale: smaller after Inf or NaN, larger after many steps without.

        Parameters
        ----------
        new_scale : float, optional
            Set the scale to this instead.

        Raises
        ------
        ScalerStateError
            If no gradients were unscaled since the last update.
        SettingError
            If ``new_scale`` is no positive number.
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
            # One statement, between whose assignments no signal handler runs.
            self._scale, self._tracker, self._optimizers = scale, tracker, {}

    def _decide(self, state: _Optimizer) -> bool:
        if state.found_inf is None:
            found = any(map(bool, state.flags))
            state.found_inf = found if self._reduce is None else bool(self._reduce(found))
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
        """Take over a state, this class's or that of PyTorch's ``GradScaler``.

        Raises
        ------
        SettingError
            If it lacks an entry, as the empty one of a scaler that was not enabled, or holds an illegal value.
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
    return "" if optimizer is None else f" of optimizer {quoted(optimizer)}"
