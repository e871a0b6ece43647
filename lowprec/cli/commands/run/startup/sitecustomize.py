"""What ``lowprec run`` has every Python of the run execute at its start: it waits for libraries with switches.

This folder comes first in ``PYTHONPATH`` and holds this file alone, so ``site`` finds it before any other
``sitecustomize``, which is imported at the end as if this one did not exist. Nothing else is imported here: a program
that uses none of the libraries pays for the reading of this file. It may also meet a Python that is older than those
lowprec runs on, and one in which lowprec is not installed.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: The modules to wait for; the libraries' names are the same.
_LIBRARIES = frozenset(["torch", "jax", "tensorflow", "cupy", "paddle"])
_GUARD = "fp32_guard"
_LOWPREC = "lowprec"


class _Watcher:
    """A finder that finds what the others find, and has a library's switches set once it is executed."""

    def __init__(self, order: str, home: str, intercepts: bool, profiles: bool) -> None:
        self.order = order
        self.home = home
        self.intercepts = intercepts
        self.profile = None  # type: Any
        self.tells_changes = False
        self.names = (_LIBRARIES if order else frozenset()) | {_LOWPREC if profiles else ""}

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in self.names:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                # A folder without an __init__ has nothing to execute.
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def library_is_there(self, name: str) -> None:
        if name == _LOWPREC:
            self.start_profile()
            return
        why = self.on_path(self.set_switches, name)
        if self.intercepts and name == "torch":
            failure = self.on_path(self.intercept)
            if failure is not None:
                _tell(f"lowprec run --intercept: PyTorch's products are its own ({failure})")
        elif why is None:
            left = self.on_path(self.without_effect, name)
            if left:
                _tell(f"lowprec run --mode {self.order} changes nothing in {name} ({left})")
        if why is None:
            return
        if self.order == _GUARD:
            raise ImportError(
                f"lowprec run --guard cannot hold {name} at full FP32: {why}", name=name
            )
        _tell(
            f"lowprec run --mode {self.order} does not reach {name} ({why}); it keeps its own setting"
        )

    def on_path(self, call: "Any", *arguments: "Any") -> "Any":
        """Call with lowprec on the path; return what the call does, or what it raised in words."""
        # At the end, where it hides nothing: the program need not have lowprec on its path.
        absent = [self.home] if self.home not in sys.path else []
        sys.path += absent
        try:
            return call(*arguments)
        except Exception as error:  # noqa: BLE001 - the program must not break for it
            return f"{type(error).__name__}: {error}"
        finally:
            for path in absent:
                sys.path.remove(path)

    def set_switches(self, name: str) -> "str | None":
        """Return why the switches could not be set."""
        from lowprec.policy import process

        why = process.set_library(name, self.order)
        if why is None and self.order == _GUARD and not self.tells_changes:
            import atexit

            self.tells_changes = True
            atexit.register(_tell_changes, process.changes)
        return why

    def without_effect(self, name: str) -> "str | None":
        """Return what the switches leave alone."""
        from lowprec.policy import process

        return process.without_effect(name, self.order)

    def intercept(self) -> None:
        """Take the products of this thread through lowprec until the process ends."""
        import atexit

        from lowprec.torch.interception import intercept

        seen = intercept("fp32" if self.order == _GUARD else self.order)
        atexit.register(self.on_path, lambda: _tell(str(seen.report())))
        seen.__enter__()

    def start_profile(self) -> None:
        """Record lowprec's products until the process ends."""
        from lowprec.profiling import profile

        self.profile = profile("of the program")
        self.profile.__enter__()

    def show_profile(self) -> None:
        if self.profile is not None:
            _tell(str(self.profile))
        elif os.environ.get("LOWPREC_RUN_PROFILE") == str(os.getpid()):
            _tell("lowprec run --profile: the program did not import lowprec")


class _Loader:
    """A loader that takes itself out once the module is executed: the module shows its own one."""

    #: For whoever copies a loader, and asks for attributes before there are any.
    _own = None  # type: Any

    def __init__(self, own: "Any", watcher: _Watcher) -> None:
        self._own = own
        self._watcher = watcher

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._own, name)

    def exec_module(self, module: "Any") -> None:
        module.__loader__ = module.__spec__.loader = self._own
        self._own.exec_module(module)
        self._watcher.library_is_there(module.__name__)

    # Python leaves its own frames of an import out of a traceback, and tells them by the name of their file. A library
    # that fails to import is to look as it does without lowprec.
    exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap>")


def _tell(text: str) -> None:
    try:
        sys.stderr.write(text + "\n")
    except Exception:  # noqa: BLE001 - it is closed, or the program has none
        return


def _tell_changes(changes: "Any") -> None:
    for text in changes():
        _tell("lowprec run --guard: " + text)


def _start() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    sys.path_importer_cache.pop(here, None)
    # Without the variable, the program has decided that its child is on its own.
    order = os.environ.get("LOWPREC_RUN")
    intercepts, profiles = map(os.environ.get, ("LOWPREC_RUN_INTERCEPT", "LOWPREC_RUN_PROFILE"))
    if order or profiles:
        home = here
        for _ in ("lowprec", "cli", "commands", "run", "startup"):
            home = os.path.dirname(home)
        watcher = _Watcher(order or "", home, bool(intercepts), bool(profiles))
        sys.meta_path.insert(0, watcher)
        if profiles:
            import atexit

            atexit.register(watcher.on_path, watcher.show_profile)


_start()
# From here on this is the module of that name that stands further along the path. If there is none, this raises what
# `site` expects of a Python without one.
del sys.modules["sitecustomize"]
import sitecustomize  # noqa: E402, F401
