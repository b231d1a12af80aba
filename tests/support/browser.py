"""Opens a Deck in headless Chromium, as Flyte's console shows it; and the pages of the documentation."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

INSPECTION = """
<pre id="report"></pre>
<script>
const hasInk = canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean);
const isDrawn = chart => [...chart.querySelectorAll("canvas")].some(hasInk);
const inspect = () => {
  const report = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement, inner = frame.contentWindow;
    const charts = [...page.querySelectorAll(".dpt-chart")];
    const legend = () => [...page.querySelectorAll(".dpt-legend b")].map(value => value.textContent);
    const found = report[frame.name] = {
      overflow: root.scrollWidth - root.clientWidth,
      num_charts: charts.length,
      num_drawn: charts.filter(isDrawn).length,
      labels: charts.map(chart => chart.querySelector("[role=img]").getAttribute("aria-label")),
      requests: inner.performance.getEntriesByType("resource").map(entry => entry.name),
      legend: legend(),
    };
    page.querySelector(".dpt-plot").dispatchEvent(new inner.KeyboardEvent("keydown", {key: "ArrowRight"}));
    found.legend_after_arrow = legend();
    page.querySelectorAll(".dpt-chart button").forEach(button => button.click());
    found.pressed = [...page.querySelectorAll(".dpt-chart button")].map(button => button.getAttribute("aria-pressed"));
    found.errors = inner.errors;
  }
  document.getElementById("report").textContent = JSON.stringify(report);
};
window.addEventListener("load", () => {
  let numLooks = 0;
  const timer = setInterval(() => {
    const frames = [...document.querySelectorAll("iframe")];
    const charts = frames.flatMap(frame => [...frame.contentDocument.querySelectorAll(".dpt-chart")]);
    if (charts.every(isDrawn) || ++numLooks === 80) {
      clearInterval(timer);
      inspect();
    }
  }, 100);
});
</script>
"""
"""Says in the page itself what became of the pages in its frames, before and after all their buttons are pressed."""
CATCH = "<script>window.errors = []; addEventListener('error', event => errors.push(event.message));</script>"


@dataclass(frozen=True, kw_only=True)
class Inspected:
    """What a page looks like to a browser."""

    overflow: int
    """Pixels that it is wider than its window."""
    num_charts: int
    num_drawn: int
    """Charts that are not blank."""
    labels: list[str]
    """What a screen reader says of each chart."""
    requests: list[str]
    """What it has tried to load."""
    legend: list[str]
    """The values beside the names of all lines."""
    legend_after_arrow: list[str]
    """The same once an arrow key was pressed on the first chart."""
    pressed: list[str]
    """The state of all the charts' buttons, once each was pressed."""
    errors: list[str]
    """Of its scripts."""


def inspect(pages: Mapping[str, str], folder: Path, widths: Sequence[int]) -> dict[tuple[str, int], Inspected]:
    """Open pages, each at every width, all in one browser; skips where there is no Chromium."""
    frames = "".join(
        f'<iframe name="{name} {width}" width="{width}" height="2000" srcdoc="{html.escape(_document(page))}"></iframe>'
        for name, page in pages.items()
        for width in widths
    )
    (folder / "host.html").write_text(f"<!doctype html><meta charset=utf-8><body>{frames}{INSPECTION}</body>")
    reports = _report_in(_chromium(folder, "--dump-dom", (folder / "host.html").as_uri(), height=2000))
    return {(name, width): Inspected(**reports[f"{name} {width}"]) for name in pages for width in widths}


def _report_in(dom: str) -> Any:
    """Return the report that a page wrote into its own DOM."""
    found = re.search(r'<pre id="report">([^<]+)</pre>', dom)
    assert found, dom[-2000:]
    return json.loads(html.unescape(found[1]))


def _document(page: str) -> str:
    return f"<!doctype html><html><head><meta charset=utf-8>{CATCH}</head><body>{page}</body></html>"


def _chromium(folder: Path, *arguments: str, height: int) -> str:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium here (chromium, chromium-browser or google-chrome) to open the Deck in")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=10000"]
    options += [f"--user-data-dir={folder / 'chromium'}", f"--window-size=1200,{height}"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND"]  # the Deck's fonts come from elsewhere, the pictures do not
    done = subprocess.run([program, *options, *arguments], capture_output=True, text=True, check=True)
    return done.stdout
