"""``lowprec run``: a program behaves as under plain python.

Each program runs twice, under ``python`` and under ``lowprec run``; what can be seen from outside must be the same.
"""

import signal
import sys
import zipfile
from pathlib import Path

import pytest

from support.programs import GUARD, TF32, same, write

pytestmark = pytest.mark.usefixtures("empty_folder")


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
@pytest.mark.sampled(2)
def test_a_program_ends_as_it_does(text, code, under):
    assert same(write(text), under=under).code == code


FACTS = """
import __main__, sys
print(__name__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
print(globals().get("__file__"), __builtins__, vars(__main__) is globals(), __doc__)
print(sys.argv, sys.path, sys.executable, sys.orig_argv[-3:])
print(sys.flags, sys.warnoptions, sys._xoptions, sys.stdout.line_buffering)
print(sorted(sys.modules.keys() - {"atexit"}), list(sys.path_importer_cache))  # the hook uses it
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
def test_a_script_sees_itself(options):
    # Python 3.10 has no -P.
    usable = [o for o in options if o != "-P" or sys.version_info >= (3, 11)]
    seen = same(write(FACTS), "--guard", "--help", "--", "-m", options=usable)
    assert "['script.py', '--guard', '--help', '--', '-m']" in seen.out


def test_a_module_sees_itself():
    write("", "package/__init__.py")
    write(FACTS, "package/part.py")
    write(FACTS, "package/__main__.py")
    assert "package.part" in same("-m", "package.part", "--help", "-m").out
    assert "package.__main__" in same("-m", "package", "x").out


def test_a_folder_and_an_archive_see_themselves():
    write(FACTS, "folder/__main__.py")
    same("folder", "argument")
    with zipfile.ZipFile("archive.zip", "w") as archive:
        archive.write("folder/__main__.py", "__main__.py")
    same("archive.zip", "argument")


@pytest.mark.parametrize(
    "words", [("-m", "missing_module"), ("empty",), ("-m", "lowprec.missing")], ids=" ".join
)
def test_errors_of_python_are_unchanged(words):
    Path("empty").mkdir()
    assert same(*words).code != 0


def test_standard_input_is_the_program_s():
    script = write("import sys\nprint(sys.stdin.readline().upper(), input())")
    assert same(script, stdin="one\ntwo\n").out == "ONE\n two\n"
    seen = same("-", "argument", stdin=f"{FACTS}\n1 / 0\n")
    assert "['-', 'argument']" in seen.out
    assert '  File "<stdin>", line 9, in <module>' in seen.err


def test_a_script_that_looks_like_an_option():
    script = write("import sys\nprint(sys.argv, __file__)", "-x.py")
    plain = same("--", script, "-y")
    assert plain.out.startswith("['-x.py', '-y']")
