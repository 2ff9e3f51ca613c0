"""A headless Chromium that runs a page and says what a script finds on it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HELPERS = """
const wait = ms => new Promise(resolve => setTimeout(resolve, ms));
const all = (selector, node = document) => [...node.querySelectorAll(selector)];
const figure = title => all("figure").find(f => f.querySelector("figcaption b")?.textContent === title);
const paths = title => all("path.line", figure(title)).map(p => p.getAttribute("d"));
function point(title, share, kind = "pointermove") {
  const svg = figure(title).querySelector("svg"), box = svg.getBoundingClientRect();
  const [from, to] = ["x1", "x2"].map(end => Number(svg.querySelector("line.axis").getAttribute(end)));
  const x = box.left + from + share * (to - from);
  const at = {clientX: x, clientY: box.top + 50, pointerType: "mouse", bubbles: true};
  svg.dispatchEvent(new PointerEvent(kind, at));
}
const tip = () => document.querySelector(".tip").textContent;
function set(selector, value) {
  const field = document.querySelector(selector);
  field.value = value;
  field.dispatchEvent(new Event("input"));
  field.dispatchEvent(new Event("change"));
}
"""
"""Functions for probes: to find things on the page, and to touch them."""
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


def probe(page: str, script: str, folder: Path, *, width: int = 1240) -> Any:
    """Opens a copy of a page with a script at its end, whose function `probe` returns what is returned."""
    run = (
        f"<script>{script}\n"
        "(async () => { const out = document.createElement('pre'); out.id = 'probe';\n"
        "try { out.textContent = JSON.stringify(await probe()); }\n"
        "catch (error) { out.textContent = JSON.stringify({error: String(error.stack)}); }\n"
        "document.body.append(out); })();</script>"
    )
    file = folder / "probe.html"
    file.write_text(page.replace("</body>", f"{run}</body>"))
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    command += ["--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync"]
    command += ["--disable-component-update", "--disable-default-apps"]
    command += [
        "--virtual-time-budget=4000",
        f"--window-size={width},900",
        f"--user-data-dir={folder / 'chromium'}",
    ]
    done = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, timeout=300, check=True)
    match = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr[-2000:]
    value = json.loads(unescape(match[1]))
    assert not (isinstance(value, dict) and "error" in value), value
    return value


def dom(address: str, folder: Path) -> str:
    """What a page has become after some seconds."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--dump-dom"]
    command += ["--virtual-time-budget=5000", f"--user-data-dir={folder / 'chromium'}", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
