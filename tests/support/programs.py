"""Programs in processes of their own, under plain python or ``lowprec run``; and functions in several threads."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import pytest

from support.commands import Ended, in_child

TF32 = ("--mode", "tf32")
GUARD = ("--guard",)
posix = pytest.mark.skipif(os.name != "posix", reason="signals and fork are POSIX's")

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


def write(text, name="script.py"):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text).lstrip("\n"))
    return name


def start(
    *words, under = None, options = (), stdin = "",
    variables = None,
):  # fmt: skip
    """Run a program under plain python, or under ``lowprec run`` with these options."""
    if under is not None and not options and hasattr(os, "fork"):
        done = in_child("run", *under, *words, stdin=stdin.encode(), variables=variables)
        return Ended(done.code, done.out.decode(), done.err.decode())
    launched = [] if under is None else ["-m", "lowprec", "run", *under]
    done = subprocess.run(
        [sys.executable, *options, *launched, *words], input=stdin, capture_output=True, text=True, check=False,
        env={**os.environ, **(variables or {})}, timeout=120,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


def run_python(code, *arguments, warn="ignore::DeprecationWarning", timeout=240, **variables):
    """Run a program that must end without an error; return its output. A hang is a failure."""
    done = subprocess.run(
        [sys.executable, "-W", warn, "-c", dedent(code), *arguments],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip() + done.stderr.strip()


def in_threads(count, function):
    """Call a function with 0, 1, 2, ..., each in a thread, started together and switched often; return the results."""
    start, interval = threading.Barrier(count), sys.getswitchinterval()

    def call(number):
        start.wait()
        return function(number)

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(call, range(count)))
    finally:
        sys.setswitchinterval(interval)


def without_note(seen):
    """Remove the line about a mode that affected no product."""
    lines = seen.err.splitlines(keepends=True)
    return seen._replace(
        err="".join(line for line in lines if "no product was affected" not in line)
    )


def same(*words, under=TF32, **how):
    """Assert that a program looks the same under lowprec, and return how it looks."""
    plain, launched = start(*words, **how), start(*words, under=under, **how)
    assert without_note(launched) == plain
    return plain
