"""Streams with deferred execution: work is queued, and runs only when it is waited for, in an unfavourable order.

Each piece of work knows its predecessors: those on its stream, events, and the rules of the legacy default stream. Any
order that these allow may be taken: "lazy" runs only what is waited for; "eager" also what has ended by the simulated
time; "all" runs everything, streams in turn; a number seeds a random order of everything.

Source: the CUDA C++ Programming Guide, *Streams*, *Implicit synchronization* and
*CUDA Graphs: Creating a Graph Using Stream Capture*.
"""

import itertools
from collections import deque

import numpy as np


def nothing():
    """Do nothing."""


class Op:
    """A piece of work on a stream, with its simulated time; one that a capture records does not run."""

    __slots__ = (
        "after",
        "capture",
        "cost_ms",
        "done",
        "enqueued_ms",
        "finish_ms",
        "label",
        "run",
        "stream",
    )

    def __init__(self, stream, label, run, cost_ms, after, capture=None):
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
    def is_ready(self):
        return all(x.done for x in self.after)


class Stream:
    """A stream of a device; a blocking one and the legacy default stream wait for each other."""

    def __init__(self, handle, device, *, blocking, is_legacy=False):
        self.handle = handle
        self.device = device
        self.blocking = blocking
        self.is_legacy = is_legacy
        self.queue: deque[Op] = deque()
        self.tail: Op | None = None
        self.capture: Capture | None = None
        self.last_turn = 0


class Event:
    """An event of a device; ``op`` is its last record."""

    def __init__(self, device, *, timing):
        self.device = device
        self.timing = timing
        self.op: Op | None = None


class Capture:
    """Work that is being recorded into a graph; ``tails`` has the last of each stream."""

    def __init__(self, origin, mode, thread):
        self.origin = origin
        self.mode = mode
        self.thread = thread
        self.ops: list[Op] = []
        self.allocated: set[int] = set()
        self.tails: dict[Stream, Op | None] = {origin: None}
        self.is_invalid = False

    def is_joined(self):
        """Whether all streams that were forked from the first one have been joined to it."""
        first = self.tails[self.origin]
        seen = set(_closure(first)) if first is not None else set()
        return all(tail is None or tail in seen for tail in self.tails.values())


def _start_ms(op):
    return max([op.enqueued_ms, *(x.finish_ms for x in op.after)])


def _closure(op):
    """Return an operation and all its predecessors that are not done."""
    found, todo = {op}, [op]
    while todo:
        for x in todo.pop().after:
            if not x.done and x not in found:
                found.add(x)
                todo.append(x)
    return found


class Scheduler:
    def __init__(self):
        self.streams: list[Stream] = []
        self.clock_ms = 0.0
        self._turn = itertools.count(1)
        self.use("lazy")

    def use(self, policy):
        self.policy = policy
        self._random = np.random.default_rng(policy if isinstance(policy, int) else 0)

    def enqueue(self, stream, label, run, cost_ms=0.0, after=()):
        """Put work on a stream, or into the graph that it is being captured into."""
        capture = stream.capture
        if capture is not None:
            tail = capture.tails[stream]
            op = Op(stream, label, run, cost_ms, (*after, *([tail] if tail else [])), capture)
            capture.ops.append(op)
            capture.tails[stream] = op
            return op
        before = [x for x in (stream.tail, *self._implicit(stream), *after) if x is not None]
        op = Op(stream, label, run, cost_ms, [x for x in before if not x.done])
        op.enqueued_ms = max([self.clock_ms, *(x.finish_ms for x in before if x.done)])
        stream.queue.append(op)
        stream.tail = op
        return op

    def _implicit(self, stream):
        others = [x for x in self.streams if x.device == stream.device and x is not stream]
        if stream.is_legacy:
            return [x.tail for x in others if x.blocking]
        return [x.tail for x in others if x.is_legacy] if stream.blocking else []

    def drain(self, targets=None):
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

    def advance(self, target):
        """Run one piece of what a target waits for."""
        if self.policy != "eager":
            self._step(_closure(target))

    def keep_up(self):
        """Run the work that ends before the simulated time, where the policy does so."""
        while self.policy == "eager":
            ready = [x.queue[0] for x in self.streams if x.queue and x.queue[0].is_ready]
            over = [x for x in ready if _start_ms(x) + x.cost_ms <= self.clock_ms]
            if not over:
                return
            self._execute(over[0])

    def _run(self, among):
        while self._step(among):
            pass

    def _step(self, among):
        fronts = [x.queue[0] for x in self.streams if x.queue]
        if among is not None:
            fronts = [x for x in fronts if x in among]
        if not fronts:
            return False
        ready = [x for x in fronts if x.is_ready]
        assert ready, "work waits for itself"
        if isinstance(self.policy, int):
            op = ready[int(self._random.integers(len(ready)))]
        else:  # in turn, the newest stream first
            op = min(reversed(ready), key=lambda x: x.stream.last_turn)
        self._execute(op)
        return True

    def _execute(self, op):
        stream = op.stream
        assert stream.queue.popleft() is op
        stream.last_turn = next(self._turn)
        op.finish_ms = _start_ms(op) + op.cost_ms
        op.done, op.after = True, ()
        run, op.run = op.run, nothing  # which releases what it holds
        run()

    def replay(self, ops, stream):
        """Queue a captured graph on a stream; of what the graph leaves open, the last comes first."""
        done = set()
        waiting = list(ops)
        while waiting:
            op = next(x for x in reversed(waiting) if all(y in done for y in x.after))
            waiting.remove(op)
            done.add(op)
            self.enqueue(stream, f"graph: {op.label}", op.run, op.cost_ms)
