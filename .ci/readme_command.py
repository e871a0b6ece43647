"""Print a command of the README, found by its marker.

A marker is an HTML comment, `<!-- command: NAME -->`, and the command is the one line of the fenced
block that follows it. CI runs the command of the README, which is its only copy.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def command(text: str, name: str) -> str:
    """Return the one-line command under the marker `name`."""
    marker = re.escape(f"<!-- command: {name} -->")
    found = re.findall(rf"^{marker}\s*^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"the marker 'command: {name}' stands before {len(found)} blocks, not 1")
    lines = found[0].splitlines()
    if len(lines) != 1 or not lines[0].strip():
        raise ValueError(f"the block under 'command: {name}' has {len(lines)} lines, not 1")
    return lines[0].strip()


def main(arguments: list[str]) -> int:
    """Print the command with this name; return 1 unless the README has it exactly once."""
    if len(arguments) != 1:
        print("usage: readme_command.py NAME", file=sys.stderr)
        return 2
    try:
        print(command(README.read_text(encoding="utf-8"), arguments[0]))
    except ValueError as error:
        print(f"README.md: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
