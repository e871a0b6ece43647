"""When other libraries' switches are changed and put back, over threads, tasks, nesting and exceptions.

Each controller has a stack of layers: one for the process, or one per thread, as the switches reach. A layer is what
was saved when a block raised (or lowered) the switches, and how many open blocks rely on it. A block that finds the
switches as the top layer left them joins that layer, any other one puts a new layer on top. A layer goes when its
last block has left and nothing lies above it; so blocks may end in any order, and what the user had set comes back
exactly once. One lock guards all stacks.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any

from lowprec.errors import UnsupportedError
from lowprec.modes import MathMode
from lowprec.policy.controllers import controllers
from lowprec.policy.protocol import Controller, Tier

__all__ = ["FLOOR", "Held", "hold", "in_words", "release"]

#: Why a block did not lower a library's switches.
FLOOR = "nothing lowers it while an fp32_guard is open"


class _Layer:
    """What a block found, what it made of that, and how many blocks rely on it."""

    __slots__ = ("blocks", "controller", "inside", "is_floor", "mode", "saved", "stack")

    def __init__(
        self,
        controller: Controller,
        stack: list[_Layer],
        mode: MathMode,
        is_floor: bool,
        saved: Mapping[str, Any],
    ) -> None:
        self.controller = controller
        self.stack = stack
        self.mode = mode
        self.is_floor = is_floor
        self.saved = saved
        self.inside: Mapping[str, Any] = {}
        self.blocks = 0


class Held:
    """The switches that one block holds.

    Attributes
    ----------
    layers : list of _Layer
        Of the libraries that were set.
    failures : dict of str to str
        By library: why it was not.
    thread : int
        The thread that entered the block.
    is_open : bool
        False once it was given back.
    """

    __slots__ = ("failures", "is_open", "layers", "thread")

    def __init__(self, thread: int) -> None:
        self.layers: list[_Layer] = []
        self.failures: dict[str, str] = {}
        self.thread = thread
        self.is_open = True

    @property
    def names(self) -> set[str]:
        """The libraries that were set."""
        return {layer.controller.name for layer in self.layers}


_lock = threading.RLock()
#: Whether the thread that holds the lock is in the midst of a change. A finalizer or a signal handler may run in that
#: very thread, and enter or leave a guard there.
_busy = False
#: Blocks that ended in such a place.
_late: deque[Held] = deque()

_process_stacks: dict[Controller, list[_Layer]] = {}
_thread_stacks = threading.local()


def _stack_of(controller: Controller) -> list[_Layer]:
    stacks = _process_stacks
    if controller.tier == Tier.THREAD:
        try:
            stacks = _thread_stacks.by_controller
        except AttributeError:
            stacks = _thread_stacks.by_controller = {}
    stack = stacks.get(controller)
    if stack is None:
        stack = stacks[controller] = []
    return stack


# -- entering -------------------------------------------------------------------------------------


def hold(
    names: frozenset[str] | None,
    mode: MathMode,
    is_floor: bool,
    is_guarded: Callable[[str], bool] | None = None,
) -> Held | None:
    """Set the switches of the loaded libraries for this mode, and return what :func:`release` needs.

    Parameters
    ----------
    names : frozenset of str or None
        The libraries; None for all.
    mode : MathMode
        ``fp32`` for the guard.
    is_floor : bool
        True for the guard: no block without it lowers the switches while this one is open.
    is_guarded : callable, optional
        Gets the name of a library, and says whether a guard of the caller's covers it.

    Returns
    -------
    Held or None
        None if no library is loaded.
    """
    loaded = sys.modules
    found = [
        controller
        for controller in controllers()
        if loaded.get(controller.module) is not None and (names is None or controller.name in names)
    ]
    return _hold(found, mode, is_floor, is_guarded) if found else None


def _hold(
    found: list[Controller],
    mode: MathMode,
    is_floor: bool,
    is_guarded: Callable[[str], bool] | None,
) -> Held:
    global _busy
    held = Held(get_ident())
    with _lock:
        if _busy:
            why = "the block was entered by a finalizer or signal handler, while switches were being changed"
            held.failures.update(dict.fromkeys((c.name for c in found), why))
            return held
        _busy = True
        try:
            for controller in found:
                if is_guarded is not None and is_guarded(controller.name):
                    held.failures[controller.name] = FLOOR
                else:
                    _add(held, controller, mode, is_floor)
        except BaseException:
            # An interrupt: what was set so far goes back.
            _give_back(held)
            raise
        finally:
            _busy = False
    if _late:
        release(held=None)
    return held


def _add(held: Held, controller: Controller, mode: MathMode, is_floor: bool) -> None:
    try:
        layer = _layer(controller, mode, is_floor)
    except Exception as error:  # noqa: BLE001 - whatever a library does, the others are to act
        held.failures[controller.name] = in_words(error)
        return
    if layer is None:
        held.failures[controller.name] = FLOOR
        return
    layer.blocks += 1
    held.layers.append(layer)


def in_words(error: BaseException) -> str:
    """Return why a library could not be set."""
    return str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"


def _layer(controller: Controller, mode: MathMode, is_floor: bool) -> _Layer | None:
    """Return the layer on which a new block relies; None if it must not lower what a guard holds."""
    stack = _stack_of(controller)
    if stack and stack[-1].blocks <= 0:
        _settle(stack)  # left in another thread, which could not
    top = stack[-1] if stack else None
    if not is_floor and any(layer.is_floor and layer.blocks > 0 for layer in stack):
        return None
    if mode not in controller.modes:
        raise UnsupportedError(f"{controller.name} has no switch for {mode}")
    now = controller.save()
    if top is not None and top.mode is mode and top.is_floor is is_floor and now == top.inside:
        return top
    layer = _Layer(controller, stack, mode, is_floor, now)
    try:
        layer.inside = controller.set_mode(mode)
    except BaseException:
        _try_to_restore(controller, now)
        raise
    stack.append(layer)
    return layer


def _try_to_restore(controller: Controller, saved: Mapping[str, Any]) -> None:
    try:
        controller.restore(saved)
    except Exception:  # noqa: BLE001 - the error that led here is the one to tell
        return


# -- leaving --------------------------------------------------------------------------------------


def release(held: Held | None) -> list[str]:
    """Give back what a block held, once; return sentences about what did not go as planned.

    With None, only what ended in a finalizer is given back.
    """
    global _busy
    said: list[str] = []
    with _lock:
        if held is not None:
            _late.append(held)
        while _late and not _busy:
            _busy = True
            try:
                while _late:
                    said += _give_back(_late.popleft())
            finally:
                _busy = False
    return said


def _give_back(held: Held) -> list[str]:
    if not held.is_open:
        return []
    held.is_open = False
    said: list[str] = []
    for layer in reversed(held.layers):
        layer.blocks -= 1
        if layer.controller.tier == Tier.PROCESS or held.thread == get_ident():
            said += _settle(layer.stack)
        else:
            said.append(
                f"{layer.controller.name}'s switch belongs to the thread in which the block was entered; there it "
                "stays as the block set it until the next block begins there"
            )
    return said


def _settle(stack: list[_Layer]) -> list[str]:
    """Take away the layers on top on which no block relies any more."""
    said: list[str] = []
    while stack and stack[-1].blocks <= 0:
        said += _undo(stack.pop())
    return said


def _undo(layer: _Layer) -> list[str]:
    controller, saved, inside = layer.controller, layer.saved, layer.inside
    try:
        now = controller.save()
        if now == inside:
            controller.restore(saved)
            return []
        changed = [name for name in saved if now.get(name) != inside.get(name)]
        if not changed:  # a switch that came into being inside the block is no change of the user's
            controller.restore(saved)
            return []
        controller.restore({**saved, **{name: now[name] for name in changed}})
    except Exception as error:  # noqa: BLE001 - whatever a library does, the others are to be put back
        return [f"the switches of {controller.name} could not be put back: {in_words(error)}"]
    values = ", ".join(f"{name} = {now[name]!r}" for name in changed)
    verbs = ("was", "is") if len(changed) == 1 else ("were", "are")
    return [f"{controller.name}: {values} {verbs[0]} set inside the block, and {verbs[1]} kept"]


# -- fork -----------------------------------------------------------------------------------------


if hasattr(os, "register_at_fork"):
    # A child that is forked while another thread changes switches would find them half changed, and the lock taken.
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )
