#!/usr/bin/env python3
"""Writes docs/metrics.md from the catalogue of metrics.jsonl's numbers; with --check, fails if it differs."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.core.step_metrics import STEP_METRICS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEAD = """# Metrics

*Generated from `src/paceline/core/step_metrics.py` by `tools/generate_metrics_docs.py`; do not edit.*

`metrics.jsonl` in the run directory has one line per finished step, step 0 being the starting model. Each is
an object with `step`, `time` (when the line was written, in Unix seconds) and the numbers below, as far as
the step has them: a step without a validation has none of `val/`. A number that is not finite is `null`.
Prometheus gets the same numbers ([observability](observability.md)).
"""

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
    lines, rest = [HEAD.rstrip("\n")], dict(TITLES)
    for name, says in STEP_METRICS.items():
        title = next((rest.pop(start) for start in list(rest) if name.startswith(start)), None)
        if title is not None:
            lines += ["", f"## {title}", "", "| metric | says |", "| --- | --- |"]
        lines.append(f"| `{name}` | {says} |")
    text = "\n".join(lines) + "\n"
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print(f"stale: {PAGE.name}; run make generate")
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
