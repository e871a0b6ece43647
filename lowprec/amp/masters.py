"""float32 master weights, and the 16-bit copies that a network computes with.

Source: P. Micikevicius et al., "Mixed precision training", arXiv 1710.03740, section 3.1: an update below half a unit
in the last place of a weight is lost where the weight has 11 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from lowprec.amp.casting import cast_float, is_float
from lowprec.amp.containers import is_module, mapped, norms_of
from lowprec.amp.policy import Policy, as_policy
from lowprec.amp.rules import check_entries
from lowprec.amp.scaler import LossScaler
from lowprec.arrays.namespaces import array_module, cast, dtype_name, shape_of
from lowprec.errors import ShapeError


class MasterWeights:
    """Weights in float32 for the optimizer, and their copies for the network.

    Parameters
    ----------
    params : container of arrays or torch.nn.Module
        Arrays of any library, which are copied; float64 and non-float arrays keep their types. For a module: its
        parameters by name, of which the types of its submodules determine the normalizations.
    policy : Policy or {"O0", "O1", "O2", "O3"}
        Determines the types of the copies: ``params``, and float32 for normalizations with ``norms_float32``.

    Raises
    ------
    ArrayError
        A leaf of the container is not an array.

    Examples
    --------
    >>> import numpy as np
    >>> weights = MasterWeights({"w": np.ones(2, np.float32)}, "O2")
    >>> def descent(masters, grads):
    ...     return {name: w - 1e-4 * grads[name] for name, w in masters.items()}
    >>> for _ in range(4):
    ...     copies = weights.update(descent, {"w": np.ones(2, np.float16)})
    >>> copies["w"].dtype, bool(copies["w"][0] < 1)  # four updates, each too small for float16
    (dtype('float16'), True)
    """

    def __init__(self, params: Any, policy: Policy | str = "O2") -> None:
        self._policy = as_policy(policy)
        self._norms = None
        if is_module(params):
            self._norms = norms_of(params)
            params = dict(params.named_parameters())
        # One tuple, so that after an interrupt masters and copies are of the same step.
        self._weights = self._with_copies(mapped(_copied, params))

    def _with_copies(self, masters: Any) -> tuple[Any, Any]:
        return masters, self._policy._cast_params(masters, self._norms)

    @property
    def masters(self) -> Any:
        """The float32 weights."""
        return self._weights[0]

    @property
    def params(self) -> Any:
        """The copies; where their type is the masters', the masters themselves."""
        return self._weights[1]

    @property
    def policy(self) -> Policy:
        return self._policy

    @staticmethod
    def widened(grads: Any) -> Any:
        """Return gradients of the copies in float32; float64 gradients are unchanged."""
        return mapped(lambda x: cast_float(x, "float32"), grads)

    def update(self, rule: Callable[..., Any], grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Update the masters by a rule, and return the new copies.

        Parameters
        ----------
        rule : callable
            ``rule(masters, grads, *args, **kwargs)`` returns new masters, or updates them in place and returns None.
        grads : container of arrays
            Unscaled; passed to the rule in float32.
        *args, **kwargs
            Passed to the rule.

        Raises
        ------
        ShapeError
            The rule returned another structure or other shapes; the weights are unchanged.
        """
        masters = rule(self.masters, self.widened(grads), *args, **kwargs)
        if masters is None:
            masters = self.masters
        else:
            mapped(_check, self.masters, masters)
            masters = mapped(lambda old, new: cast(new, dtype_name(old)), self.masters, masters)
        self._weights = self._with_copies(masters)
        return self.params

    def state_dict(self, scaler: LossScaler | None = None) -> dict[str, Any]:
        """Return a checkpoint: masters (copied), policy (a dict) and a scaler's state."""
        state = {"masters": mapped(_copied, self.masters), "policy": asdict(self._policy)}
        if scaler is not None:
            state["scaler"] = scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], scaler: LossScaler | None = None) -> None:
        """Restore a checkpoint; a scaler's state is loaded into ``scaler``.

        Raises
        ------
        SettingError
            The checkpoint lacks an entry, or the scaler's entry is illegal.
        ShapeError
            Its masters have another structure or other shapes; nothing is changed.
        """
        wanted = ["masters", "policy"]
        if scaler is not None:
            wanted.append("scaler")
        remedy = "save it with state_dict(), which takes the scaler"
        check_entries("the checkpoint", state, wanted, remedy)
        policy = as_policy(state["policy"])
        mapped(_check, self.masters, state["masters"])
        masters = mapped(_copied, state["masters"])
        if scaler is not None:
            scaler.load_state_dict(state["scaler"])
        self._policy = policy
        self._weights = self._with_copies(masters)


def _copied(x: Any) -> Any:
    if is_float(x, wide=False) and dtype_name(x) != "float32":
        return cast(x, "float32")
    if hasattr(x, "detach"):
        return x.detach().clone()
    if hasattr(x, "copy"):
        return x.copy()
    return array_module(x).asarray(x, copy=True)


def _check(old: Any, new: Any) -> None:
    if shape_of(old) != shape_of(new):
        raise ShapeError(f"a weight of shape {shape_of(old)} cannot become one of {shape_of(new)}")
