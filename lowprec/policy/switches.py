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
from lowprec.policy.entries import Entry
from lowprec.policy.protocol import Controller, attempt
from lowprec.util.lock import lock

#: The reason for which a block does not set switches that a guard has set.
FLOOR = "an open fp32_guard keeps it at full FP32"


class _Layer:
    """The values of switches before and after a block set them, and the blocks that use them."""

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
        self.blocks: set[Entry] = set()

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
_RESTORING = Entry()

Stacks = dict[Controller, list[_Layer]]


_process_stacks: Stacks = {}
#: The stacks of each thread are its attribute ``stacks``.
_thread = threading.local()


def acquire(
    block: Entry, controllers: Iterable[Controller], mode: Mode, is_floor: bool = False
) -> None:
    """Set the switches of these loaded libraries for a mode until ``block`` is released.

    ``is_floor`` marks a guard: while it is open, no other block lowers the precision. After an exception, which only a
    signal handler raises, ``block`` must be released.
    """
    block.layers = {}
    block.failures = {}
    block.thread = get_ident()
    with lock:
        for controller in controllers:
            reason, error = attempt(controller, partial(_join, block, controller, mode, is_floor))
            if error is not None:
                reason = error
                layer = block.layers.get(controller.name)
                if layer is not None:
                    layer.blocks.discard(block)
                    _restore_unused(layer.stack)
                    del block.layers[controller.name]
            if reason is not None:
                block.failures[controller.name] = reason


def _join(block: Entry, controller: Controller, mode: Mode, is_floor: bool) -> str | None:
    """Add a block to a layer of this library's switches, or return the reason against it."""
    stacks = _process_stacks
    if controller.tier == "thread":
        stacks = vars(_thread).setdefault("stacks", {})
    stack = stacks.setdefault(controller, [])
    _restore_unused(stack)  # layers of blocks that another thread left
    if not is_floor and [layer for layer in stack if layer.is_floor and layer.blocks]:
        return FLOOR
    if mode not in controller.modes:
        return f"{controller.name} has no switch for {mode}"
    top = stack[-1] if stack else None
    layer = block.layers[controller.name] = _Layer(controller, mode, is_floor, stack)
    layer.blocks.add(block)
    stack.append(layer)
    values = controller.save()
    if top is not None and top.mode is mode and top.is_floor is is_floor and top.inside == values:
        top.blocks.add(block)
        block.layers[controller.name] = top
        stack.remove(layer)
    else:
        layer.saved = values
        layer.inside = controller.set_mode(mode)
    return None


def release(block: Entry) -> list[str]:
    """Remove a block from its layers and restore the switches; return sentences about problems."""
    remarks: list[str] = []
    with lock:
        for name, layer in block.layers.items():
            for other in layer.stack:  # after an exception in `_join` the block may be in two
                other.blocks.discard(block)
            if layer.controller.tier == "thread" and block.thread != get_ident():
                remarks.append(
                    f"{name}'s switch belongs to the thread in which the block was entered; it keeps the block's value "
                    "there until the next block begins there"
                )
            else:
                remarks += _restore_unused(layer.stack)
    return remarks


def _restore_unused(stack: list[_Layer]) -> list[str]:
    """Remove the layers without blocks from the top of a stack, and restore the values saved in them."""
    remarks: list[str] = []
    while stack and not stack[-1].blocks:
        layer = stack[-1]
        try:
            layer.blocks.add(_RESTORING)
            sentences, error = attempt(layer.controller, layer.restore)
        finally:
            layer.blocks.discard(_RESTORING)
        if error is not None:
            sentences = [f"the switches of {layer.controller.name} could not be restored: {error}"]
        remarks += sentences or []
        stack.remove(layer)
    return remarks
