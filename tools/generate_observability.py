#!/usr/bin/env python3
"""Writes the guard's alert rules, the dashboards, and tables of docs/metrics.md; --check only compares.

The alerts come from the guard's rules and their default bounds, the tables from the catalogue of metrics and
from tools/observability.
"""

from __future__ import annotations

import sys
from pathlib import Path

from marked_tables import page_with_tables
from observability.alerts import guard_rules
from observability.dashboards import dashboard
from observability.services import SERVICES
from observability.tables import alert_table, metric_table, panel_table
from observability.training import TRAINING

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "observability"
PAGE = ROOT / "docs" / "metrics.md"


def main() -> int:
    """Writes or checks the files; returns the exit code."""
    files = {
        FOLDER / "rules" / "guard.yaml": guard_rules(),
        FOLDER / "grafana" / "dashboards" / "training.json": dashboard(TRAINING),
        FOLDER / "grafana" / "dashboards" / "services.json": dashboard(SERVICES),
        PAGE: page_with_tables(PAGE, tables()),
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


def tables() -> dict[str, str]:
    """Returns the page's tables, by their names in the page."""
    return {
        "exported metrics": metric_table(),
        "training dashboard": panel_table(TRAINING),
        "services dashboard": panel_table(SERVICES),
        "service alerts": alert_table(FOLDER / "rules" / "services.yaml"),
    }


if __name__ == "__main__":
    raise SystemExit(main())
