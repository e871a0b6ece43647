"""A library with two switches, and its controller."""

import threading
from collections.abc import Callable

from lowprec.modes import MathMode


class Library:
    """It counts what is asked of it, and sets its switches one after the other."""

    def __init__(self, name, tier="process"):
        self.name = name
        self.module = f"made_up_{name}"
        self.tier = tier
        self.switches = {"products": "products", "convolutions": "convolutions"}
        self.modes = (MathMode.FP32, MathMode.TF32)
        self._process = {"products": "low", "convolutions": "lower"}
        self._threads = threading.local()
        self.fails: dict[str, Exception] = {}
        self.calls: list[str] = []
        #: By method: a function that the next call runs in the middle.
        self.during: dict[str, Callable[[], None]] = {}

    @property
    def values(self):
        if self.tier == "process":
            return self._process
        if not hasattr(self._threads, "values"):
            self._threads.values = dict(self._process)
        return self._threads.values

    def _call(self, what):
        self.calls.append(what)
        if what in self.fails:
            raise self.fails[what]

    def _run(self, method):
        if method in self.during:
            self.during[method]()

    def save(self):
        self._call("save")
        values = dict(self.values)
        self._run("save")
        return values

    def set_mode(self, mode):
        self._call("set_mode")
        for name in self.values:
            self.values[name] = mode.value
            self._run("set_mode")
        self._call("have set_mode")
        return dict(self.values)

    def restore(self, saved):
        self._call("restore")
        for name in self.values:
            self.values[name] = saved[name]
            self._run("restore")

    describe = save

    @property
    def is_full(self):
        return set(self.values.values()) == {"fp32"}

    @property
    def is_as_before(self):
        return self.values == {"products": "low", "convolutions": "lower"}


class WithDefault(Library):
    """One whose switches belong to the thread, with a default for all threads."""

    def __init__(self, name):
        super().__init__(name, "thread")

    def set_default(self, mode):
        self._call("set_mode")
        self._process = dict.fromkeys(self._process, mode.value)
        self._threads = threading.local()
        return dict(self.values)
