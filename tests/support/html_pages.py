"""Reads pages of reports: elements, texts, charts and tables. Texts that a page must bear."""

import html
import json
import re
from html.parser import HTMLParser
from typing import Any

ODD_NAMES = [
    *("", "_private", "$", "$\\frac{$", "<script>alert(1)</script>", "--></svg><b>", "</script><b>"),
    *('"><img src=x onerror=alert(1)>', "x" * 10_000, "a\nb", "\x1b[31mred\x1b[0m", "\x00", "\ud800", "&amp;"),
    *("損失", "\u202eback"),
]


class Parts(HTMLParser):
    """The elements of a page, each of which is closed if it was opened."""

    VOID = ("img", "meta", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def chart_data(page: str) -> list[dict[str, Any]]:
    """Data that the script draws, of each chart of a page."""
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)]


def rows_of(page: str) -> list[list[str]]:
    """The cells of all tables."""
    rows = re.findall("<tr>(.*?)</tr>", page, re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall("<td[^>]*>(.*?)</td>", row, re.DOTALL)] for row in rows]
