"""The installed command: until lowprec is imported, Ctrl-C ends the process without a traceback."""

from __future__ import annotations

import signal


def main() -> int:
    """Import lowprec and run its command line."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lowprec.cli import main

    signal.signal(signal.SIGINT, handler)
    return main()
