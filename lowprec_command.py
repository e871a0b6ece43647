"""Entry points of the distribution, which do not import lowprec."""

from __future__ import annotations

import os
import signal
from typing import Any


def main() -> int:
    """Run the command line. Until lowprec is imported, Ctrl-C ends the process without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lowprec.cli import main

    signal.signal(signal.SIGINT, handler)
    return main()


def hook_directories() -> list[str]:
    """Return the folder with PyInstaller's hook."""
    return [os.path.join(os.path.dirname(os.path.abspath(__file__)), "lowprec", "packing")]


def pytest_addoption(parser: Any) -> None:
    """Add the option of pytest; nothing is imported until it is given."""
    text = "fail tests at whose beginning or end a loaded library multiplies float32 in less than this precision"
    parser.getgroup("lowprec").addoption(
        "--lowprec-require", metavar="PRECISION", help=f"{text}: fp32, split, tf32"
    )


def pytest_configure(config: Any) -> None:
    """Register the check of each test if its option is given."""
    if config.getoption("lowprec_require"):
        from lowprec import pytest_plugin

        config.pluginmanager.register(pytest_plugin)
