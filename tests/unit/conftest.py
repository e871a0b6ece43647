"""Fixtures of several modules of this folder."""

import sys
from types import ModuleType

import pytest

from lowprec.policy import controllers, entries, environment, set_math_mode
from support import benchmark_modules
from support.synthetic_library import Library


@pytest.fixture
def clean_policy(monkeypatch):
    """No variable is set before the test, and neither its variables nor its process default are left after it."""

    def clear():
        for variable in environment.VARIABLES:
            monkeypatch.delenv(variable.name, raising=False)
        environment.refresh()  # JAX's listener resolves a mode

    clear()
    yield
    set_math_mode(None)
    clear()


class Register:
    """Registers and loads libraries; all libraries registered before are unknown to the test."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(controllers, "_by_name", {})
        self._monkeypatch = monkeypatch
        self.made: list[Library] = []

    def __call__(self, name="one", *, tier="process", loaded=True, made=None):
        library = made or Library(name, tier)
        controllers.register_controller(library)
        if loaded:
            self.load(library)
        self.made.append(library)
        return library

    def load(self, library):
        self._monkeypatch.setitem(sys.modules, library.module, ModuleType(library.module))


@pytest.fixture
def register(monkeypatch):
    """Make libraries; the test leaves no block open in this context."""
    before = entries.blocks()
    yield Register(monkeypatch)
    assert entries.blocks() == before


@pytest.fixture(params=["thread", "process"])
def library(request, register):
    """One with switches of the process, or of the thread."""
    return register(tier=request.param)


@pytest.fixture
def load():
    with benchmark_modules.imports() as load:
        yield load
