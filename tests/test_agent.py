"""What an agent makes of its ranks' output."""

from __future__ import annotations

import pytest

from flytekitplugins.daskpytorch.agent import MAX_LINE, _Lines


def lines_of(*pieces: bytes) -> list[list[str]]:
    lines = _Lines()
    return [lines.feed(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ((b"one\ntwo\n",), [["one", "two"]]),
        ((b"on", b"e\ntw", b"o\n"), [[], ["one"], ["two"]]),
        ((b"10%\r20%\r", b"\n30%\r\n"), [["10%", "20%"], ["30%"]]),
        ((b"\n\n  \nx\n",), [["x"]]),
        ((b"the end", b""), [[], ["the end"]]),
        ((b"one\n", b""), [["one"], []]),
        ((b"caf\xc3", b"\xa9\n"), [[], ["caf\u00e9"]]),
        ((b"bad \xff\n", b"\xc3", b""), [["bad \ufffd"], [], ["\ufffd"]]),
    ],
)
def test_lines_of_a_stream(pieces: tuple[bytes, ...], lines: list[list[str]]) -> None:
    assert lines_of(*pieces) == lines


def test_a_line_without_an_end_goes_on_in_pieces_and_nothing_more_of_it_is_held() -> None:
    lines = _Lines()
    passed_on = [line for _ in range(100) for line in lines.feed(b"x" * 50_000)]
    assert 5_000_000 - MAX_LINE < sum(map(len, passed_on)) <= 5_000_000
    assert max(map(len, passed_on)) <= MAX_LINE
    assert "".join([*passed_on, *lines.feed(b"y\n")]) == "x" * 5_000_000 + "y"
