"""The pieces of a page: texts, key figures, tables and pictures, made of untrusted texts."""

import base64
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files as files_of
from typing import Literal

from flytekitplugins.daskpytorch.process.streams import one_line

__all__ = [
    "Picture",
    "Tone",
    "alert",
    "card",
    "document",
    "figures",
    "grid",
    "page",
    "pictures",
    "section",
    "status",
    "table",
    "text",
]

Tone = Literal["busy", "good", "bad", "warn", "idle"]
"""Meaning of a colour on a page, for example `bad` for a failure."""
NUMBER = re.compile(r"([-+]?[\d.,]*\d(e[-+]?\d+)?( ?(%|s|ms|GiB|MiB))?|nan|-?inf)?")
LARGE = 1e15
NUM_COLOURS = 8
MAX_NAME = 60
MAX_TEXT = 20_000
"""A longer text loses its middle."""
URL = re.compile(r"https?://[^\s<>\"']+")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture on a page of a Deck.

    Examples:
        >>> import io
        >>> from PIL import Image
        >>> from flytekitplugins.daskpytorch import report
        >>> file = io.BytesIO()
        >>> Image.new("RGB", (64, 48), "navy").save(file, "PNG")
        >>> html = report.pictures([report.Picture(file=file.getvalue(), width=128, height=96, caption="beagle 0.93")])
    """

    file: bytes
    """A PNG or JPEG file."""
    width: int
    """Width on the page, in pixels."""
    height: int
    """Height on the page, in pixels."""
    caption: str
    """Text below the picture, and alternative text for readers who cannot see the picture."""
    tone: Tone | None = None
    """Colour of the frame. None: a plain frame."""


def page(*pieces: str) -> str:
    """Return the HTML of a Deck: the pieces from top to bottom, with their shared styles and scripts once.

    The page follows the reader's settings: light or dark, wide or narrow. The page loads nothing from a server. One
    task may have several pages.

    Args:
        pieces: Pieces of this module, or your own HTML.

    Examples:
        A Deck for any task:

        >>> from flytekit import Deck
        >>> from flytekitplugins.daskpytorch import report
        >>> models = report.table(("model", "loss"), [("small", 0.24), ("large", 0.21)])
        >>> deck = Deck("Names", report.page(report.text("of 4,812 names"), models))
    """
    return shared() + element("div", "".join(pieces), "dpt dpt-page")


def document(title: str, *pieces: str) -> str:
    """Return a page as a complete HTML file for a browser.

    Examples:
        >>> from pathlib import Path
        >>> from flytekitplugins.daskpytorch import report
        >>> written = Path("report.html").write_text(report.document("Names", report.figures({"loss": 0.21})))
    """
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{text_of(title)}</title>'
    body = element("div", element("div", page(*pieces), "active"), id="flyte-frame-container")  # as in a Deck
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


def section(title: str, *pieces: str, note: str = "") -> str:
    """Return pieces under a heading, with an optional remark beside the heading.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> html = report.section("Data", report.text("4,812 names"), note="of 2026-03-01")
    """
    remark = " " + element("small", text_of(note)) if note else ""
    content = element("h2", text_of(title) + remark) + "".join(pieces)
    return element("section", content, "dpt-section dpt-stack")


def grid(*pieces: str, least: int = 420) -> str:
    """Return pieces side by side, as many in a row as fit.

    Args:
        pieces: Pieces of about the same height.
        least: Minimum width of each piece, in pixels.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> curves = [report.line_chart(name, {name: [(0, 2.3), (1, 1.1)]}, "epoch") for name in ("loss", "error")]
        >>> html = report.grid(*curves, least=300)
    """
    return element("div", "".join(pieces), "dpt-grid", style=f"--least:{least:d}px")


def card(title: str, *pieces: str) -> str:
    """Return pieces in a frame, under a small heading. An empty title gives no heading.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> html = report.card("Champion", report.figures({"loss": 0.21, "version": 7}))
    """
    heading = element("h3", text_of(title)) if title else ""
    return element("div", heading + "".join(pieces), "dpt-card dpt-stack")


def text(words: object, *, quiet: bool = False) -> str:
    """Return a paragraph. With `quiet`, the letters are small and grey.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> html = report.text("Of 4,812 names, 481 were held out.", quiet=True)
    """
    return element("p", text_of(words), "dpt-text dpt-soft" if quiet else "dpt-text")


def status(state: str, title: str, *, tone: Tone = "idle", note: str = "", done: float | None = None) -> str:
    """Return the head of a page: its state, its title and its progress.

    Args:
        state: The state, in a word or two.
        title: The title of the page.
        tone: The colour of the state.
        note: A remark at the right.
        done: The share that is done, from 0 to 1, drawn as a bar. None: no bar.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> html = report.status("training", "pet names", tone="busy", note="2 ranks", done=0.4)
    """
    content = element("span", text_of(state), f"dpt-chip dpt-{tone}") + element("h1", text_of(title))
    if note:
        content += element("span", text_of(note), "dpt-soft")
    if done is not None:
        percent = f"{100 * min(1.0, max(0.0, done)):.0f}"
        bar = element("span", style=f"width:{percent}%")
        progress = {"aria_label": "done", "aria_valuemin": 0, "aria_valuemax": 100, "aria_valuenow": percent}
        content += element("div", bar, f"dpt-bar dpt-{tone}", role="progressbar", **progress)
    return element("header", content, "dpt-status")


def alert(title: str, words: str = "", *, tone: Tone = "bad") -> str:
    """Return a box that catches the reader's eye. Its text may be long, such as a traceback.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> html = report.alert("The challenger was not better", "loss 0.24, the champion's 0.21", tone="warn")
    """
    content = element("strong", text_of(title))
    if words:
        content += element("pre", text_of(words), tabindex=0)
    return element("div", content, f"dpt-alert dpt-{tone}", role="alert")


def figures(values: Mapping[str, object]) -> str:
    """Return key figures in a row.

    Args:
        values: For each name a value, or a value and a remark. Fractions have four digits. NaN and infinity are red.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> html = report.figures({"accuracy": 0.93, "time": ("3 min", "on 2 ranks")})
    """
    return element("dl", "".join(_figure(*item) for item in values.items()), "dpt-figures")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table. Cells are escaped, numbers are aligned, and web addresses are links.

    A table with many rows scrolls below its header.

    Raises:
        ValueError: A row has more or fewer cells than the header.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> html = report.table(("name", "length"), [("Bello", 5), ("Mia", 3)])
    """
    cells = [[text_of(cell) for cell in row] for row in rows]
    return cells_table([text_of(name) for name in header], cells)


def pictures(files: Iterable[Picture]) -> str:
    """Return pictures side by side, each with its caption.

    Examples:
        >>> from flytekitplugins.daskpytorch import Picture, report
        >>> from PIL import Image
        >>> drawn = [Picture.of(Image.new("L", (28, 28)), f"digit {number}") for number in range(3)]
        >>> html = report.pictures(
        ...     report.Picture(file=each.png, width=56, height=56, caption=each.caption) for each in drawn
        ... )
    """
    shown = list(files)
    least = max((picture.width for picture in shown), default=0) + 56
    return element("div", "".join(map(_picture, shown)), "dpt-pictures", style=f"--least:{least}px")


def _picture(picture: Picture) -> str:
    kind = "png" if picture.file.startswith(b"\x89PNG") else "jpeg"
    data = f"data:image/{kind};base64,{base64.b64encode(picture.file).decode()}"
    caption = element("figcaption", text_of(picture.caption))
    image = f'<img src="{data}" width="{picture.width}" height="{picture.height}" alt="{text_of(picture.caption)}">'
    return element("figure", image + caption, f"dpt-{picture.tone}" if picture.tone else "")


def _figure(name: str, value: object) -> str:
    shown, remark = value if isinstance(value, tuple) else (value, "")
    is_bad = isinstance(shown, float) and not math.isfinite(shown)
    small = element("small", text_of(remark)) if remark else ""
    what = element("dd", text_of(shown) + small, "dpt-bad" if is_bad else "")
    return element("div", element("dt", text_of(name_of(name))) + what)


def cells_table(header: Sequence[str], cells: Sequence[Sequence[str]], class_: str = "") -> str:
    columns = list(zip(*cells, strict=True)) if cells else []
    numeric = [any(column) and all(NUMBER.fullmatch(cell) for cell in column) for column in columns]
    kinds = ["dpt-num" if is_number else "" for is_number in numeric] or [""] * len(header)
    head = "".join(element("th", name, kind, scope="col") for name, kind in zip(header, kinds, strict=True))
    body = "".join(
        element("tr", "".join(element("td", cell, kind) for cell, kind in zip(row, kinds, strict=True)))
        for row in cells
    )
    content = element("thead", element("tr", head)) + element("tbody", body)
    return element(
        "div", element("table", content), f"dpt-scroll {class_}".rstrip(), tabindex=0, role="group", aria_label="table"
    )


# ---- HTML


def element(tag: str, content: str = "", class_: str = "", **attributes: object) -> str:
    named = {"class": class_ or None, **{name.rstrip("_").replace("_", "-"): at for name, at in attributes.items()}}
    written = "".join(f' {name}="{_clean(at)}"' for name, at in named.items() if at is not None)
    return f"<{tag}{written}>{content}</{tag}>"


def text_of(value: object) -> str:
    """Return any value as HTML: escaped texts, short numbers, and web addresses as links."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return brief(value)
    text = str(value)
    if URL.fullmatch(text):
        return element("a", _clean(text), href=text, target="_blank", rel="noopener noreferrer")
    return _clean(text)


def brief(value: float) -> str:
    """Return a number as a short text: whole from 1,000 on, else with four digits. From 1e15 on with an exponent."""
    if isinstance(value, int):
        return f"{value:,}"
    is_whole = value.is_integer() or abs(value) >= 1_000
    return f"{value:,.0f}" if is_whole and abs(value) < LARGE else f"{value:.4g}"


def name_of(text: str) -> str:
    return one_line(text, MAX_NAME)


@functools.cache
def shared() -> str:
    assets = files_of(__package__) / "assets"
    styles, plot, ours = (
        (assets / name).read_text(encoding="utf-8") for name in ("report.css", "uPlot.iife.min.js", "report.js")
    )
    styles = (assets / "uPlot.min.css").read_text(encoding="utf-8") + styles
    again = "if (window.dptReport) return window.dptReport();"  # another Deck of the page has the same script
    script = f"(() => {{ {again}\n{plot}\n{ours}\nwindow.dptReport = drawAll; }})();"
    return f"<style>{styles}</style><script>{script}</script>"


def _clean(value: object) -> str:
    text = str(value)
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]}\n…\n{text[-MAX_TEXT // 2 :]}"
    return escape(text if text.isprintable() else "".join(map(_fit, text)))


def _fit(letter: str) -> str:
    if letter.isprintable() or letter == "\n":
        return letter
    return " " if letter.isspace() else "\N{REPLACEMENT CHARACTER}"
