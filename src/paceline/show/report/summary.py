"""The lines that a run ends with: reward before and after, and where the run directory and the report are."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.show.metrics import TRAIN_REWARD, before_and_after, headlines
from paceline.show.report.content import MAX_LINES, METRICS
from paceline.show.report.lines import GrowingFile
from paceline.show.report.write import write_report

log = logging.getLogger(__name__)


def closing_lines(run_dir: Path) -> list[str]:
    """Writes the report and returns the lines that a run ends with."""
    metrics = list(GrowingFile(run_dir / METRICS).new(at_most=MAX_LINES))
    names = dict.fromkeys(name for line in metrics for name in line)
    changes = {title: _before_and_after(metrics, name) for title, name in headlines(names).items()}
    lines = [f"{title.lower()}: {change}" for title, change in changes.items() if change]
    lines.append(f"run directory: {run_dir}")
    if metrics:
        lines.append(_report(run_dir))
    return lines


def _before_and_after(metrics: Sequence[Mapping[str, Any]], name: str) -> str:
    seen = [(line.get("step"), line[name]) for line in metrics if isinstance(line.get(name), int | float)]
    if not seen:
        return ""
    (first_step, _), (last_step, _) = seen[0], seen[-1]
    first, last, count = before_and_after(name, [value for _, value in seen])
    if len(seen) == 1:
        return f"{first:.4f} (step {first_step})"
    if count > 1:
        return f"{first:.4f} before, {last:.4f} after (means of the first and the last {count} steps)"
    change = f"{first:.4f} before (step {first_step}), {last:.4f} after (step {last_step})"
    best_step, best = max(seen, key=lambda point: point[1])
    # A single batch of training is the best by chance.
    is_lower = name != TRAIN_REWARD and best > last
    return f"{change}; best {best:.4f} (step {best_step})" if is_lower else change


def _report(run_dir: Path) -> str:
    try:
        return f"report: {write_report(run_dir)}"
    except Exception as error:
        # The run is over and its numbers are on disk: an error in drawing must not look like a failed run.
        log.exception("the report was not written")
        return f"report: not written ({error})"
