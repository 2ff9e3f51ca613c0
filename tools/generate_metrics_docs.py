#!/usr/bin/env python3
"""Writes the tables of the numbers in metrics.jsonl into docs/metrics.md; --check fails if they differ."""

from __future__ import annotations

import sys
from pathlib import Path

from marked_tables import page_with_tables

from paceline.core.run_record.step_metrics import STEP_METRICS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
TITLES = {
    "critic/score": "Rewards and advantages",
    "response_length": "Responses",
    "actor": "The policy's update",
    "critic/vf_loss": "The critic's update",
    "rollout": "Engine and learner",
    "val": "Held-out prompts",
    "barrier": "The barrier",
    "ahead": "Work ahead of the barrier",
    "guard": "The guard",
    "timing_s": "Seconds",
    "perf": "Throughput",
    "weights": "The weight push",
}


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    text = page_with_tables(PAGE, {"numbers of a step": step_tables()})
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") != text:
            print(f"stale: {PAGE.name}; run make generate")
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


def step_tables() -> str:
    """Returns a titled table for each group of metrics."""
    lines, rest = [], dict(TITLES)
    for name, says in STEP_METRICS.items():
        title = next((rest.pop(start) for start in list(rest) if name.startswith(start)), None)
        if title is not None:
            lines += ["", f"### {title}", "", "| metric | says |", "| --- | --- |"]
        lines.append(f"| `{name}` | {says} |")
    return "\n".join(lines).strip()


if __name__ == "__main__":
    sys.exit(main())
