"""Opens a Deck in headless Chromium, as Flyte's console shows it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

REPORT = """
<pre id="report"></pre>
<script>
window.addEventListener("load", () => {  // all pictures have been loaded, or have failed
  const tabs = [...document.querySelectorAll("#flyte-frame-tabs li")];
  tabs.find(tab => tab.textContent.trim() === TAB).click();
  const images = [...document.querySelectorAll("#flyte-frame-container > .active " + PICTURES)];
  document.getElementById("report").textContent = JSON.stringify(images.map(image => {
    const box = image.getBoundingClientRect();
    const natural_width = image.naturalWidth ?? box.width;
    return {alt: image.alt ?? "", natural_width, box: [box.left, box.top, box.right, box.bottom]};
  }));
});
</script>
"""
"""Says in the page itself what became of each picture of a tab."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A picture on the page."""

    alt: str
    natural_width: int
    """Pixels of the picture itself; 0 where it could not be loaded."""
    pixels: np.ndarray
    """What the screen shows there, (height, width, 3), uint8."""


def open_deck(deck: Path, tab: str, folder: Path, *, height: int = 3000, pictures: str = "img") -> list[Shown]:
    """The pictures of one of the Deck's tabs, `img` or `svg`; skips where there is no Chromium."""
    page, screenshot = folder / "page.html", folder / "screenshot.png"
    page.write_text(deck.read_text().replace("</body>", _report(tab, pictures) + "</body>"))
    dom = _chromium(folder, "--dump-dom", page.as_uri(), height=height)
    _chromium(folder, f"--screenshot={screenshot}", page.as_uri(), height=height)
    screen = np.asarray(Image.open(screenshot).convert("RGB"))
    found = re.search(r'<pre id="report">([^<]+)</pre>', dom)
    assert found, dom[-2000:]
    return [_shown(image, screen) for image in json.loads(html.unescape(found[1]))]


def _report(tab: str, pictures: str) -> str:
    return REPORT.replace("PICTURES", json.dumps(pictures)).replace("TAB", json.dumps(tab))


def _shown(image: dict[str, object], screen: np.ndarray) -> Shown:
    left, top, right, bottom = (round(edge) for edge in image["box"])  # type: ignore[attr-defined]
    pixels = screen[top:bottom, left:right]
    return Shown(alt=str(image["alt"]), natural_width=int(image["natural_width"]), pixels=pixels)  # type: ignore[call-overload]


def _chromium(folder: Path, *arguments: str, height: int) -> str:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium here (chromium, chromium-browser or google-chrome) to open the Deck in")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=10000"]
    options += [f"--user-data-dir={folder / 'chromium'}", f"--window-size=1200,{height}"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND"]  # the Deck's fonts come from elsewhere, the pictures do not
    done = subprocess.run([program, *options, *arguments], capture_output=True, text=True, check=True)
    return done.stdout
