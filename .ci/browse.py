"""Open the built page of results in headless Chromium: each chart is drawn, and its menus change it.

usage: browse.py [CHROMIUM]

Without an argument the script finds Chromium, or installs it by apt-get where the user is allowed to. Without Chromium
it prints a message and succeeds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HTML = Path(__file__).resolve().parent.parent / "docs" / "_build" / "html"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=8000", "--dump-dom",
)  # fmt: skip
#: A menu of each chart, and a choice in it other than the default.
CHOICES = {"speed": ("type", "bfloat16"), "errors": ("operands", "positive"), "overhead": ("arrays", "torch")}


def find() -> str | None:
    """Return Chromium's path; install it where that is possible."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None and shutil.which("apt-get") and getattr(os, "geteuid", lambda: 1)() == 0:
        for arguments in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", "chromium"]):
            subprocess.run(["apt-get", *arguments], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found = shutil.which("chromium")
    return found


def rendered(chromium: str, script: str) -> dict[str, str]:
    """Return the drawing of each chart after a script has run in the page."""
    page = HTML / "_browse.html"
    text = (HTML / "results.html").read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            command = [chromium, *FLAGS, f"--user-data-dir={profile}", page.as_uri()]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    finally:
        page.unlink()
    found = {}
    for name in CHOICES:
        drawing = re.search(rf'id="chart-{name}".*?(<svg.*?</svg>)', done.stdout, re.DOTALL)
        found[name] = drawing[1] if drawing else ""
    return found


def main(arguments: list[str]) -> int:
    """Compare the charts before and after a choice."""
    chromium = arguments[0] if arguments else find()
    if chromium is None:
        print("no Chromium here; the page of results was not opened")
        return 0
    choose = "".join(
        f'{{const s=document.querySelector("#chart-{chart} select[name={menu}]");s.value="{value}";'
        's.dispatchEvent(new Event("input",{bubbles:true}));'
        's.dispatchEvent(new Event("change",{bubbles:true}))}'
        for chart, (menu, value) in CHOICES.items()
    )
    before, after = rendered(chromium, ""), rendered(chromium, f"setTimeout(()=>{{{choose}}},3000)")
    failed = 0
    for chart in CHOICES:
        marks = before[chart].count("aria-roledescription")
        good = marks > 5 and after[chart] not in ("", before[chart])
        failed += not good
        print(f"{chart}: {marks} marks, {'changed' if after[chart] != before[chart] else 'unchanged'} by the menu")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
