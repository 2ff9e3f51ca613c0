"""The report's page: one HTML file with everything in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from statistics import median
from typing import Any

from paceline.cli.report.charts import WIDE, Series, line_chart, stacked_bars
from paceline.cli.report.data import RunData, Samples, phase_seconds
from paceline.cli.report.guard import guard_section
from paceline.cli.report.style import STYLE
from paceline.cli.report.summary import TRAIN_REWARD, VAL_REWARD

# title, what it tells, (metric, label)...
_CHARTS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("KL", "to the reference per token, and of the update", (
        ("algorithm/reference_kl", "to the reference"), ("actor/kl_loss", "KL loss"), ("actor/ppo_kl", "old to new policy"), ("actor/ppo_kl_max", "the same, worst mini-batch"),
    )),
    ("KL coefficient", "of the penalty in the reward", (("algorithm/kl_coef", "coefficient"),)),
    ("Clip fractions", "share of tokens that clipping bounds", (
        ("actor/pg_clipfrac", "policy"), ("actor/pg_clipfrac_lower", "dual clip"), ("critic/vf_clipfrac", "value"),
    )),
    ("Entropy", "of the policy, nats per token", (("actor/entropy", "entropy"),)),
    ("Policy loss", "mean over mini-batches", (("actor/pg_loss", "policy loss"),)),
    ("Value loss", "clipped squared error", (("critic/vf_loss", "value loss"),)),
    ("Explained variance", "of the returns by the values; 1 is perfect", (
        ("critic/vf_explained_var", "explained variance"),
    )),
    ("Gradient norm", "before clipping", (("actor/grad_norm", "actor"), ("critic/grad_norm", "critic"))),
    ("Response length", "tokens", (("response_length/mean", "mean"), ("response_length/max", "longest"))),
    ("Cut responses", "share that hit data.max_response_length", (("response_length/clip_ratio", "share"),)),
    ("Returns and values", "means over tokens", (
        ("critic/returns/mean", "returns"), ("critic/values/mean", "values"), ("critic/advantages/mean", "advantages"),
    )),
    ("Groups that teach", "share of all that dynamic sampling asked for", (("dynamic_sampling/kept_share", "share"),)),
    ("Mismatch of rollout and learner", "KL estimate per token", (("rollout/mismatch_kl", "mismatch KL"),)),
    ("Largest log-prob difference", "rollout against learner, any token", (
        ("rollout/logprob_diff_max", "largest difference"),
    )),
    ("Throughput", "prompt and response tokens per second of a step", (("perf/tokens_per_s", "tokens/s"),)),
    ("Weight push", "milliseconds", (("weights/transfer_ms", "transfer"), ("weights/pause_ms", "pause"))),
    ("Barrier wait", "seconds between the first and the last trajectory", (("barrier/wait_s", "wait"),)),
    ("Learning rate", "peak times schedule", (("actor/lr", "actor"), ("critic/lr", "critic"))),
)  # fmt: skip


def page(data: RunData) -> str:
    """The whole page; refers to nothing outside itself."""
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
        f"<title>{escape(data.name)}: Paceline report</title><style>{STYLE}</style></head><body><main>"
        f'<header><p class="brand">Paceline</p><h1>{escape(data.name)}</h1>{_tiles(data)}</header>'
        f"{''.join(sections)}</main></body></html>\n"
    )


def _tiles(data: RunData) -> str:
    tiles: list[tuple[str, str, str]] = []
    for name, key in (("Validation reward", VAL_REWARD), ("Training reward", TRAIN_REWARD)):
        points = data.points(key)
        if points:
            change = points[-1][1] - points[0][1]
            tiles.append((name, f"{points[0][1]:.3f} → {points[-1][1]:.3f}", f"{change:+.3f}"))
    steps = data.points("timing_s/step")
    if steps:
        tiles.append(("Steps", f"{int(steps[-1][0])}", f"{sum(s for _, s in steps) / 60:.1f} min in steps"))
        tiles.append(("Step", f"{median(s for _, s in steps):.2f} s", "median"))
    speed = data.points("perf/tokens_per_s")
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


def _reward(data: RunData) -> str:
    series = [
        Series(label="training", points=data.points(TRAIN_REWARD)),
        Series(label="validation", points=data.points(VAL_REWARD), dots=True),
    ]
    if unfiltered := data.points("dynamic_sampling/reward_mean"):
        series.append(Series(label="all samples, groups set aside too", points=unfiltered))
    components = sorted(
        {key for line in data.metrics for key in line if key.startswith("reward/") and key.endswith("/mean")}
    )
    if len(components) > 1:
        series += [
            Series(label=key.removeprefix("reward/").removesuffix("/mean"), points=data.points(key))
            for key in components
        ]
    if not any(one.points for one in series):
        return '<section><h2>Reward</h2><p class="none">No step is finished yet.</p></section>'
    return f'<section><h2>Reward</h2><div class="wide">{line_chart(series, WIDE)}</div></section>'


def _phases(data: RunData) -> str:
    steps, layers = phase_seconds(data)
    if not steps:
        return ""
    total = sum(sum(values) for values in layers.values()) or 1.0
    shares = "".join(
        f"<tr><td>{escape(name)}</td><td>{sum(values) / len(steps):.3f} s</td><td>{sum(values) / total:.1%}</td></tr>"
        for name, values in layers.items()
    )
    table = f"<table><thead><tr><th>phase</th><th>mean</th><th>share</th></tr></thead><tbody>{shares}</tbody></table>"
    return (
        '<section><h2>Seconds per phase</h2><div class="split">'
        f'<div class="wide">{stacked_bars(steps, layers)}</div>{table}</div></section>'
    )


def _curves(data: RunData) -> str:
    cards = []
    for title, note, metrics in _CHARTS:
        series = [Series(label=label, points=data.points(key)) for key, label in metrics]
        if any(one.points for one in series):
            cards.append(
                f"<figure><figcaption><b>{escape(title)}</b><span>{escape(note)}</span></figcaption>{line_chart(series)}</figure>"
            )
    return f'<section><h2>Curves</h2><div class="grid-of">{"".join(cards)}</div></section>' if cards else ""


def _trajectories(samples: Sequence[Samples]) -> str:
    if not samples:
        return ""
    groups = []
    for number, one in enumerate(samples):
        rows = "".join(_trajectory(row) for row in one.rows)
        is_open = " open" if number == len(samples) - 1 else ""
        groups.append(
            f"<details{is_open}><summary>{escape(one.title)} "
            f"<i>{len(one.rows)} of {one.num_rows:,}, highest reward first</i></summary>{rows}</details>"
        )
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
    return (
        f'<article><div class="facts"><b>{escape(shown)}</b><span>{escape(" · ".join(f for f in facts if f))}</span></div>'
        f"<dl><dt>prompt</dt><dd><pre>{escape(str(row.get('prompt', '')))}</pre></dd>"
        f"<dt>response</dt><dd><pre>{escape(str(row.get('response', '')))}</pre></dd>"
        f"<dt>truth</dt><dd><pre>{escape(str(row.get('ground_truth', '')))}</pre></dd></dl></article>"
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
        f"<tr><td>{event.at_s:,.1f} s</td><td><b>{escape(event.name)}</b></td><td>{escape(event.text)}</td></tr>"
        for event in data.events
    )
    more = (
        f'<p class="none">{data.num_events_left_out:,} more in events.jsonl</p>'
        if data.num_events_left_out
        else ""
    )
    verdicts = ", ".join(f"{name} {count:,}" for name, count in sorted(data.verdicts.items()))
    barrier = f'<p class="none">Verdicts of the barrier: {escape(verdicts)}</p>' if verdicts else ""
    return f'<section><h2>Events of note</h2>{barrier}<table class="events"><tbody>{rows}</tbody></table>{more}</section>'


def _config(data: RunData) -> str:
    if not data.config_text:
        return ""
    return (
        "<section><h2>Configuration</h2><details><summary>config.resolved.yaml</summary>"
        f"<pre class='config'>{escape(data.config_text)}</pre></details></section>"
    )
