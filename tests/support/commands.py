"""Commands in a child of this process, with standard streams of their own and without the start of a Python."""

import io
import os
import signal
import sys
import tempfile
import traceback
from contextlib import ExitStack
from typing import Any, NamedTuple

from lowprec.cli import main
from lowprec.policy import environment

#: A stream that is returned; None is one that is closed from the start.
CAPTURED = object()


class Ended(NamedTuple):
    """The end of a command, with its streams as bytes or text; ``code`` is negative after a signal."""

    code: int
    out: Any
    err: Any


def forked(act):
    """Call a function in a child of this process; return its exit code, which the function returns."""
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(120)  # ends a deadlock
            code = act()
        except BaseException:  # noqa: BLE001 - as Python does at the end of a program
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(
    *words, stdin = b"", out = CAPTURED, err = CAPTURED,
    encoding = "utf-8", unbuffered = False, options = (),
    variables = None,
):  # fmt: skip
    """Run ``python OPTIONS -m lowprec WORDS``; ``lowprec run`` replaces the child by a Python with these options."""
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        files[0].write(stdin or b"")
        files[0].seek(0)
        streams = [
            file if given is CAPTURED else given
            for file, given in zip(files, (None, out, err), strict=True)
        ]
        streams[0] = None if stdin is None else files[0]

        def act():
            _take(streams, encoding, unbuffered)
            os.environ.update(variables or {})
            environment.refresh()
            sys.argv = ["lowprec", *map(str, words)]
            sys.orig_argv = [sys.executable, *options, "-m", *sys.argv]
            code = main(sys.argv[1:])
            if sys.stdout is not None:
                sys.stdout.flush()
            return code

        code = forked(act)
        for file in files:
            file.seek(0)
        return Ended(code, files[1].read(), files[2].read())


def _take(streams, encoding, unbuffered):
    """Have these as standard streams, as a Python that starts with them."""
    for number, stream in enumerate(streams):
        if stream is None:
            os.close(number)
        else:
            os.dup2(stream.fileno(), number)
    made = []
    for number, stream in enumerate(streams):
        if stream is None:
            made.append(None)
            continue
        buffering = 0 if unbuffered and number else -1
        raw = open(number, "wb" if number else "rb", buffering)  # noqa: SIM115
        text = io.TextIOWrapper(raw, encoding, line_buffering=number == 2, write_through=unbuffered)
        made.append(text)
    sys.stdin, sys.stdout, sys.stderr = made
