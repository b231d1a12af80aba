"""The README and the pages of docs/, whose blocks of code the tests run."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text()
    for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
}


def blocks(language: str, *pages: str) -> list[str]:
    """The fenced blocks of a language: of these pages, or of all."""
    text = "\n".join(PAGES[page] for page in pages or PAGES)
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def block(mark: str, language: str = "python") -> str:
    """The one block with these words; where it stands on several pages, it is the same on each."""
    found = {each for each in blocks(language) if mark in each}
    assert len(found) == 1, f"{len(found)} different blocks have {mark!r}"
    return found.pop()


def command(pattern: str) -> str:
    """The one line of the pages' shell commands that matches."""
    found = {line for each in blocks("bash") for line in each.splitlines() if re.fullmatch(pattern, line)}
    assert len(found) == 1, found
    return found.pop()
