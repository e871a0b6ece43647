"""Setting and restoring other libraries' switches across threads, tasks, nested blocks and exceptions.

Each controller has a stack of layers, per thread where the switches are per thread. A layer contains the values
saved before a block set the switches, and the open blocks that use it. A new block joins the top layer if the switches
still have that layer's values; otherwise it adds a layer. The top layer is removed when its last block has ended. So
blocks may end in any order, and the user's values are restored exactly once. Switches are read and set under the lock.

The lock is re-entrant: a finalizer may enter or leave blocks while its thread changes switches. A layer is therefore on
its stack and in use while its values are saved, set and restored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import partial
from threading import get_ident
from typing import Any

from lowprec.modes import Mode
from lowprec.policy.protocol import Controller, attempt
from lowprec.util.lock import lock

#: The reason for which a block does not set switches that a guard has set.
FLOOR = "an open fp32_guard keeps it at full FP32"


class Hold:
    """The switches that one open block has set: the layers that it uses."""

    __slots__ = ("failures", "layers", "thread")

    def __init__(self) -> None:
        self.layers: dict[str, _Layer] = {}  # by library
        self.failures: dict[str, str] = {}  # by library: the reason why its switches were not set
        self.thread = get_ident()  # the thread that entered the block


class _Layer:
    """The values of switches before and after a block set them, and the holds of the blocks that use them."""

    def __init__(
        self, controller: Controller, mode: Mode, is_floor: bool, stack: list[_Layer]
    ) -> None:
        self.controller = controller
        self.mode = mode
        self.is_floor = is_floor
        self.stack = stack
        self.saved: Mapping[str, Any] | None = None  # the values before
        # the values as set; None if setting them failed
        self.inside: Mapping[str, Any] | None = None
        self.holds: set[Hold] = set()

    def restore(self) -> list[str]:
        """Restore the switches, and return a sentence about those that the user has changed."""
        controller = self.controller
        saved = self.saved
        inside = self.inside
        changed: dict[str, Any] = {}
        if saved is None:
            return []
        if inside is not None:
            # Switches that appeared or disappeared inside the block are ignored.
            now = {name: value for name, value in controller.save().items() if name in saved}
            changed = {name: value for name, value in now.items() if value != inside.get(name)}
        # After an exception of a signal handler, the next block restores the same values.
        self.saved = {**saved, **changed}
        self.inside = None
        controller.restore(self.saved)
        if changed:
            return [changed_switches(controller.name, changed, "inside the block")]
        return []


def changed_switches(library: str, values: Mapping[str, Any], where: str) -> str:
    """Return a sentence about switches that the user has changed."""
    texts = [f"{name} = {value!r}" for name, value in values.items()]
    was, now = ("was", "is") if len(values) == 1 else ("were", "are")
    return f"{library}: {', '.join(texts)} {was} set {where}, and {now} kept"


#: Marks a layer in restoration: a finalizer that runs meanwhile restores no other layer.
_RESTORING = Hold()

Stacks = dict[Controller, list[_Layer]]


_process_stacks: Stacks = {}
#: The stacks of each thread are its attribute ``stacks``.
_thread = threading.local()


def acquire(
    hold: Hold, controllers: Iterable[Controller], mode: Mode, is_floor: bool = False
) -> None:
    """Set the switches of these loaded libraries for a mode until ``hold`` is released.

    ``is_floor`` marks a guard: while it is open, no other block lowers the precision. After an exception, which only a
    signal handler raises, ``hold`` must be released.
    """
    with lock:
        for controller in controllers:
            reason, error = attempt(controller, partial(_join, hold, controller, mode, is_floor))
            if error is not None:
                reason = error
                layer = hold.layers.get(controller.name)
                if layer is not None:
                    layer.holds.discard(hold)
                    _restore_unused(layer.stack)
                    del hold.layers[controller.name]
            if reason is not None:
                hold.failures[controller.name] = reason


def _join(hold: Hold, controller: Controller, mode: Mode, is_floor: bool) -> str | None:
    """Add a hold to a layer of this library's switches, or return the reason against it."""
    stacks = _process_stacks
    if controller.tier == "thread":
        stacks = vars(_thread).setdefault("stacks", {})
    stack = stacks.setdefault(controller, [])
    _restore_unused(stack)  # layers of blocks that another thread left
    if not is_floor and [layer for layer in stack if layer.is_floor and layer.holds]:
        return FLOOR
    if mode not in controller.modes:
        return f"{controller.name} has no switch for {mode}"
    top = stack[-1] if stack else None
    layer = hold.layers[controller.name] = _Layer(controller, mode, is_floor, stack)
    layer.holds.add(hold)
    stack.append(layer)
    values = controller.save()
    if top is not None and top.mode is mode and top.is_floor is is_floor and top.inside == values:
        top.holds.add(hold)
        hold.layers[controller.name] = top
        stack.remove(layer)
    else:
        layer.saved = values
        layer.inside = controller.set_mode(mode)
    return None


def release(hold: Hold) -> list[str]:
    """Remove a hold from its layers and restore the switches; return sentences about problems."""
    remarks: list[str] = []
    with lock:
        for name, layer in hold.layers.items():
            for other in layer.stack:  # after an exception in `_join` the hold may be in two
                other.holds.discard(hold)
            if layer.controller.tier == "thread" and hold.thread != get_ident():
                remarks.append(
                    f"{name}'s switch belongs to the thread in which the block was entered; it keeps the block's value "
                    "there until the next block begins there"
                )
            else:
                remarks += _restore_unused(layer.stack)
    return remarks


def _restore_unused(stack: list[_Layer]) -> list[str]:
    """Remove the layers without holds from the top of a stack, and restore the values saved in them."""
    remarks: list[str] = []
    while stack and not stack[-1].holds:
        layer = stack[-1]
        try:
            layer.holds.add(_RESTORING)
            sentences, error = attempt(layer.controller, layer.restore)
        finally:
            layer.holds.discard(_RESTORING)
        if error is not None:
            sentences = [f"the switches of {layer.controller.name} could not be restored: {error}"]
        remarks += sentences or []
        stack.remove(layer)
    return remarks
