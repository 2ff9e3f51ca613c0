"""What a run is summed up with: reward before and after, where things lie."""

from __future__ import annotations

import json
import logging
from pathlib import Path

log = logging.getLogger(__name__)

VAL_REWARD = "val/reward/mean"
TRAIN_REWARD = "critic/score/mean"


def read_lines(path: Path) -> list[dict[str, object]]:
    """The objects of a JSONL file; [] where there is none. A last line that was cut off in writing is left out."""
    if not path.is_file():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            lines.append(value)
    return lines


def closing_lines(run_dir: Path) -> list[str]:
    """Writes the report and returns the lines that a run ends with."""
    metrics = read_lines(run_dir / "metrics.jsonl")
    lines = []
    for name, key in (("validation reward", VAL_REWARD), ("training reward", TRAIN_REWARD)):
        words = _before_and_after(metrics, key)
        if words:
            lines.append(f"{name}: {words}")
    lines.append(f"run directory: {run_dir}")
    if metrics:
        lines.append(_report(run_dir))
    return lines


def _before_and_after(metrics: list[dict[str, object]], key: str) -> str:
    seen = [(line.get("step"), line[key]) for line in metrics if isinstance(line.get(key), int | float)]
    if not seen:
        return ""
    (first_step, first), (last_step, last) = seen[0], seen[-1]
    if len(seen) == 1:
        return f"{first:.4f} (step {first_step})"
    return f"{first:.4f} before (step {first_step}), {last:.4f} after (step {last_step})"


def _report(run_dir: Path) -> str:
    from paceline.cli.commands.report import write_report

    try:
        return f"report: {write_report(run_dir)}"
    except Exception as error:
        # The run is over and its numbers are on disk: a page that cannot be drawn must not look like a failed run.
        log.exception("the report was not written")
        return f"report: not written ({error})"
