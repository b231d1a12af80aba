"""Docstrings and pages keep to plain sentences: shares of sentences that read badly stay below a ceiling."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator

import pytest

from pages import PAGES, REPOSITORY

END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'`*\[(])")
SECTION = re.compile(r"(Args|Returns|Raises|Yields|Examples|Note|Attributes):$")
EMPTY_OPENING = re.compile(r"(It|That|What|Whether|Those|Nothing|Whoever|Of)\b")
ORPHAN = re.compile(r"\b(of it|of them|such(?! as))\b")
MAX_WORDS = 25


def sentences(paragraphs: Iterable[str]) -> list[str]:
    return [each for text in paragraphs for each in END_OF_SENTENCE.split(" ".join(text.split())) if each]


def is_unclear(sentence: str) -> bool:
    """True for a sentence that opens without a noun, or refers to "it", "them" or "such" without one."""
    return bool(EMPTY_OPENING.match(sentence) or ORPHAN.search(sentence))


def docstrings() -> Iterator[str]:
    for path in sorted((REPOSITORY / "plugins").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for statement in getattr(node, "body", []) if not isinstance(node, (ast.Lambda, ast.IfExp)) else []:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value


def paragraphs_of_docstring(text: str) -> list[str]:
    without_examples = re.sub(r"^ *>>>.*?(?=\n *\n|\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraphs = [""]
    for line in without_examples.splitlines():
        entry = re.match(r" {8,}\*{0,2}\w+: ", line)
        if not line.strip() or SECTION.match(line.strip()) or entry:
            paragraphs.append("")
        if line.strip() and not SECTION.match(line.strip()):
            paragraphs[-1] += " " + (line[entry.end() :] if entry else line)
    return paragraphs


def paragraphs_of_page(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [
        "" if re.match(r"\s*(\||#|!\[|:::|<)", line) else re.sub(r"^\s*([-*]|\d+\.) ", "\n", line)
        for line in prose.splitlines()
    ]
    return re.split(r"\n\s*\n|\n(?=\n)", re.sub(r"\]\([^)]*\)", "]", "\n".join(lines)))


def percent(found: Iterable[str], matches: Callable[[str], bool]) -> float:
    all_found = list(found)
    return 100 * sum(map(matches, all_found)) / len(all_found)


@pytest.fixture(scope="module")
def of_code() -> list[list[str]]:
    """The sentences of each docstring of the plugin."""
    return [found for text in docstrings() if (found := sentences(paragraphs_of_docstring(text)))]


@pytest.fixture(scope="module")
def of_pages() -> list[str]:
    return sentences(paragraph for text in PAGES.values() for paragraph in paragraphs_of_page(text))


def test_docstrings_name_their_subject(of_code: list[list[str]]) -> None:
    assert percent((each for found in of_code for each in found), is_unclear) <= 3
    assert percent((found[0] for found in of_code), is_unclear) <= 1.5


def test_docstrings_have_one_idea_a_sentence(of_code: list[list[str]]) -> None:
    assert percent((each for found in of_code for each in found), lambda each: ";" in each) <= 3


def test_pages_are_plain(of_pages: list[str]) -> None:
    assert percent(of_pages, is_unclear) <= 5
    assert percent(of_pages, lambda each: ";" in each) <= 4
    assert percent(of_pages, lambda each: len(each.split()) > MAX_WORDS) <= 12
