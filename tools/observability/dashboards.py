"""Describes dashboards as rows of panels, and converts them to Grafana's files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from paceline.service.observability import metrics

_WIDTH, _HEIGHT, _PER_LINE = 8, 8, 3
_SOURCE = {"type": "prometheus", "uid": "paceline-prometheus"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """A time series panel: the question that it answers, and its expressions with legends."""

    title: str
    answers: str
    expressions: tuple[tuple[str, str], ...]
    unit: str = "short"
    log: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Dashboard:
    """A dashboard page: rows of panels."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def of_step(*names: str) -> tuple[tuple[str, str], ...]:
    """Returns metrics of the step by their names in metrics.jsonl; the names are also the legends."""
    return tuple((metrics.training(name).name, name) for name in names)


def dashboard(what: Dashboard) -> str:
    """Returns a dashboard as Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in what.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row,
                "collapsed": False,
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": y},
                "panels": [],
            }
        )
        for number, panel in enumerate(members):
            place = {
                "h": _HEIGHT,
                "w": _WIDTH,
                "x": number % _PER_LINE * _WIDTH,
                "y": y + 1 + number // _PER_LINE * _HEIGHT,
            }
            panels.append(_panel(panel, len(panels) + 1, place))
        y += 1 + -(-len(members) // _PER_LINE) * _HEIGHT
    tree = {
        "uid": what.uid,
        "title": what.title,
        "tags": ["paceline"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": []},
        "panels": panels,
    }
    return json.dumps(tree, indent=1) + "\n"


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 0, "spanNulls": True}
    if panel.log:
        custom["scaleDistribution"] = {"type": "log", "log": 10}
    targets = [
        {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
        for i, (expression, legend) in enumerate(panel.expressions)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.answers,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }
