"""Words that make a reader stop: the package, the documentation and the changelog do without them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    [
        *(ROOT / "lowprec").rglob("*.py"),
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/examples/*.py"),
    ]
)

WORDS = re.compile(
    r"""\b(?:
        told | tells? | li(?:es?|ain) | stands? | stood | sits? | sat
        | nobody | somebody | who(?:ever)? | anybody | anyone | roads? | mend(?:s|ed|ing)?
        | anew | once\ more | beside | aside | (?:leave|left|leaving)s?\ away | in\ the\ place\ of
        | no\ say | deserves? | welcome | by\ chance | the\ truth
        | elsewhere | obstacles? | objections? | ambient | helpers? | news
    )\b
    | (?: ^ | [.,;:(]\ | \b(?:of|by|in|than|to|and|or|from|for|with|on|is|are|as|at|into|under|but|not)\ )
      what\ (?:a|an|the|is|are|was|were|it|they|would|\w+s|\w+ed)\b""",
    re.IGNORECASE | re.VERBOSE,
)


def findings(text):
    """Return the words of a text that have a plainer substitute."""
    return [
        match.group()
        for line in text.splitlines()
        for match in WORDS.finditer(line.strip(" #:*|-\"'`"))
    ]


@pytest.mark.parametrize(
    "text",
    [
        "The plan tells the mode.",
        "as cuBLASLt was told",
        "Nobody waits for it.",
        "of what is left",
        "What a call has",
    ],
)
def test_words_are_found(text):
    assert findings(text)


def test_the_names_of_tests_are_plain():
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = [
        name.replace("_", " ") for name in re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)
    ]
    assert len(names) > 1000
    assert {word for name in names for word in findings(name)} == set()


def test_the_language_is_plain():
    found = {path.relative_to(ROOT).as_posix(): findings(path.read_text()) for path in FILES}
    assert {name: words for name, words in found.items() if words} == {}
