"""``lowprec run``: a program behaves as under plain python, and is under the mode or the guard.

Each program runs twice, under ``python`` and under ``lowprec run``; what can be seen from outside must be the same.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from lowprec.cli import launcher
from lowprec.cli.commands import run as run_command

TF32 = ("--mode", "tf32")
GUARD = ("--guard",)
REPLACE = launcher._replace
posix = pytest.mark.skipif(os.name != "posix", reason="signals and fork are POSIX's")


class Seen(NamedTuple):
    """What is seen of a program from outside."""

    code: int
    out: str
    err: str


Start = Callable[..., Seen]


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*what: object) -> None:
        raise AssertionError("the process of the tests is not to become another program")

    monkeypatch.setattr(launcher, "_replace", replace)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)


def write(text: str, name: str = "script.py") -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text).lstrip("\n"))
    return name


def start(
    *words: str,
    under: Sequence[str] | None = None,
    options: Sequence[str] = (),
    stdin: str = "",
    variables: Mapping[str, str] | None = None,
) -> Seen:
    """Run a program under plain python, or under ``lowprec run`` with these options."""
    launched = [] if under is None else ["-m", "lowprec", "run", *under]
    done = subprocess.run(
        [sys.executable, *options, *launched, *words],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(variables or {})},
        timeout=120,
    )
    return Seen(done.returncode, done.stdout, done.stderr)


def same(*words: str, under: Sequence[str] = TF32, **how: Any) -> Seen:
    """Assert that a program looks the same under lowprec, and return how it looks."""
    plain, launched = start(*words, **how), start(*words, under=under, **how)
    assert launched == plain
    return plain


# -- the program behaves as under plain python ----------------------------------------------------

ENDS = {
    "nothing": ("pass", 0),
    "a number": ("import sys; sys.exit(3)", 3),
    "words": ("import sys; sys.exit('words')", 1),
    "none": ("import sys; sys.exit(None)", 0),
    "at once": ("import os; print('lost', end=''); os._exit(5)", 5),
    "an exception": ("def f():\n    raise ValueError('here')\nf()", 1),
    "nested": ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError(1) from e", 1),
    "during another": ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['x']", 1),
    "syntax": ("x = (", 1),
    "a missing module": ("import missing_module", 1),
    "an interrupt": ("raise KeyboardInterrupt", -signal.SIGINT),
    "a warning": ("import warnings\nwarnings.warn('look')\nprint('on')", 0),
    "at exit": ("import atexit\natexit.register(print, 'bye')\nprint('hello')", 0),
    "a thread": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
        0,
    ),
    "a child": (
        "import os, subprocess, sys\nprint(subprocess.call([sys.executable, '-c', '1/0']))",
        0,
    ),
}


@pytest.mark.parametrize("under", [TF32, GUARD], ids=["mode", "guard"])
@pytest.mark.parametrize(("text", "code"), ENDS.values(), ids=ENDS)
def test_a_program_ends_as_it_does(text: str, code: int, under: Sequence[str]) -> None:
    assert same(write(text), under=under).code == code


@posix
def test_a_killed_program() -> None:
    script = write("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert same(script).code == -signal.SIGKILL


@posix
def test_ctrl_c() -> None:
    script = write("import time\nprint('ready', flush=True)\ntime.sleep(60)")

    def interrupted(*words: str) -> Seen:
        with subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        return Seen(process.returncode, out, err)

    plain = interrupted(script)
    assert interrupted("-m", "lowprec", "run", *TF32, script) == plain
    assert plain.code == -signal.SIGINT


FACTS = """
import __main__, sys
print(__name__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
print(globals().get("__file__"), __builtins__, vars(__main__) is globals(), __doc__)
print(sys.argv, sys.path, sys.executable, sys.orig_argv[-3:])
print(sys.flags, sys.warnoptions, sys._xoptions, sys.stdout.line_buffering)
print(sorted(sys.modules), list(sys.path_importer_cache))
"""


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-W", "error"),
        ("-Wdefault", "-Xdev", "-X", "utf8", "-u"),
        ("-OO", "-bb", "-P"),
        ("-sB",),
    ],
    ids=" ".join,
)
def test_a_script_sees_itself(options: Sequence[str]) -> None:
    # Python 3.10 has no -P.
    usable = [o for o in options if o != "-P" or sys.version_info >= (3, 11)]
    seen = same(write(FACTS), "--guard", "--help", "--", "-m", options=usable)
    assert "['script.py', '--guard', '--help', '--', '-m']" in seen.out


def test_a_module_sees_itself() -> None:
    write("", "package/__init__.py")
    write(FACTS, "package/part.py")
    write(FACTS, "package/__main__.py")
    assert "package.part" in same("-m", "package.part", "--help", "-m").out
    assert "package.__main__" in same("-m", "package", "x").out


def test_a_folder_and_an_archive_see_themselves() -> None:
    write(FACTS, "folder/__main__.py")
    same("folder", "argument")
    with zipfile.ZipFile("archive.zip", "w") as archive:
        archive.write("folder/__main__.py", "__main__.py")
    same("archive.zip", "argument")


@pytest.mark.parametrize(
    "words", [("-m", "missing_module"), ("empty",), ("-m", "lowprec.missing")], ids=" ".join
)
def test_what_python_refuses_it_refuses_in_its_own_words(words: Sequence[str]) -> None:
    Path("empty").mkdir()
    assert same(*words).code != 0


def test_standard_input_is_the_program_s() -> None:
    script = write("import sys\nprint(sys.stdin.readline().upper(), input())")
    assert same(script, stdin="one\ntwo\n").out == "ONE\n two\n"
    seen = same("-", "argument", stdin=f"{FACTS}\n1 / 0\n")
    assert "['-', 'argument']" in seen.out
    assert '  File "<stdin>", line 9, in <module>' in seen.err


def test_a_script_that_looks_like_an_option() -> None:
    script = write("import sys\nprint(sys.argv, __file__)", "-x.py")
    plain = start("--", script, "-y")
    assert start("--", script, "-y", under=TF32) == plain
    assert plain.out.startswith("['-x.py', '-y']")


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--size=x", 2), ("--size=3", 0)])
def test_argparse_names_the_script(argument: str, code: int) -> None:
    script = write("""
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--size", type=int)
        print(parser.parse_args())
    """)
    seen = same(script, argument)
    assert seen.code == code
    assert code == 0 or seen.err.startswith("usage: script.py ")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_classes_of_main_travel_to_children(method: str) -> None:
    import multiprocessing

    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system does not {method}")
    script = write(f"""
        import multiprocessing, pickle
        from concurrent.futures import ProcessPoolExecutor

        class Point:
            def __init__(self, x):
                self.x = x

        def double(point):
            return Point(2 * point.x)

        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            print(pickle.loads(pickle.dumps(Point(1))).x, Point.__module__)
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                print(pool.submit(double, Point(21)).result().x)
    """)
    assert same(script, options=["-W", "ignore"]).out == "1 __main__\n42\n"


# -- libraries are imported as without lowprec ------------------------------------------------------

#: TensorFlow, as far as its switch is concerned.
LIBRARY = """
class config:
    class experimental:
        tf32 = "its own"

        @classmethod
        def tensor_float_32_execution_enabled(cls):
            return cls.tf32

        @classmethod
        def enable_tensor_float_32_execution(cls, value):
            cls.tf32 = value

switch = config.experimental
"""


@pytest.mark.parametrize(
    "text",
    ["def f():\n    raise RuntimeError('no driver')\nf()", "import missing_module", "x = ("],
    ids=["raises", "lacks", "syntax"],
)
def test_a_library_that_fails_looks_as_it_does(text: str) -> None:
    write(text, "tensorflow.py")
    assert same(write("import tensorflow"), under=GUARD).code == 1


def test_a_library_shows_its_own_loader() -> None:
    write(LIBRARY, "tensorflow/__init__.py")
    script = write("""
        import importlib.util, inspect
        spec = importlib.util.find_spec("tensorflow")
        print(spec.name, spec.origin, spec.loader.get_filename("tensorflow"))
        import tensorflow
        print(type(tensorflow.__loader__), type(tensorflow.__spec__.loader), tensorflow.__path__)
        print(len(inspect.getsource(tensorflow)))
    """)
    same(script)


def test_a_folder_with_the_name_of_a_library_is_none() -> None:
    Path("paddle").mkdir()
    assert (
        same(write("import paddle; print(paddle.__path__, paddle.__file__)"), under=GUARD).code == 0
    )


def test_the_user_s_own_sitecustomize_runs() -> None:
    write("import tensorflow\nnoted = __name__, __file__", "own/sitecustomize.py")
    write(LIBRARY, "own/tensorflow.py")
    where = {"PYTHONPATH": str(Path("own").resolve())}
    script = write("import sitecustomize, sys\nprint(sitecustomize.noted, sys.path)")
    assert same(script, variables=where).out.startswith("('sitecustomize', ")
    # A library that it imports is set too.
    script = write("import tensorflow\nprint(tensorflow.switch.tf32)")
    assert start(script, under=TF32, variables=where) == (0, "True\n", "")


def test_a_sitecustomize_that_fails_is_told_as_ever() -> None:
    write("import missing_module", "own/sitecustomize.py")
    variables = {"PYTHONPATH": str(Path("own").resolve())}
    script = write("print(1)")
    plain = start(script, variables=variables)
    assert "Error in sitecustomize" in plain.err
    # Twice: the launcher is a Python too.
    assert start(script, under=TF32, variables=variables) == plain._replace(err=2 * plain.err)


# -- the program is under the mode ----------------------------------------------------------------

LATE = """
import tensorflow, lowprec, threading
def told():
    print(lowprec.get_math_mode(), tensorflow.switch.tf32)
told()
thread = threading.Thread(target=told)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("under", "told"),
    [
        (TF32, "tf32 True\n"),
        (("--mode=high",), "tf32 True\n"),
        (("--mode", "fp32"), "fp32 False\n"),
        (GUARD, "fp32 False\n"),
    ],
    ids=str,
)
def test_the_mode_is_in_force(under: Sequence[str], told: str) -> None:
    write(LIBRARY, "tensorflow.py")
    assert start(write(LATE), under=under) == (0, 2 * told, "")


def test_a_library_without_the_mode_is_told_once() -> None:
    write(LIBRARY, "tensorflow.py")
    seen = start(write(LATE), under=("--mode", "bf16"))
    assert seen.out == 2 * "bf16 its own\n"
    said = "lowprec run --mode bf16 does not reach tensorflow (tensorflow has no switch for bf16)"
    assert seen.err == f"{said}; it keeps its own setting\n"


def test_a_library_that_the_guard_cannot_hold_is_not_imported() -> None:
    write("", "tensorflow.py")
    script = write("""
        import sys
        try:
            import tensorflow
        except ImportError as error:
            print(error.name, "tensorflow" in sys.modules)
        import tensorflow
    """)
    seen = start(script, under=GUARD)
    assert (seen.code, seen.out) == (1, "tensorflow False\n")
    message = seen.err.splitlines()[-1]
    assert message.startswith("ImportError: lowprec run --guard cannot hold tensorflow at full ")
    # With a mode, it is used as it is.
    seen = start(write("import tensorflow; print(1)"), under=TF32)
    assert (seen.code, seen.out) == (0, "1\n")
    assert seen.err.startswith("lowprec run --mode tf32 does not reach tensorflow (TensorFlow of ")


@pytest.mark.parametrize(
    ("under", "told"),
    [
        (TF32, "lowprec run --mode tf32 does not reach tensorflow (ImportError: none here); "),
        (
            GUARD,
            "ImportError: lowprec run --guard cannot hold tensorflow at full FP32: ImportError",
        ),
    ],
    ids=["mode", "guard"],
)
def test_a_python_without_lowprec(under: Sequence[str], told: str) -> None:
    write(LIBRARY, "folder/tensorflow.py")
    # The folder of the script comes first for the program, and not for the launcher.
    write("raise ImportError('none here')", "folder/lowprec.py")
    script = write("import tensorflow\nprint(tensorflow.switch.tf32)", "folder/script.py")
    seen = start(script, under=under)
    assert told in seen.err
    assert (seen.code, seen.out) == ((0, "its own\n") if under is TF32 else (1, ""))


CHILDREN = """
import multiprocessing, os, subprocess, sys

def told(place):
    import lowprec, tensorflow
    print(place, lowprec.get_math_mode(), tensorflow.switch.tf32, flush=True)

if __name__ == "__main__":
    for method in multiprocessing.get_all_start_methods():
        child = multiprocessing.get_context(method).Process(target=told, args=[method])
        child.start()
        child.join()
    code = "import script; script.told('subprocess')"
    subprocess.run([sys.executable, "-c", code], check=True)
    os.environ["OTHER"] = "1"
    subprocess.run([sys.executable, "-c", code.replace("subprocess", "grandchild")], check=True)
"""


@pytest.mark.parametrize(
    ("under", "told"), [(TF32, "tf32 True"), (GUARD, "fp32 False")], ids=["mode", "guard"]
)
def test_children_are_under_the_mode(under: Sequence[str], told: str) -> None:
    import multiprocessing

    write(LIBRARY, "tensorflow.py")
    places = [*multiprocessing.get_all_start_methods(), "subprocess", "grandchild"]
    seen = start(write(CHILDREN), under=under, options=["-W", "ignore"])
    assert seen == (0, "".join(f"{place} {told}\n" for place in places), "")


def test_a_child_that_ignores_the_environment_is_on_its_own() -> None:
    write(LIBRARY, "tensorflow.py")
    script = write("""
        import subprocess, sys
        code = "import sys; sys.path.insert(0, '.'); import tensorflow; print(tensorflow.switch.tf32)"
        subprocess.run([sys.executable, "-I", "-c", code], check=True)
    """)
    assert start(script, under=TF32).out == "its own\n"


def test_a_program_under_the_guard_starts_none_below_it() -> None:
    write(LIBRARY, "tensorflow.py")
    write(LATE, "inner.py")
    script = write("""
        import subprocess, sys
        command = [sys.executable, "-m", "lowprec", "run", "--mode", "tf32", "--force", "inner.py"]
        sys.exit(subprocess.call(command))
    """)
    note = "lowprec run: LOWPREC_FP32_GUARD overrules --mode tf32\n"
    assert start(script, under=GUARD) == (0, 2 * "fp32 False\n", note)
    # Under a mode, the inner one is another choice.
    assert start(script, under=("--mode", "fp32")) == (0, 2 * "tf32 True\n", "")


@pytest.mark.parametrize(
    ("under", "modes"),
    [
        (TF32, "tf32 bf16 fp16 fp32"),
        ((*TF32, "--force"), "tf32 tf32 tf32 fp32"),
        (GUARD, "fp32 fp32 fp32 fp32"),
    ],
    ids=["mode", "force", "guard"],
)
def test_what_the_program_can_choose(under: Sequence[str], modes: str) -> None:
    script = write("""
        import lowprec
        from lowprec.policy import resolve
        found = [lowprec.get_math_mode()]
        with lowprec.math_mode("bf16"):
            found.append(lowprec.get_math_mode())
        found.append(resolve("fp16").mode)
        with lowprec.fp32_guard():
            found.append(lowprec.get_math_mode())
        print(*found)
    """)
    assert start(script, under=under) == (0, f"{modes}\n", "")


SETS = """
import lowprec, tensorflow
tensorflow.switch.enable_tensor_float_32_execution(True)
print(tensorflow.switch.tf32)
with lowprec.fp32_guard():
    print(tensorflow.switch.tf32)
print(tensorflow.switch.tf32)
"""


def test_a_switch_that_the_program_sets_is_kept_and_told_under_the_guard() -> None:
    write(LIBRARY, "tensorflow.py")
    seen = start(write(SETS), under=GUARD)
    assert seen.out == "True\nFalse\nTrue\n"
    assert seen.err == (
        "lowprec run --guard: tensorflow: config.experimental.tensor_float_32_execution = True was set by the program, "
        "and is kept\n"
    )
    assert start(write(SETS), under=("--mode", "fp32")) == (0, "True\nFalse\nTrue\n", "")


# -- PyTorch and JAX ------------------------------------------------------------------------------

REAL = """
import threading
import lowprec

def told(*words):
    if "torch" in words:
        import torch
        if "set" in words:
            torch.set_float32_matmul_precision("medium")
        m, n = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
        exact = m.double() @ n.double()
        error = float(((m @ n).double() - exact).norm() / exact.norm())
        print(torch.get_float32_matmul_precision(), 5e-4 < error < 1e-2, error < 1e-5, flush=True)
    if "jax" in words:
        import jax
        print(jax.config.jax_default_matmul_precision, flush=True)

if __name__ == "__main__":
    import multiprocessing, sys
    thread = threading.Thread(target=told, args=sys.argv[1:])
    thread.start()
    thread.join()
    told(*sys.argv[1:])
    child = multiprocessing.get_context("spawn").Process(target=told, args=sys.argv[1:])
    child.start()
    child.join()
"""


def has_bf16_units() -> bool:
    from lowprec.backends.cpu import cpuinfo

    return "avx512_bf16" in cpuinfo.cpu_flags() and sys.platform == "linux"


@pytest.mark.parametrize(
    ("under", "word", "is_full"),
    [(("--mode", "bf16"), "medium", False), (GUARD, "highest", True)],
    ids=["mode", "guard"],
)
def test_pytorch(under: Sequence[str], word: str, is_full: bool) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    seen = start(write(REAL), "torch", under=under)
    # A CPU without bfloat16 units computes in full FP32 whatever the switch says.
    low = not is_full and has_bf16_units()
    # 2^-9 per operand for bfloat16, so about 2e-3; FP32's own 2^-24 gives 3e-7.
    assert seen == (0, 3 * f"{word} {low} {not low}\n", "")


def test_pytorch_set_by_the_program_under_the_guard() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    seen = start(write(REAL), "torch", "set", under=GUARD)
    low = has_bf16_units()
    assert (seen.code, seen.out) == (0, 3 * f"medium {low} {not low}\n")
    said = "lowprec run --guard: torch: get_float32_matmul_precision() = 'medium', "
    assert [line.startswith(said) for line in seen.err.splitlines()] == [True, True]


@pytest.mark.parametrize(
    ("under", "word"), [(("--mode", "bf16"), "bfloat16"), (GUARD, "highest")], ids=["mode", "guard"]
)
def test_jax(under: Sequence[str], word: str) -> None:
    pytest.importorskip("jax", reason="jax is not installed")
    assert start(write(REAL), "jax", under=under) == (0, 3 * f"{word}\n", "")


# -- the command line -----------------------------------------------------------------------------


class Started(NamedTuple):
    program: list[str]
    variables: dict[str, str]
    err: str


@pytest.fixture
def started(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Started]:
    """What ``lowprec run`` with these words would start."""
    write("")
    write("", "-m.py")

    def run(*words: str) -> Started:
        found: list[tuple[Sequence[str], Mapping[str, str]]] = []
        monkeypatch.setattr(launcher, "start", lambda *what: found.append(what) or 0)
        code, out, err = command("run", *words)
        assert (code, out) == (0, "")
        ((program, variables),) = found
        own = [sys.executable, *launcher.interpreter_options(sys.orig_argv)]
        assert program[: len(own)] == own
        return Started(list(program[len(own) :]), dict(variables), err)

    return run


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("script.py", "script.py"),
        ("script.py --mode fp16 --help", "script.py --mode fp16 --help"),
        ("script.py -- a", "script.py -- a"),
        ("-- script.py -- a", "script.py -- a"),
        ("-m module", "-m module"),
        ("-m module --guard -m x -- y", "-m module --guard -m x -- y"),
        ("-- -m module -x", "-m module -x"),
        ("-mmodule x", "-m module x"),
        ("-", "-"),
        ("- -x", "- -x"),
        ("-- -m.py -x", "-- -m.py -x"),
    ],
)
def test_words(started: Callable[..., Started], words: str, program: str) -> None:
    assert started(*TF32, *words.split()).program == program.split()


@pytest.mark.parametrize(
    ("words", "before", "after", "note"),
    [
        (TF32, {}, ("tf32", None, None, "tf32"), ""),
        (TF32, {"LOWPREC_MATH_MODE": "bf16"}, ("tf32", None, None, "tf32"), ""),
        ((*TF32, "--force"), {}, (None, "tf32", None, "tf32"), ""),
        ((*TF32, "--force"), {"LOWPREC_FORCE_MATH_MODE": "bf16"}, (None, "tf32", None, "tf32"), ""),
        (TF32, {"LOWPREC_FORCE_MATH_MODE": "tf32"}, ("tf32", "tf32", None, "tf32"), ""),
        (
            TF32,
            {"LOWPREC_FORCE_MATH_MODE": "bf16"},
            (None, "bf16", None, "bf16"),
            "LOWPREC_FORCE_MATH_MODE=bf16 overrules --mode tf32",
        ),
        (
            TF32,
            {"LOWPREC_FP32_GUARD": "1"},
            (None, None, "1", "fp32_guard"),
            "LOWPREC_FP32_GUARD overrules --mode tf32",
        ),
        (GUARD, {"LOWPREC_FORCE_MATH_MODE": "bf16"}, (None, "bf16", "1", "fp32_guard"), ""),
    ],
)
def test_what_the_environment_says_already(
    started: Callable[..., Started],
    monkeypatch: pytest.MonkeyPatch,
    words: Sequence[str],
    before: Mapping[str, str],
    after: tuple[str | None, ...],
    note: str,
) -> None:
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    found = started(*words, "script.py")
    names = ("LOWPREC_MATH_MODE", "LOWPREC_FORCE_MATH_MODE", "LOWPREC_FP32_GUARD", "LOWPREC_RUN")
    assert tuple(map(found.variables.get, names)) == after
    assert found.err == (f"lowprec run: {note}\n" if note else "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "one of the arguments --mode --guard is required"),
        ("script.py", "one of the arguments --mode --guard is required"),
        ("--mode tf32 --guard script.py", "--guard: not allowed with argument --mode"),
        ("--mode tf23 script.py", "'tf23' is not a math mode; choose one of: fp32, "),
        ("--mode bf16x9 script.py", "bf16x9 is not available in this version"),
        ("--guard --force script.py", "--force goes with --mode"),
        ("--mode tf32", "give a script, or -m and a module"),
        ("--guard -m", "give a script, or -m and a module"),
        ("--guard --", "give a script, or -m and a module"),
        ("--guard --verbose script.py", "unrecognized arguments: --verbose"),
        ("--guard missing.py", "lowprec: cannot read missing.py: No such file or directory"),
        ("--guard script.py/x", "lowprec: cannot read script.py/x: Not a directory"),
    ],
)
def test_mistakes(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, words: str, says: str
) -> None:
    monkeypatch.setattr(launcher, "start", None)
    write("")
    assert says in refused("run", *words.split())


@pytest.mark.parametrize("variable", ["LOWPREC_FORCE_MATH_MODE", "LOWPREC_FP32_GUARD"])
def test_a_bad_variable_is_refused_before_anything_runs(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setattr(launcher, "start", None)
    monkeypatch.setenv(variable, "fp17")
    assert f"{variable}: " in refused("run", *TF32, write(""))


def test_a_script_that_must_not_be_read(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*how: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # Not by the file's mode: root may read every file.
    script = write("")
    monkeypatch.setattr(Path, "open", refuse)
    assert "cannot read script.py: Permission denied" in refused("run", *TF32, script)


@posix
def test_a_pipe_is_left_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*how: object) -> None:
        raise AssertionError("opened")

    os.mkfifo("pipe")
    monkeypatch.setattr(Path, "open", refuse)
    run_command._check("pipe")


# -- the launcher ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "flag"), [("-I", "isolated"), ("-E", "ignore_environment"), ("-S", "no_site")]
)
def test_a_python_that_ignores_the_environment_is_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, option: str, flag: str
) -> None:
    flags = SimpleNamespace(isolated=0, ignore_environment=0, no_site=0)
    setattr(flags, flag, 1)
    fake = SimpleNamespace(executable=sys.executable, flags=flags, orig_argv=sys.orig_argv)
    monkeypatch.setattr(launcher, "sys", fake)
    monkeypatch.setattr(launcher, "start", None)
    assert f"this Python was started with {option}, " in refused("run", *GUARD, write(""))


def test_a_folder_that_pythonpath_cannot_name_is_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "STARTUP", os.pathsep.join("ab"))
    assert "PYTHONPATH cannot name it" in refused("run", *GUARD, write(""))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("python script.py -W error", ""),
        ("python -m lowprec -u", ""),
        ("python -mlowprec -u", ""),
        ("python - -u", ""),
        ("python -c code -u", ""),
        ("python -- script.py", ""),
        ("python", ""),
        ("python -W error -Xdev -X utf8 -m lowprec", "-W error -Xdev -X utf8"),
        ("python -Wd -OOum lowprec -X", "-Wd -OOu"),
        ("python -BW error -EX dev script.py", "-B -W error -E -X dev"),
        ("python -BWerror script.py", "-B -Werror"),
        ("python --check-hash-based-pycs never -B x.py", "--check-hash-based-pycs never -B"),
    ],
)
def test_interpreter_options(words: str, options: str) -> None:
    assert launcher.interpreter_options(words.split()) == options.split()


def test_an_interpreter_that_cannot_be_started(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_replace", REPLACE)
    monkeypatch.setattr(launcher, "python_command", lambda program: ["./missing", *program])
    message = refused("run", *TF32, write(""))
    assert message == "lowprec: run: cannot start ./missing: No such file or directory\n"


def test_where_a_process_cannot_be_replaced_the_exit_code_is_handed_on(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_WAYS", {os.name: launcher.wait_for})
    assert command("run", *TF32, write("import sys; sys.exit(7)")).code == 7


@posix
def test_where_a_process_cannot_be_replaced_the_program_decides_about_ctrl_c() -> None:
    child = "import os, signal, time; time.sleep(0.3); os.kill(os.getppid(), signal.SIGINT); time.sleep(0.5)"
    code = (
        "import os, sys; from lowprec.cli.launcher import wait_for\n"
        f"sys.exit(wait_for([sys.executable, '-c', {child + '; os._exit(9)'!r}], os.environ))"
    )
    assert start("-c", code) == (9, "", "")
