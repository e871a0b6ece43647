"""Streams with deferred execution: work is queued, and runs only when somebody waits for it, in an unkind order.

Each piece of work knows what it must come after: what is before it on its stream, events, and the rules of the legacy
default stream. Whatever those leave open is decided against the caller. Source: the CUDA C++ Programming Guide,
*Streams*, *Implicit synchronization* and *CUDA Graphs: Creating a Graph Using Stream Capture*.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

#: Who runs when: "lazy" runs nothing but what is waited for; "eager" what is over by the simulated time, too;
#: "all" runs everything, streams by turns; a number seeds
#: a random order of everything.
Policy = Literal["lazy", "eager", "all"] | int


def nothing() -> None:
    """Do nothing, when its turn comes."""


class Op:
    """A piece of work on a stream.

    Parameters
    ----------
    stream : Stream
    label : str
    run : callable
    cost_ms : float
        Simulated time.
    after : iterable of Op
    capture : Capture, optional
        The capture that records it; it does not run then.
    """

    __slots__ = ("after", "capture", "cost_ms", "done", "enqueued_ms", "finish_ms", "label", "run", "stream")

    def __init__(
        self,
        stream: Stream,
        label: str,
        run: Callable[[], None],
        cost_ms: float,
        after: Iterable[Op],
        capture: Capture | None = None,
    ) -> None:
        self.stream = stream
        self.label = label
        self.run = run
        self.cost_ms = cost_ms
        self.after = tuple(after)
        self.capture = capture
        self.done = False
        self.finish_ms = 0.0
        self.enqueued_ms = 0.0

    @property
    def is_ready(self) -> bool:
        return all(x.done for x in self.after)


class Stream:
    """A stream of a device.

    Parameters
    ----------
    handle, device : int
    blocking : bool
        Whether it waits for the legacy default stream, and that for it.
    """

    def __init__(self, handle: int, device: int, *, blocking: bool, is_legacy: bool = False) -> None:
        self.handle = handle
        self.device = device
        self.blocking = blocking
        self.is_legacy = is_legacy
        self.queue: deque[Op] = deque()
        self.tail: Op | None = None
        self.capture: Capture | None = None
        self.last_turn = 0


class Event:
    """An event of a device; ``op`` is the mark that was recorded last."""

    def __init__(self, handle: int, device: int, *, timing: bool) -> None:
        self.handle = handle
        self.device = device
        self.timing = timing
        self.op: Op | None = None


class Capture:
    """Work that is being recorded into a graph."""

    def __init__(self, origin: Stream, mode: int, thread: int) -> None:
        self.origin = origin
        self.mode = mode
        self.thread = thread
        self.ops: list[Op] = []
        self.allocated: set[int] = set()
        self.tails: dict[Stream, Op | None] = {origin: None}
        self.is_invalid = False

    def is_joined(self) -> bool:
        """Whether all streams that were forked from the first one came back to it."""
        first = self.tails[self.origin]
        seen = set(_closure(first)) if first is not None else set()
        return all(tail is None or tail in seen for tail in self.tails.values())


def _start_ms(op: Op) -> float:
    return max([op.enqueued_ms, *(x.finish_ms for x in op.after)])


def _closure(op: Op) -> set[Op]:
    """Return an operation and all that must come before it and is not done."""
    found, todo = {op}, [op]
    while todo:
        for x in todo.pop().after:
            if not x.done and x not in found:
                found.add(x)
                todo.append(x)
    return found


class Scheduler:
    """Queues work and runs it."""

    def __init__(self, policy: Policy = "lazy") -> None:
        self.policy: Policy = policy
        self.streams: list[Stream] = []
        self.clock_ms = 0.0
        self._turn = itertools.count(1)
        self._random = np.random.default_rng(policy if isinstance(policy, int) else 0)

    def use(self, policy: Policy) -> None:
        """Change the order in which work runs from now on."""
        self.policy = policy
        self._random = np.random.default_rng(policy if isinstance(policy, int) else 0)

    def enqueue(
        self, stream: Stream, label: str, run: Callable[[], None], cost_ms: float = 0.0, after: Sequence[Op] = ()
    ) -> Op:
        """Put work on a stream, or into the graph that it is being captured into."""
        capture = stream.capture
        if capture is not None:
            tail = capture.tails[stream]
            op = Op(stream, label, run, cost_ms, (*after, *([tail] if tail else [])), capture)
            capture.ops.append(op)
            capture.tails[stream] = op
            return op
        before = [stream.tail, *self._implicit(stream), *after]
        op = Op(stream, label, run, cost_ms, [x for x in before if x is not None and not x.done])
        # What is done already says when this one can have begun.
        done_ms = max((x.finish_ms for x in before if x is not None and x.done), default=0.0)
        op.enqueued_ms = max(self.clock_ms, done_ms)
        stream.queue.append(op)
        stream.tail = op
        return op

    def _implicit(self, stream: Stream) -> list[Op | None]:
        others = [x for x in self.streams if x.device == stream.device and x is not stream]
        if stream.is_legacy:
            return [x.tail for x in others if x.blocking]
        return [x.tail for x in others if x.is_legacy] if stream.blocking else []

    def drain(self, targets: Iterable[Op] | None = None) -> None:
        """Run work until the targets are done, by default all of it."""
        if targets is None:
            self._run(None)
            return
        wanted = [x for x in targets if not x.done]
        if self.policy not in ("lazy", "eager") and wanted:
            self._run(None)
        for target in wanted:
            if not target.done:
                self._run(_closure(target))

    def advance(self, target: Op) -> None:
        """Run one piece of what a target waits for."""
        if self.policy != "eager":
            self._step(_closure(target))

    def keep_up(self) -> None:
        """Run the work that a device completes without being waited for."""
        while self.policy == "eager":
            ready = [x.queue[0] for x in self.streams if x.queue and x.queue[0].is_ready]
            over = [x for x in ready if _start_ms(x) + x.cost_ms <= self.clock_ms]
            if not over:
                return
            self._execute(over[0])

    def _run(self, among: set[Op] | None) -> None:
        while self._step(among):
            pass

    def _step(self, among: set[Op] | None) -> bool:
        fronts = [x.queue[0] for x in self.streams if x.queue]
        if among is not None:
            fronts = [x for x in fronts if x in among]
        if not fronts:
            return False
        ready = [x for x in fronts if x.is_ready]
        assert ready, "work waits for itself"
        if isinstance(self.policy, int):
            op = ready[int(self._random.integers(len(ready)))]
        else:
            # By turns, the newest stream first.
            op = min(reversed(ready), key=lambda x: x.stream.last_turn)
        self._execute(op)
        return True

    def _execute(self, op: Op) -> None:
        stream = op.stream
        assert stream.queue.popleft() is op
        stream.last_turn = next(self._turn)
        op.finish_ms = _start_ms(op) + op.cost_ms
        op.done, op.after = True, ()
        run, op.run = op.run, nothing  # which lets go of what it holds
        run()

    def replay(self, ops: Sequence[Op], stream: Stream) -> None:
        """Queue a captured graph on a stream; what the graph leaves open comes last first."""
        done: set[Op] = set()
        waiting = list(ops)
        while waiting:
            op = next(x for x in reversed(waiting) if all(y in done for y in x.after))
            waiting.remove(op)
            done.add(op)
            self.enqueue(stream, f"graph: {op.label}", op.run, op.cost_ms)
