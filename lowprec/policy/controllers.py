"""Registry of controllers: the libraries whose switches ``fp32_guard`` and ``math_mode(frameworks=True)`` set."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from lowprec.policy.frameworks import jax, torch
from lowprec.policy.frameworks.switch_functions import CUPY, PADDLE, TENSORFLOW
from lowprec.policy.protocol import Controller, attempt

_MEMBERS = tuple(sorted(name for name in vars(Controller) if not name.startswith("_")))

_by_name: dict[str, Controller] = {}
#: Modules of all controllers ever registered. If none is loaded, a block sets no switches.
known_modules: set[str] = set()


def register_controller(controller: Controller) -> None:
    """Register a library whose switches ``fp32_guard`` and ``math_mode`` set.

    It takes effect at the next entry of a guard, for the whole process. A controller of the same name is replaced;
    open blocks keep the old one.

    Parameters
    ----------
    controller : object
        Object with attributes ``name``, ``module``, ``tier``, ``switches`` and ``modes``, and methods ``save``,
        ``set_mode``, ``restore`` and ``describe``; see :class:`~lowprec.policy.protocol.Controller`.

    Raises
    ------
    TypeError
        An attribute or method is missing.

    Examples
    --------
    >>> import lowprec
    >>> class Solver:
    ...     name, module, tier, allow_tf32 = "solver", "numpy", "process", True
    ...     switches, modes = {"allow_tf32": "products"}, (lowprec.MathMode.FP32,)
    ...     def save(self):
    ...         return {"allow_tf32": self.allow_tf32}
    ...     def set_mode(self, mode):
    ...         self.allow_tf32 = False
    ...         return self.save()
    ...     def restore(self, saved):
    ...         self.allow_tf32 = saved["allow_tf32"]
    ...     describe = save
    >>> solver = Solver()
    >>> lowprec.register_controller(solver)
    >>> with lowprec.fp32_guard():
    ...     solver.allow_tf32
    False
    >>> solver.allow_tf32
    True
    """
    lacks = [name for name in _MEMBERS if not hasattr(controller, name)]
    if lacks:
        kind = type(controller).__name__
        raise TypeError(
            f"a controller needs {', '.join(_MEMBERS)}; {kind} lacks {', '.join(lacks)}"
        )
    known_modules.add(controller.module)
    _by_name[controller.name] = controller


def controllers() -> tuple[Controller, ...]:
    """Return all controllers in the order of registration."""
    return tuple(_by_name.values())


def loaded_controllers(names: frozenset[str] | None = None) -> list[Controller]:
    """Return the controllers of loaded libraries, of these names or (None) all."""
    loaded = [c for c in controllers() if sys.modules.get(c.module) is not None]
    return [c for c in loaded if names is None or c.name in names]


def switch_rows() -> Iterator[dict[str, Any]]:
    """Yield every switch of every loaded library, as in ``info()``, without changing any.

    ``switch`` is None if the library's switches cannot be read.
    """
    for controller in loaded_controllers():
        values, error = attempt(controller, controller.describe)
        for switch, value in ({None: None} if values is None else values).items():
            is_plain = value is None or isinstance(value, str | bool | int)
            yield {
                "library": controller.name,
                "switch": switch,
                "value": value if is_plain else str(value),
                "tier": controller.tier,
                "problem": error,
            }


for _builtin in (torch, jax, TENSORFLOW, CUPY, PADDLE):
    register_controller(_builtin)
