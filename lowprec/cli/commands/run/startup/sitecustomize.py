"""The start-up hook of ``lowprec run``: it sets the switches of libraries when they are imported.

This folder is first in ``PYTHONPATH`` and contains only this file, so ``site`` finds it before any other
``sitecustomize``, which is imported at the end. Nothing else is imported here, so that programs without these libraries
start as fast as usual. The Python may be older than lowprec supports, and lowprec may not be installed.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: The modules to wait for; the libraries' names are the same.
_LIBRARIES = frozenset(["torch", "jax", "tensorflow", "cupy", "paddle"])
#: Libraries whose products are intercepted.
_INTERCEPTED = frozenset(["torch", "jax", "numpy"])
_GUARD = "fp32_guard"
_LOWPREC = "lowprec"


class _Watcher:
    """A finder that uses the other finders, and sets a library's switches once it is executed."""

    def __init__(self, order: "Any", home: str, intercepts: "Any", profiles: bool) -> None:
        self.order = order
        self.home = home
        self.intercepts = intercepts  # None, or rules as JSON
        self.profiles = profiles
        self.profile = None  # type: Any
        self.record_path = ""  # of this process, if its run is compared with another one
        self.recorder = None  # type: Any
        self.reaches = False  # whether a library's switches or products have been set
        self.names = (_LIBRARIES if order else frozenset()) | {_LOWPREC if profiles else ""}
        if intercepts:
            self.names |= _INTERCEPTED

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in self.names:
            return None
        self.names -= {name}  # another finder may ask all finders, too
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec = None if find is None else find(name, path, target)
                if spec is not None:
                    # A folder without an __init__ has nothing to execute.
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = _Loader(spec.loader, self)
                    return spec
        finally:
            self.names |= {name}
        return None

    def library_is_loaded(self, name: str) -> None:
        if name == _LOWPREC:
            self.start_profile()
            return
        why = None if name == "numpy" else self.on_path(self.set_switches, name)
        if self.intercepts and name in _INTERCEPTED:
            failure = self.on_path(self.intercept, name)
            if failure is not None:
                _print(f"lowprec run --intercept: {name}'s products are its own ({failure})")
            elif self.order != _GUARD:
                why = None  # its products are in the mode, with or without a switch
            self.reaches |= failure is None and name != "numpy"
        elif why is None:
            self.reaches = True
        if why is None:
            return
        if self.order == _GUARD:
            raise ImportError(
                f"lowprec run --guard cannot hold {name} at full FP32: {why}", name=name
            )
        _print(
            f"lowprec run --mode {self.order} does not reach {name} ({why}); it keeps its own setting"
        )

    def on_path(self, call: "Any", *arguments: "Any") -> "Any":
        """Call with lowprec on the path; return the call's result, or the text of its exception."""
        # At the end, where it hides no other module.
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
        """Return the reason why the switches could not be set."""
        from lowprec.policy import process

        return process.set_library(name, self.order)

    def intercept(self, name: str) -> None:
        """Compute a library's products with lowprec until the process ends."""
        import json

        from lowprec.core.rules import parse_rules
        from lowprec.interception import of_library

        rules = parse_rules("fp32" if self.order == _GUARD else json.loads(self.intercepts))
        seen = of_library(name, rules, cast=True)
        if self.record_path:
            self.record_products(seen)
            return
        is_first = os.environ.get("LOWPREC_RUN_PROGRAM") == str(os.getpid())
        folder = os.environ.get("LOWPREC_RUN_FOLDER")
        seen.apply_to_process(folder and os.path.join(folder, name), is_first, self.show)

    def record_products(self, seen: "Any") -> None:
        """Record a library's products for the comparison with another run."""
        from lowprec.comparing import recorder_against

        if self.recorder is None:
            self.recorder = recorder_against(os.environ.get("LOWPREC_RUN_AGAINST", ""))
        seen.recorder = self.recorder
        seen.apply_to_process(None, True, lambda report: seen.complete_records())

    def show(self, report: "Any") -> None:
        """Show a report; NumPy's only if it has products, because most programs import NumPy."""
        self.reaches |= bool(report.products)
        if report.products or "numpy" not in report.title:
            self.on_path(lambda: _print(report.text(_columns())))

    def start_profile(self) -> None:
        """Record lowprec's products until the process ends."""
        from lowprec.profiling import profile

        self.profile = profile("of the program")
        self.profile.__enter__()

    def finish(self, program: "str | None") -> None:
        """Show changes of guarded switches, the profile and, in the program itself, the options without effect."""
        process = sys.modules.get("lowprec.policy.process")
        for text in process.changes() if process else ():
            _print("lowprec run --guard: " + text)
        if self.profile is not None:
            _print(self.profile.text(_columns()))
        if program != str(os.getpid()):
            return
        if self.recorder is not None:
            from lowprec.comparing import write_record

            write_record(self.record_path, self.recorder)
        if self.record_path:
            return
        products = getattr(sys.modules.get("lowprec.core.executors"), "_executors", None)
        if self.order not in ("", _GUARD) and not (self.reaches or products or _has_had_children()):
            how = "NumPy's own are with --intercept" if self.intercepts is None else "none was seen"
            _print(f"lowprec run --mode {self.order}: no product was affected ({how})")
        if self.profiles and _LOWPREC not in sys.modules:
            _print("lowprec run --profile: the program did not import lowprec")
        folder = os.environ.get("LOWPREC_RUN_FOLDER")
        if folder:
            import shutil

            shutil.rmtree(folder, ignore_errors=True)


def _has_had_children() -> bool:
    """Whether this process has waited for a child, which may have run products."""
    try:
        import resource
    except ImportError:  # Windows
        return False
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0


class _Loader:
    """A loader that is replaced by the module's own loader once the module is executed."""

    #: For `copy`, which reads attributes before `__init__` has run.
    _loader = None  # type: Any

    def __init__(self, loader: "Any", watcher: _Watcher) -> None:
        self._loader = loader
        self._watcher = watcher

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def exec_module(self, module: "Any") -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._watcher.library_is_loaded(module.__name__)

    # Python omits its import machinery from tracebacks by file name; with this name it also omits this frame.
    exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap>")


def _columns() -> int:
    import shutil

    try:
        width = os.get_terminal_size(2).columns  # of standard error
    except OSError:
        width = 0
    return shutil.get_terminal_size((width or 120, 24)).columns


def _print(text: str) -> None:
    """Print lines to standard error, broken between words in a terminal."""
    try:
        if sys.stderr.isatty():
            import textwrap

            lines = textwrap.TextWrapper(_columns(), break_long_words=False, break_on_hyphens=False)
            text = "\n".join(lines.fill(line) for line in text.split("\n"))
        sys.stderr.write(text + "\n")
    except Exception:  # noqa: BLE001 - it is closed, or the program has none
        return


def _start() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != folder]
    sys.path_importer_cache.pop(folder, None)
    # A program may remove the variable for its children.
    order = os.environ.get("LOWPREC_RUN")
    intercepts, profiles = map(os.environ.get, ("LOWPREC_RUN_INTERCEPT", "LOWPREC_RUN_PROFILE"))
    if order or profiles:
        home = folder
        for _ in ("lowprec", "cli", "commands", "run", "startup"):
            home = os.path.dirname(home)
        watcher = _Watcher(order or "", home, intercepts, bool(profiles))
        sys.meta_path.insert(0, watcher)
        # The command waits for the program, whose children inherit nothing of the record.
        watcher.record_path = os.environ.pop("LOWPREC_RUN_RECORD", "")
        if watcher.record_path:
            os.environ["LOWPREC_RUN_PROGRAM"] = str(os.getpid())
        import atexit

        atexit.register(watcher.on_path, watcher.finish, os.environ.get("LOWPREC_RUN_PROGRAM"))


_start()
# Imports the next module of this name on the path. If there is none, the error is the one that `site` expects.
del sys.modules["sitecustomize"]
import sitecustomize  # noqa: E402, F401
