"""Makes the tables of docs/metrics.md: metrics, panels, alerts about the services."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import yaml

from observability.dashboards import Dashboard
from paceline.service.observability import metrics
from paceline.service.observability.metrics import Metric


def metric_table() -> str:
    """Returns a table with a row per metric of the catalogue."""
    rows = ["| metric | kind | labels | of | says |", "| --- | --- | --- | --- | --- |"]
    for metric in vars(metrics).values():
        if isinstance(metric, Metric):
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            services = "all" if len(metric.services) == 4 else ", ".join(metric.services)
            rows.append(f"| `{metric.name}` | {metric.kind.value} | {labels} | {services} | {metric.help} |")
    return "\n".join(rows)


def panel_table(what: Dashboard) -> str:
    """Returns a table with a row per panel."""
    rows = ["| panel | answers |", "| --- | --- |"]
    rows += [f"| {panel.title} | {panel.answers} |" for _, panels in what.rows for panel in panels]
    return "\n".join(rows)


def alert_table(rules: Path) -> str:
    """Returns a table with a row per alert about the services."""
    tree = yaml.safe_load(rules.read_text(encoding="utf-8"))
    rows = ["| alert | fires when | what to do |", "| --- | --- | --- |"]
    for rule in (rule for group in tree["groups"] for rule in group["rules"] if "alert" in rule):
        words = rule["annotations"]
        text = (textwrap.shorten(words[key], 400) for key in ("summary", "description"))
        when, what = (re.sub(r"\{\{[^}]*\}\}", "…", part) for part in text)
        rows.append(f"| `{rule['alert']}` | {when} | {what} |")
    return "\n".join(rows)
