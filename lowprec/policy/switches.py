"""When other libraries' switches are changed and put back, over threads, tasks, nesting, exceptions and interrupts.

Each controller has a stack of layers: one for the process, or one per thread, as the switches reach. A layer is what
was saved when a block raised (or lowered) the switches, and the open blocks that rely on it. A block that finds the
switches as the top layer left them joins that layer, any other one puts a new layer on top. A layer goes when its
last block has left and nothing lies above it; so blocks may end in any order, and what the user had set comes back
exactly once. One lock guards all stacks.

A signal handler may raise at any call. So a layer is on its stack before a switch is changed, and the values to put
back are settled before the first is: :func:`release`, called again, does the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from threading import get_ident
from types import MappingProxyType
from typing import Any

from lowprec.modes import MathMode
from lowprec.policy.interrupts import attempt, in_words
from lowprec.policy.protocol import Controller, Tier
from lowprec.util import forking

#: Why a block did not set a library's switches that a guard holds.
FLOOR = "nothing lowers it while an fp32_guard is open"

#: What the layers and the failures of a block are that has asked for nothing.
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Block:
    """What one open block relies on of other libraries' switches."""

    __slots__ = ("failures", "layers", "thread")

    layers: Mapping[str, _Layer]  # by library: the layer of its switches
    failures: Mapping[str, str]  # by library: why it was not set
    thread: int  # the thread that entered the block

    def __init__(self) -> None:
        self.layers = self.failures = NOTHING
        self.thread = get_ident()


class _Layer:
    """What a block found, what it made of that, and the blocks that rely on it."""

    __slots__ = ("blocks", "controller", "inside", "is_floor", "mode", "saved", "target", "told")

    def __init__(
        self, controller: Controller, mode: MathMode, is_floor: bool, saved: Mapping[str, Any]
    ) -> None:
        self.controller = controller
        self.mode = mode
        self.is_floor = is_floor
        self.saved = saved
        #: The switches as they were set; None until they are.
        self.inside: Mapping[str, Any] | None = None
        #: In the order in which they came.
        self.blocks: dict[Block, None] = {}
        #: What is to be put back; None until that is known.
        self.target: Mapping[str, Any] | None = None
        #: What the user is to be told of it.
        self.told: list[str] = []

    def put_back(self) -> None:
        """Put the switches back; done again after an interrupt, it writes the same values."""
        controller, target = self.controller, self.target
        if target is None:
            target = self.saved
            # Where there is none, an interrupt or a failure has left only some of them set.
            if self.inside is not None:
                now = controller.save()
                if now != self.inside:
                    target = self._with_changes(now, self.inside)
            self.target = target
        controller.restore(target)

    def _with_changes(self, now: Mapping[str, Any], inside: Mapping[str, Any]) -> Mapping[str, Any]:
        # A switch that came into being inside the block, or went, is no change of the user's.
        changed = [name for name in self.saved if name in now and now[name] != inside.get(name)]
        if changed:
            values = ", ".join(f"{name} = {now[name]!r}" for name in changed)
            verbs = ("was", "is") if len(changed) == 1 else ("were", "are")
            self.told = [
                f"{self.controller.name}: {values} {verbs[0]} set inside the block, and {verbs[1]} kept"
            ]
        return {**self.saved, **{name: now[name] for name in changed}}


# Re-entrant, since a finalizer or a signal handler may enter or leave a guard in the very thread that holds it.
_lock = threading.RLock()
# A child that is forked while another thread changes switches would find them half changed, and the lock taken.
forking.hold(_lock)
#: Taken while the holder of the other lock is in the midst of a change. A lock and no flag, because it is taken and
#: given back by C code, between which no interrupt comes.
_changing = threading.Lock()

Stacks = dict[Controller, list[_Layer]]


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.stacks: Stacks = {}


_process_stacks: Stacks = {}
_thread = _OfThread()


def _stack_of(controller: Controller) -> list[_Layer]:
    stacks = _thread.stacks if controller.tier == Tier.THREAD else _process_stacks
    return stacks.setdefault(controller, [])


# -- entering -------------------------------------------------------------------------------------


def hold(
    block: Block,
    found: Iterable[Controller],
    mode: MathMode,
    is_floor: bool,
    is_guarded: Callable[[str], bool] | None = None,
) -> None:
    """Set the switches of these libraries for this mode, and note in the block what :func:`release` needs.

    After an exception, which is always an interrupt, the block must be released.

    ``block`` is a new one, the libraries ``found`` are loaded. ``is_floor`` is True for the guard, whose mode is fp32:
    no block without it lowers the switches while this one is open. ``is_guarded`` gets the name of a library, and says
    whether a guard of the caller's covers it.
    """
    failures: dict[str, str] = {}
    layers: dict[str, _Layer] = {}
    block.layers, block.failures = layers, failures
    with _lock:
        if _changing.locked():
            changing = "the block was entered by a finalizer or signal handler, while switches were being changed"
            failures.update(dict.fromkeys([c.name for c in found], changing))
            return
        with _changing:
            for controller in found:
                name = controller.name
                if is_guarded is not None and is_guarded(name):
                    failures[name] = FLOOR
                    continue
                join = partial(_join, block, layers, controller, mode, is_floor)
                why_not, error = attempt(controller, join)
                if error is not None:
                    why_not = in_words(error)
                    if name in layers:
                        layers[name].blocks.pop(block, None)
                        del layers[name]
                if why_not is not None:
                    failures[name] = why_not
            _settle_all()


def _join(
    block: Block, layers: dict[str, _Layer], controller: Controller, mode: MathMode, is_floor: bool
) -> str | None:
    """Have the block rely on a layer of this library's switches, or return why it does not."""
    stack = _stack_of(controller)
    _settle(stack)
    if not is_floor and [layer for layer in stack if layer.is_floor and layer.blocks]:
        return FLOOR
    if mode not in controller.modes:
        return f"{controller.name} has no switch for {mode}"
    now = controller.save()
    layer = stack[-1] if stack else None
    if (
        layer is None
        or layer.mode is not mode
        or layer.is_floor is not is_floor
        or now != layer.inside
    ):
        layer = _Layer(controller, mode, is_floor, now)
        stack.append(layer)
    layers[controller.name] = layer
    layer.blocks[block] = None
    if layer.inside is None:
        layer.inside = controller.set_mode(mode)
    return None


# -- leaving --------------------------------------------------------------------------------------


def release(block: Block) -> list[str]:
    """Give back what a block relies on; return sentences about what did not go as planned.

    A second time it does nothing, or what an interrupt has left undone the first time. In the midst of a change, in
    a finalizer or signal handler, it only notes that the block has left: the change ends with putting back.
    """
    said: list[str] = []
    with _lock:
        for layer in block.layers.values():
            layer.blocks.pop(block, None)
        if not _changing.locked():
            with _changing:
                said += _settle_all()
    if block.thread != get_ident():
        said += [
            f"{name}'s switch belongs to the thread in which the block was entered; there it stays as the block set "
            "it until the next block begins there"
            for name, layer in block.layers.items()
            if layer.controller.tier == Tier.THREAD
        ]
    return said


def _settle_all() -> list[str]:
    said: list[str] = []
    for stacks in (_process_stacks, _thread.stacks):
        for stack in stacks.values():
            if stack:
                said += _settle(stack)
    return said


def _settle(stack: list[_Layer]) -> list[str]:
    """Take away the layers on top on which no block relies any more."""
    said: list[str] = []
    while stack and not stack[-1].blocks:
        layer = stack[-1]
        _, error = attempt(layer.controller, layer.put_back)
        if error is not None:
            name = layer.controller.name
            layer.told = [f"the switches of {name} could not be put back: {in_words(error)}"]
        said += layer.told
        stack.pop()
    return said
