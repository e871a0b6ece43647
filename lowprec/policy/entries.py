"""The open blocks of each thread and task, and the policy that they give together."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

from lowprec.policy.switches import Hold

if TYPE_CHECKING:
    from lowprec.architectures import Architecture
    from lowprec.modes import Mode
    from lowprec.policy.scopes import PolicyScope


class Policy:
    """An entry of a scope, with the combined effect of it and its enclosing blocks; copies of a context share it."""

    __slots__ = ("emulates", "guarded", "hold", "mode", "outer", "scope")

    scope: PolicyScope  # of the innermost block
    outer: Policy | None  # the policy outside of it
    hold: Hold | None  # None until it has set other libraries' switches
    mode: Mode | None  # of the innermost ``math_mode``
    guarded: bool  # whether one of the blocks is a guard
    emulates: Architecture | None  # of the innermost ``emulate``

    def __init__(self, scope: PolicyScope, outer: Policy, hold: Hold | None = None) -> None:
        self.scope = scope
        self.outer = outer
        self.hold = hold
        self.mode = scope._mode or outer.mode
        self.guarded = scope._guards or outer.guarded
        self.emulates = scope._emulates or outer.emulates

    def of(self, scope: PolicyScope) -> Policy | None:
        """Return the innermost entry of a scope."""
        policy = self
        while policy.scope is not scope:
            if policy.outer is None:
                return None
            policy = policy.outer
        return policy

    def guards(self) -> list[PolicyScope]:
        """Return the scopes of the open guards."""
        scopes, policy = [], self
        while policy.guarded and policy.outer is not None:
            if policy.scope._guards:
                scopes.append(policy.scope)
            policy = policy.outer
        return scopes

    def without(self, policy: Policy) -> Policy:
        """Return the policy without one of the open blocks."""
        if self.outer is None or self is policy:
            return self.outer or self
        return Policy(self.scope, self.outer.without(policy), self.hold)


_outside = object.__new__(Policy)
_outside.scope = _outside.outer = _outside.hold = _outside.mode = _outside.emulates = None  # type: ignore[assignment]
_outside.guarded = False

#: The policy of this thread or task.
current: ContextVar[Policy] = ContextVar("lowprec_policy", default=_outside)

#: The holds of all threads' blocks on other libraries' switches, in order of entry, with their scopes.
holds: dict[Hold, PolicyScope] = {}

listeners: list[Callable[[bool], None]] = []
#: Register a function to be called after every change of a thread's scopes (argument False) or of the process default
#: (True). ``lowprec.torch`` and ``lowprec.jax`` register one, because compiled code depends on the mode.
on_change = listeners.append


def notify(whole_process: bool = False) -> None:
    """Call the listeners."""
    for listener in listeners:
        listener(whole_process)
