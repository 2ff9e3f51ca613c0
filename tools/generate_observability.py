#!/usr/bin/env python3
"""Writes the guard's alert rules, the dashboards and docs/exported-metrics.md; --check: compares.

The alerts come from the guard's rules and their default bounds, the tables from the catalogue of metrics and
from what is written in tools/observability: none can differ from the program for long.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from observability.alerts import guard_rules
from observability.dashboards import dashboard
from observability.services import SERVICES
from observability.tables import alert_table, metric_table, panel_table
from observability.training import TRAINING

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "observability"
PAGE = ROOT / "docs" / "exported-metrics.md"


def main() -> int:
    """Writes or checks the files; returns the exit code."""
    files = {
        FOLDER / "rules" / "guard.yaml": guard_rules(),
        FOLDER / "grafana" / "dashboards" / "training.json": dashboard(TRAINING),
        FOLDER / "grafana" / "dashboards" / "services.json": dashboard(SERVICES),
        PAGE: page(PAGE.read_text(encoding="utf-8")),
    }
    stale = [path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"stale: {path.relative_to(ROOT)}; run make generate")
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path], encoding="utf-8")
    return 0


def page(text: str) -> str:
    """The page with its tables written anew."""
    for name, table in (
        ("metrics", metric_table()),
        ("training dashboard", panel_table(TRAINING)),
        ("services dashboard", panel_table(SERVICES)),
        ("service alerts", alert_table(FOLDER / "rules" / "services.yaml")),
    ):
        begin, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
        if begin not in text or end not in text:
            raise SystemExit(f"{PAGE.name} lacks the place of a table: {begin} ... {end}")
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        text = pattern.sub(lambda _, made=f"{begin}\n\n{table}\n\n{end}": made, text)
    return text


if __name__ == "__main__":
    raise SystemExit(main())
