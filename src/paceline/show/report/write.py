"""Writes a run's page with its data inside, so that it can be kept and sent around."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.errors import DataError
from paceline.service.process import write_atomically
from paceline.show.report.content import RunContent, is_run
from paceline.show.report.page import page

FILE_NAME = "report.html"

_MAX_ROWS = 60
_MAX_TOKENS = 1000


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Writes the page of a run that has ended or is under way; returns its path.

    Raises:
        DataError: the folder holds no run.
    """
    if not is_run(run_dir):
        raise DataError(f"{run_dir} holds no run (no metrics.jsonl); give a run directory")
    path = out or run_dir / FILE_NAME
    write_atomically(path, page(run_dir.name, frozen(RunContent(run_dir))))
    return path


def frozen(content: RunContent) -> dict[str, Any]:
    """Returns all data that the page can ask for, for some steps."""
    samples, details = _samples(content)
    return {
        "runs": [content.head()],
        "metrics": content.metrics(),
        "journal": content.journal(),
        "timelines": content.timelines(set(content.steps_of_interest())),
        "samples": samples,
        "details": details,
        "config": content.config(),
    }


def _samples(content: RunContent) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns rows of the first, middle and last step and the last validation, evenly spread over rewards."""
    samples: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for name in _chosen(content.samples.names()):
        rows = sorted(content.samples.rows(name), key=lambda row: -(row["reward"] or 0.0))
        count = min(len(rows), _MAX_ROWS)
        places = sorted({round(i * (len(rows) - 1) / max(1, count - 1)) for i in range(count)})
        samples[name] = [rows[place] for place in places]
        numbers = [row["row"] for row in samples[name]]
        details[name] = {
            number: detail
            for number, detail in content.samples.details(name, numbers).items()
            if len(detail.get("tokens", ())) <= _MAX_TOKENS
        }
    return samples, details


def _chosen(names: list[str]) -> list[str]:
    steps = [name for name in names if name.startswith("step")]
    validations = [name for name in names if name.startswith("val")]
    return list(dict.fromkeys([*steps[:1], *steps[len(steps) // 2 :][:1], *steps[-1:], *validations[-1:]]))
