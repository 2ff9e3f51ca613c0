"""Draws the report: one HTML page that refers to nothing outside itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from statistics import median
from typing import Any

from paceline.cli.metrics import (
    CHART_NOTES,
    HEADLINES,
    PHASES,
    REWARD,
    STEP_SECONDS,
    TOKENS_PER_S,
    Metric,
    charts,
)
from paceline.cli.report.charts import CARD, WIDE, Canvas, Series, line_chart, stacked_bars
from paceline.cli.report.data import RunData, Samples, phase_seconds
from paceline.cli.report.guard import guard_section
from paceline.cli.report.script import SCRIPT
from paceline.cli.report.style import STYLE

_TEXTS = {"prompt": "prompt", "response": "response", "truth": "ground_truth"}


def page(data: RunData, *, stamp: str | None = None) -> str:
    """The page of a run.

    Args:
        data: what it shows.
        stamp: of the data, for a page that asks `now` beside it for news; None: for one that stands alone.
    """
    sections = [
        _reward(data),
        _phases(data),
        guard_section(data.fired),
        _curves(data),
        _trajectories(data.samples),
        _events(data),
        _config(data),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(data.name)}: Paceline report</title><style>{STYLE}</style></head>"
        f"<body{_live(stamp)}><main>"
        f'<header><p class="brand">Paceline</p><h1>{escape(data.name)}</h1>'
        f'<p class="facts-of-run">{escape(" · ".join(data.facts))}</p>'
        f'<div id="now"></div>{_tiles(data)}</header>'
        f"{''.join(sections)}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _live(stamp: str | None) -> str:
    return "" if stamp is None else f' data-live="{escape(stamp)}"'


def _tiles(data: RunData) -> str:
    tiles: list[tuple[str, str, str]] = []
    for title, name in HEADLINES.items():
        points = data.points(name)
        if points:
            change = points[-1][1] - points[0][1]
            tiles.append((title, f"{points[0][1]:.3f} → {points[-1][1]:.3f}", f"{change:+.3f}"))
    steps = data.points(STEP_SECONDS)
    if steps:
        tiles.append(("Steps", f"{int(steps[-1][0])}", f"{sum(s for _, s in steps) / 60:.1f} min in steps"))
        tiles.append(("Step", f"{median(s for _, s in steps):.2f} s", "median"))
    speed = data.points(TOKENS_PER_S)
    if speed:
        tiles.append(("Throughput", f"{median(s for _, s in speed):,.0f}", "tokens/s, median"))
    refused = sum(n for verdict, n in data.verdicts.items() if verdict != "admitted")
    if data.verdicts:
        tiles.append(
            ("Trajectories", f"{data.verdicts.get('admitted', 0):,}", f"admitted, {refused:,} refused")
        )
    cells = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><i>{escape(note)}</i></div>'
        for name, value, note in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _series(data: RunData, metrics: Sequence[Metric]) -> list[Series]:
    return [Series(label=m.label, points=data.points(m.name), dots=m.dots) for m in metrics]


def _reward(data: RunData) -> str:
    series = _series(data, charts()[REWARD])
    components = sorted(
        {key for line in data.metrics for key in line if key.startswith("reward/") and key.endswith("/mean")}
    )
    if len(components) > 1:
        series += [
            Series(label=key.removeprefix("reward/").removesuffix("/mean"), points=data.points(key))
            for key in components
        ]
    if not any(line.points for line in series):
        return '<section><h2>Reward</h2><p class="none">No step is finished yet.</p></section>'
    return f"<section><h2>Reward</h2>{_in_both_widths(lambda canvas: line_chart(series, canvas))}</section>"


def _phases(data: RunData) -> str:
    steps, layers = phase_seconds(data)
    if not steps:
        return ""
    total = sum(sum(values) for values in layers.values()) or 1.0
    shares = "".join(
        f"<tr><td>{escape(name)}</td><td>{sum(values) / len(steps):.3f} s</td>"
        f"<td>{sum(values) / total:.1%}</td></tr>"
        for name, values in layers.items()
    )
    head = "<tr><th>phase</th><th>mean</th><th>share</th></tr>"
    table = f"<table><thead>{head}</thead><tbody>{shares}</tbody></table>"
    bars = _in_both_widths(lambda canvas: stacked_bars(steps, layers, canvas))
    return f'<section><h2>Seconds per phase</h2><div class="split">{bars}{table}</div></section>'


def _in_both_widths(draw: Callable[[Canvas], str]) -> str:
    """A chart for desktops and one for phones, of which the style sheet shows one: text has a fixed size."""
    return f'<div class="wide">{draw(WIDE)}</div><div class="wide narrow">{draw(CARD)}</div>'


def _curves(data: RunData) -> str:
    cards = []
    for title, metrics in charts().items():
        series = _series(data, metrics)
        if title in (REWARD, PHASES) or not any(line.points for line in series):
            continue
        caption = f"<b>{escape(title)}</b><span>{escape(CHART_NOTES.get(title, ''))}</span>"
        cards.append(f"<figure><figcaption>{caption}</figcaption>{line_chart(series)}</figure>")
    return f'<section><h2>Curves</h2><div class="grid-of">{"".join(cards)}</div></section>' if cards else ""


def _trajectories(samples: Sequence[Samples]) -> str:
    if not samples:
        return ""
    groups = []
    for number, step_samples in enumerate(samples):
        rows = "".join(_trajectory(row) for row in step_samples.rows)
        is_open = " open" if number == len(samples) - 1 else ""
        note = f"{len(step_samples.rows)} of {step_samples.num_rows:,}, highest reward first"
        summary = f"<summary>{escape(step_samples.title)} <i>{note}</i></summary>"
        groups.append(f"<details{is_open}>{summary}{rows}</details>")
    return f"<section><h2>Sample trajectories</h2>{''.join(groups)}</section>"


def _trajectory(row: Any) -> str:
    reward = row.get("reward")
    facts = [
        f"prompt {row.get('prompt_id')}, sample {row.get('sample_index')}",
        f"{row.get('num_response_tokens', '?')} tokens",
        str(row.get("finish_reason", "")),
        _components(row.get("components")),
    ]
    shown = "none" if reward is None else f"{reward:.3g}"
    line = " · ".join(fact for fact in facts if fact)
    texts = {name: escape(str(row.get(key, ""))) for name, key in _TEXTS.items()}
    listed = "".join(f"<dt>{name}</dt><dd><pre>{text}</pre></dd>" for name, text in texts.items())
    return (
        f'<article><div class="facts"><b>{escape(shown)}</b><span>{escape(line)}</span></div>'
        f"<dl>{listed}</dl></article>"
    )


def _components(text: object) -> str:
    try:
        parts = json.loads(str(text)) if text else {}
    except ValueError:
        return ""
    if not isinstance(parts, dict) or len(parts) < 2:
        return ""
    return ", ".join(f"{name} {value:.3g}" for name, value in parts.items() if isinstance(value, int | float))


def _events(data: RunData) -> str:
    if not data.events:
        return ""
    rows = "".join(
        f"<tr><td>{event.at_s:,.1f} s</td><td><b>{escape(event.name)}</b></td>"
        f"<td>{escape(event.text)}</td></tr>"
        for event in data.events
    )
    verdicts = ", ".join(f"{name} {count:,}" for name, count in sorted(data.verdicts.items()))
    barrier = f'<p class="none">Verdicts of the barrier: {escape(verdicts)}</p>' if verdicts else ""
    table = f'<table class="events"><tbody>{rows}</tbody></table>'
    more = data.num_events_left_out
    rest = f'<p class="none">{more:,} more in events.jsonl</p>' if more else ""
    return f"<section><h2>Events of note</h2>{barrier}{table}{rest}</section>"


def _config(data: RunData) -> str:
    if not data.config_text:
        return ""
    return (
        "<section><h2>Configuration</h2><details><summary>config.resolved.yaml</summary>"
        f"<pre class='config'>{escape(data.config_text)}</pre></details></section>"
    )
