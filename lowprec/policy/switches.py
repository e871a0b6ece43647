"""Setting and restoring other libraries' switches across threads, tasks, nested blocks, exceptions and interrupts.

Each controller has a stack of layers: one per process or one per thread, as its switches. A layer contains the values
saved before a block set the switches, and the open blocks that use it. A new block joins the top layer if the switches
still have that layer's values; otherwise it adds a layer. The top layer is removed when its last block has ended. So
blocks may end in any order, and the user's values are restored exactly once. Switches are read and set under the lock.

A layer is put on its stack before a switch is changed, and removed after all are restored: after an exception of a
signal handler, the next block restores the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from threading import get_ident
from types import MappingProxyType
from typing import Any, TypeVar

from lowprec.modes import MathMode
from lowprec.policy.protocol import Controller, Tier, attempt
from lowprec.util.lock import locked

T = TypeVar("T")

#: Why a block does not set switches that a guard has set.
FLOOR = "an open fp32_guard keeps it at full FP32"

#: Layers and failures of a block that sets no switches.
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Block:
    """One open block, and the layers that it uses."""

    __slots__ = ("failures", "layers", "thread")

    layers: Mapping[str, _Layer]  # layer of each library's switches
    failures: Mapping[str, str]  # by library: the reason why it was not set
    thread: int  # thread that entered the block

    def __init__(self) -> None:
        self.layers = self.failures = NOTHING
        self.thread = get_ident()


class _Layer:
    """The values of switches before and after a block set them, and the blocks that use them."""

    __slots__ = ("blocks", "controller", "inside", "is_floor", "mode", "saved")

    def __init__(self, controller: Controller, mode: MathMode, is_floor: bool, saved: Mapping[str, Any]) -> None:
        self.controller = controller
        self.mode = mode
        self.is_floor = is_floor
        self.saved = saved
        self.inside: Mapping[str, Any] | None = None  # the values as set; None before that
        self.blocks: dict[Block, None] = {}  # in order of entry

    def restore(self) -> list[str]:
        """Restore the switches, and return a sentence about those that the user has changed."""
        controller, saved, inside, changed = self.controller, self.saved, self.inside, {}
        # If `inside` is None, an exception ended `set_mode`, and the switches have no values of the user to keep.
        if inside is not None and (now := controller.save()) != inside:
            # Switches that appeared or disappeared inside the block are ignored.
            changed = {name: now[name] for name in saved if name in now and now[name] != inside.get(name)}
        # If a signal handler ends the restoration, a second call writes the same values.
        self.saved, self.inside = {**saved, **changed}, None
        controller.restore(self.saved)
        return [kept(controller.name, changed, "inside the block")] if changed else []


def kept(library: str, changed: Mapping[str, Any], where: str) -> str:
    """Return a sentence about switches that the user has changed."""
    values = ", ".join(f"{name} = {value!r}" for name, value in changed.items())
    verbs = ("was", "is") if len(changed) == 1 else ("were", "are")
    return f"{library}: {values} {verbs[0]} set {where}, and {verbs[1]} kept"


#: Whether the thread that holds the lock is in :func:`_change`.
_changing = False

Stacks = dict[Controller, list[_Layer]]


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.stacks: Stacks = {}


_process_stacks: Stacks = {}
_thread = _OfThread()


def _change(step: Callable[[], T]) -> T | None:
    """Call a function that reads or sets switches; None in a finalizer or signal handler during such a call."""
    global _changing
    if _changing:
        return None
    try:
        _changing = True
        return step()
    finally:
        _changing = False


def save(controller: Controller) -> Mapping[str, Any] | None:
    """Return the value of each switch, None while switches are being changed by this thread."""
    return locked(_change, controller.save)


def hold(
    block: Block,
    found: Iterable[Controller],
    mode: MathMode,
    is_floor: bool,
    is_guarded: Callable[[str], bool] | None = None,
) -> None:
    """Set the switches of these loaded libraries for a mode, and record in the block the data for :func:`release`.

    After an exception, which only a signal handler raises, the block must be released. ``is_floor`` marks a guard:
    while it is open, no other block lowers the precision. ``is_guarded`` returns whether a guard covers a library.
    """
    failures = locked(_change, partial(_set, block, found, mode, is_floor, is_guarded))
    if failures is None:
        changing = "the block was entered by a finalizer or signal handler, while switches were being changed"
        failures = dict.fromkeys([c.name for c in found], changing)
    block.failures = failures


def _set(
    block: Block, found: Iterable[Controller], mode: MathMode, is_floor: bool, is_guarded: Callable[[str], bool] | None
) -> dict[str, str]:
    """Set switches and return the failures, by library."""
    failures: dict[str, str] = {}
    layers: dict[str, _Layer] = {}
    block.layers = layers
    for controller in found:
        name = controller.name
        if is_guarded is not None and is_guarded(name):
            failures[name] = FLOOR
            continue
        why_not, error = attempt(controller, partial(_join, block, layers, controller, mode, is_floor))
        if error is not None:
            why_not = error
            if name in layers:
                layers[name].blocks.pop(block, None)  # before it is removed from `layers`, which `release` uses
                del layers[name]
        if why_not is not None:
            failures[name] = why_not
    _restore_all_unused()
    return failures


def _join(
    block: Block, layers: dict[str, _Layer], controller: Controller, mode: MathMode, is_floor: bool
) -> str | None:
    """Add the block to a layer of this library's switches, or return the reason against it."""
    stacks = _thread.stacks if controller.tier == Tier.THREAD else _process_stacks
    stack = stacks.setdefault(controller, [])
    _restore_unused(stack)
    if not is_floor and [layer for layer in stack if layer.is_floor and layer.blocks]:
        return FLOOR
    if mode not in controller.modes:
        return f"{controller.name} has no switch for {mode}"
    now = controller.save()
    layer = stack[-1] if stack else None
    if layer is None or layer.mode is not mode or layer.is_floor is not is_floor or now != layer.inside:
        layer = _Layer(controller, mode, is_floor, now)
        stack.append(layer)
    layers[controller.name] = layer
    layer.blocks[block] = None
    if layer.inside is None:
        layer.inside = controller.set_mode(mode)
    return None


def release(block: Block) -> list[str]:
    """Remove a block from its layers and restore the switches; return sentences about problems.

    A second call completes an interrupted one. A call in a finalizer or signal handler, while switches are being
    changed, only removes the block; the switches are restored at the end of that change.
    """
    for layer in block.layers.values():
        layer.blocks.pop(block, None)
    remarks = locked(_change, _restore_all_unused) or []
    if block.thread != get_ident():
        remarks += [
            f"{name}'s switch belongs to the thread in which the block was entered; it keeps the block's value there "
            "until the next block begins there"
            for name, layer in block.layers.items()
            if layer.controller.tier == Tier.THREAD
        ]
    return remarks


def _restore_all_unused() -> list[str]:
    remarks: list[str] = []
    for stacks in (_process_stacks, _thread.stacks):
        for stack in stacks.values():
            if stack:
                remarks += _restore_unused(stack)
    return remarks


def _restore_unused(stack: list[_Layer]) -> list[str]:
    """Remove the layers without blocks from the top of a stack, and restore the values saved in them."""
    remarks: list[str] = []
    while stack and not stack[-1].blocks:
        layer = stack[-1]
        found, error = attempt(layer.controller, layer.restore)
        if error is not None:
            found = [f"the switches of {layer.controller.name} could not be restored: {error}"]
        remarks += found or []
        stack.pop()
    return remarks
