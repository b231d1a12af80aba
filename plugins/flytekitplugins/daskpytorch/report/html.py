"""HTML from untrusted texts, and the style and script that all pieces of a page share."""

import functools
import re
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from flytekitplugins.daskpytorch.process.streams import one_line

MAX_NAME = 60
"""Maximum number of characters of a metric's name."""
MAX_TEXT = 20_000
"""Maximum number of characters of a text. A longer text loses its middle."""
URL = re.compile(r"https?://[^\s<>\"']+")
ADDRESS = re.compile(r"(https?|file)://[^\s<>\"']+")


@dataclass(frozen=True)
class Link:
    """Text with a link, for example in a table's cell.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> html = report.table(("run", "loss"), [(report.Link("tracker", "https://wandb.ai/pets/runs/7"), 0.21)])
    """

    text: str
    """Text of the link."""
    address: str
    """Address that begins with `http://`, `https://`, or `file://` for a file on the reader's machine."""


def element(tag: str, content: str = "", class_: str = "", **attributes: object) -> str:
    """Return an element around HTML. Attributes are escaped, and None leaves an attribute out."""
    named = {"class": class_ or None, **{name.rstrip("_").replace("_", "-"): at for name, at in attributes.items()}}
    written = "".join(f' {name}="{_clean(at)}"' for name, at in named.items() if at is not None)
    return f"<{tag}{written}>{content}</{tag}>"


def text_of(value: object) -> str:
    """Return any value as HTML: escaped texts, short numbers, and web addresses as links."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text, address, kind = str(value), str(value), URL
    if isinstance(value, Link):
        text, address, kind = value.text, value.address, ADDRESS
    if kind.fullmatch(address):
        return element("a", _clean(text), href=address, target="_blank", rel="noopener noreferrer")
    return _clean(text)


def name_of(text: str) -> str:
    """Return a metric's name in one line of at most `MAX_NAME` characters, without HTML escapes."""
    return one_line(text, MAX_NAME)


def whole(piece: str) -> str:
    """Return a piece with the shared style and script, ready to be shown alone."""
    return shared() + element("div", piece, "dpt")


@functools.cache
def shared() -> str:
    """Return the style and the script of all pieces."""
    assets = files(__package__) / "assets"
    styles, plot, ours = (
        (assets / name).read_text(encoding="utf-8") for name in ("report.css", "uPlot.iife.min.js", "report.js")
    )
    styles = (assets / "uPlot.min.css").read_text(encoding="utf-8") + styles
    again = "if (window.dptReport) return window.dptReport();"  # another Deck of the page has the same script
    script = f"(() => {{ {again}\n{plot}\n{ours}\nwindow.dptReport = drawAll; }})();"
    return f"<style>{styles}</style><script>{script}</script>"


def _clean(value: object) -> str:
    """Return a value as escaped text, cut to `MAX_TEXT` characters, without unprintable characters."""
    text = str(value)
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]}\n…\n{text[-MAX_TEXT // 2 :]}"
    return escape(text if text.isprintable() else "".join(map(_fit, text)))


def _fit(letter: str) -> str:
    if letter.isprintable() or letter == "\n":
        return letter
    return " " if letter.isspace() else "\N{REPLACEMENT CHARACTER}"
