"""``python -m lowprec``: the command line without the installed script."""

from __future__ import annotations

import sys

from lowprec_command import main

if __name__ == "__main__":
    sys.exit(main())
