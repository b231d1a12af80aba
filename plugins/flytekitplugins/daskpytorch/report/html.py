"""HTML out of texts that anybody may have written, and what all pieces of a page share once."""

import functools
import re
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from flytekitplugins.daskpytorch.process.streams import one_line

MAX_NAME = 60
"""Characters of a metric's name that are shown."""
MAX_TEXT = 20_000
"""Characters of any text: what is cut out of a longer one is its middle."""
URL = re.compile(r"https?://[^\s<>\"']+")
ADDRESS = re.compile(r"(https?|file)://[^\s<>\"']+")


@dataclass(frozen=True)
class Link:
    """A text that leads somewhere: a cell of a table, say.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> html = report.table(("run", "loss"), [(report.Link("tracker", "https://wandb.ai/pets/runs/7"), 0.21)])
    """

    text: str
    """What is shown."""
    address: str
    """With `http://`, `https://` or, for a file of the reader's own machine, `file://`."""


def element(tag: str, content: str = "", class_: str = "", **attributes: object) -> str:
    """An element with what is already HTML in it; attributes are escaped, and left out where they are None."""
    named = {"class": class_ or None, **{name.rstrip("_").replace("_", "-"): at for name, at in attributes.items()}}
    written = "".join(f' {name}="{_clean(at)}"' for name, at in named.items() if at is not None)
    return f"<{tag}{written}>{content}</{tag}>"


def text_of(value: object) -> str:
    """Any value as HTML: escaped, a number short, an address of the web as a link."""
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
    """A metric's name as it is shown, not yet HTML: in a line, cut where it is too long."""
    return one_line(text, MAX_NAME)


def whole(piece: str) -> str:
    """The piece with all that it needs, so that it can be shown by itself."""
    return shared() + element("div", piece, "dpt")


@functools.cache
def shared() -> str:
    """The style and the script of all pieces."""
    assets = files(__package__) / "assets"
    styles, plot, ours = (
        (assets / name).read_text(encoding="utf-8") for name in ("report.css", "uPlot.iife.min.js", "report.js")
    )
    styles = (assets / "uPlot.min.css").read_text(encoding="utf-8") + styles
    again = "if (window.dptReport) return window.dptReport();"  # another Deck of the page has brought it
    script = f"(() => {{ {again}\n{plot}\n{ours}\nwindow.dptReport = drawAll; }})();"
    return f"<style>{styles}</style><script>{script}</script>"


def _clean(value: object) -> str:
    """Escaped, no longer than anybody reads, and without what no file can hold."""
    text = str(value)
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]}\n…\n{text[-MAX_TEXT // 2 :]}"
    return escape(text if text.isprintable() else "".join(map(_fit, text)))


def _fit(letter: str) -> str:
    if letter.isprintable() or letter == "\n":
        return letter
    return " " if letter.isspace() else "\N{REPLACEMENT CHARACTER}"
