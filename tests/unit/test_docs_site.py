"""The docs as a site: every page has its place, every link and anchor leads somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from paceline.cli.main import COMMANDS
from support import source


def test_the_site_is_built_and_no_link_is_broken(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=source.ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    # With --quiet it would count no warnings.
    assert done.returncode == 0, done.stderr
    built = {str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.html")} - {"404.html"}
    pages = (source.ROOT / "docs").rglob("*.md")
    assert built == {str(page.relative_to(source.ROOT / "docs").with_suffix(".html")) for page in pages}
    start = (tmp_path / "index.html").read_text()
    assert "fonts.googleapis" not in start, "a page asks nobody but its own server"
    assert 'page-desktop.png#only-light"' in start
    assert 'page-desktop-dark.png#only-dark"' in start
    assert "<code>critic/<wbr>score/<wbr>mean</code>" in (tmp_path / "metrics.html").read_text()
    assert "<wbr>" not in (tmp_path / "search" / "search_index.json").read_text()
    boosts = {
        entry["location"]: entry.get("boost", 1.0)
        for entry in json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    }
    decisions = {boost for page, boost in boosts.items() if page.startswith("decisions/")}
    assert max(decisions) < boosts["configuration.html"] < boosts["add-a-reward.html"]
    for licence in ("mkdocs/licenses", "mkdocs-material/licenses", "mkdocs-material/material"):
        assert (tmp_path / "licenses" / f"{licence}.txt").read_text().strip(), licence


def test_the_operators_page_says_for_each_verb_what_to_type_everywhere() -> None:
    text = (source.ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    assert {len(row) for row in rows[:1] + rows[2:]} == {4}
    assert all(len(cell) > 3 for row in rows[2:] for cell in row)
    verbs = {row[0].removeprefix("| ") for row in rows[2:]}
    assert {"build", "run", "stop", "upgrade", "back up", "monitor", "renew", "remove"} <= verbs
    named = set(re.findall(r"`paceline ([a-z]+)", text))
    assert named <= set(COMMANDS)
    assert {"train", "up", "stop", "status", "verify", "hosts", "certs"} <= named
