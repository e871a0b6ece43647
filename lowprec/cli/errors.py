"""The exception that is reported in one line, without a traceback."""

from __future__ import annotations

from lowprec.errors import LowprecError

#: Exit code after a mistake of the user.
USAGE = 2


class CommandError(LowprecError):
    """A mistake in the command line or in a file that it names; the message is shown as it is."""
