"""The page that shows runs: one HTML text that refers to nothing outside itself.

Its script and style are the files in front/, joined. `paceline ui` serves the page and its data separately; a
report contains the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from paceline.show import metrics

_FRONT = Path(__file__).parent / "front"
_SCRIPTS = (
    "base", "source", "plot", "curves", "timeline", "fleet", "groups", "samples", "evaluations", "runs",
    "app",
)  # fmt: skip


@cache
def script() -> str:
    """Returns the JavaScript of the report's page."""
    parts = [(_FRONT / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def page(title: str, frozen: Mapping[str, Any] | None = None) -> str:
    """Returns the HTML of the report's page.

    Args:
        frozen: the data, for a self-contained page; None: the page asks its server.
    """
    style = (_FRONT / "page.css").read_text(encoding="utf-8")
    data = "" if frozen is None else _json("frozen", frozen)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: Paceline</title><style>{style}</style></head>"
        "<body><main><noscript>This page needs scripts.</noscript></main>"
        f"{_json('meta', _meta())}{data}<script>{script()}</script></body></html>\n"
    )


def to_json(value: Any) -> str:
    """Encodes values as browsers read it: a number that is not finite is null."""
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), ensure_ascii=False)


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


def _json(name: str, value: Any) -> str:
    """Encodes data so that no text in it can end the script that holds it."""
    safe = to_json(value).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{safe}</script>'


def _meta() -> dict[str, Any]:
    """Returns the table of metrics in the form that the script reads."""
    known = metrics.charts()
    return {
        "step_seconds": metrics.STEP_SECONDS,
        "phases": [_described(metric) for metric in known[metrics.PHASES]],
        "reward": {**_chart(metrics.REWARD, known[metrics.REWARD]), "components": True},
        "charts": [
            _chart(title, group)
            for title, group in known.items()
            if title not in (metrics.REWARD, metrics.PHASES)
        ],
        "tiles": [
            {"name": metrics.TOKENS_PER_S, "title": "Throughput", "note": "tokens/s, median"},
            {"name": metrics.MFU, "title": "MFU", "note": "of the policy's update, median", "percent": True},
        ],
    }


def _chart(title: str, shown: list[metrics.ShownMetric]) -> dict[str, Any]:
    return {
        "title": title,
        "note": metrics.CHART_NOTES.get(title, ""),
        "metrics": [_described(metric) for metric in shown],
        "without_zeros": title in metrics.WITHOUT_ZEROS,
    }


def _described(metric: metrics.ShownMetric) -> dict[str, Any]:
    return {"name": metric.name, "label": metric.label, "dots": metric.dots}
