"""Results of ``check`` as files: a table of comma-separated values, a plot."""

from __future__ import annotations

import argparse
import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

from lowprec import plotting
from lowprec.checking import Comparison
from lowprec.checking.figures import errors_by_speed, speeds_and_errors
from lowprec.cli.output import flush
from lowprec.errors import LowprecError
from lowprec.util.atomic import write_file


def check_exports(options: argparse.Namespace) -> None:
    """Raise for files that cannot be written, before measuring."""
    for path in (options.csv, options.plot):
        if path is not None:
            check_output(path)
    if options.plot is not None:
        plotting.image_format(options.plot)


def export(options: argparse.Namespace, comparisons: Sequence[Comparison]) -> None:
    if options.csv is not None:
        rows = []
        for case in comparisons:
            a, b = (f"{x.dtype} {'x'.join(map(str, x.shape))}" for x in (case.a, case.b))
            rows += [{"case": case.name, "a": a, "b": b, **row.to_dict()} for row in case.rows]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        write_output(options.csv, text.getvalue().encode())
    if options.plot is not None:
        draw = speeds_and_errors if len(options.sizes or ()) > 1 else errors_by_speed
        write_output(
            options.plot,
            plotting.image(lambda: draw(comparisons), plotting.image_format(options.plot)),
        )


def check_output(path: str) -> None:
    """Raise if a file cannot be written; called before the computation."""
    target, reason = Path(path), ""
    try:
        if not path:
            reason = "the name is empty"
        elif target.is_dir():
            reason = "it is a folder"
        elif target.exists() and not target.is_file():
            reason = "" if os.access(path, os.W_OK) else "it is not writable"
        elif not (folder := target.resolve().parent).is_dir():
            reason = f"the folder {folder} does not exist"
        elif not os.access(folder, os.W_OK | os.X_OK):
            reason = f"the folder {folder} is not writable"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise LowprecError(f"cannot write {path or repr(path)}: {reason}")


def write_output(path: str, content: bytes) -> None:
    """Write a file of exactly this name, completely or not at all, or append to a pipe, a device or an open file."""
    is_open = path.startswith(("/dev/fd/", "/dev/std"))
    try:
        if is_open or (Path(path).exists() and not Path(path).is_file()):
            flush()  # keeps the order of the output
            with open(path, "ab") as file:
                file.write(content)
        else:
            write_file(path, content)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LowprecError(f"cannot write {path}: {error.strerror or error}") from None
