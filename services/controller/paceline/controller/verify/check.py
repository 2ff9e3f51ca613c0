"""Checks a run directory; memory and time grow with the size of its files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.controller.verify.files import checkpoints
from paceline.controller.verify.files.metrics_lines import MetricsLines
from paceline.controller.verify.files.step_files import StepFiles
from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.journal import deadlines
from paceline.controller.verify.journal.entries import parse, read
from paceline.controller.verify.journal.history import History, OnFinished, OnValidated
from paceline.controller.verify.journal.steps.step import StepHistory
from paceline.controller.verify.journal.validation import ValidationCheck
from paceline.service import process_ends
from paceline.storage.places import checkpoints_of

_ENDS_OF_STEPS = re.compile(rb'"event": ?"(step|validated|rewind)"')


def verify(run_dir: Path) -> Findings:
    """Checks a run directory against the invariants.

    Raises:
        DataError: the directory holds no run, or the run's journal is too old.
        ConfigError: config.resolved.yaml cannot be read.
    """
    config = load(RunConfig, run_dir / "config.resolved.yaml")
    journal, findings = run_dir / "events.jsonl", Findings()
    lines = MetricsLines(run_dir / "metrics.jsonl")
    valid, files = _valid_steps(journal), StepFiles(run_dir, lines, findings)

    def check_files(history: History, step: StepHistory, number: int, entry: JournalEntry) -> None:
        # The files of a void step were overwritten.
        if valid.get(("step", number)) == entry.line:
            files.check(step, number, entry, history.run_id, history.term)

    def check_validation(history: History, check: ValidationCheck, entry: JournalEntry) -> None:
        if valid.get(("validated", check.step)) == entry.line:
            files.check_validation(check, entry, history.run_id)

    history = follow(read(journal, findings), findings, config, check_files, check_validation)
    validated = {*history.validations.beside.over, *history.validations.beside.unfinished}
    if fault := lines.fault(history.steps, history.finished, validated):
        findings.record(f"metrics.jsonl {fault}")
    checkpoints.check_checkpoints(checkpoints_of(config, run_dir, history.run_id), history, lines)
    findings.ends = [str(end) for end in process_ends.read(run_dir)]
    findings.counts["processes that ended"] = len(findings.ends)
    return findings


def follow(
    entries: Iterable[JournalEntry],
    findings: Findings,
    config: RunConfig,
    on_finished: OnFinished | None = None,
    on_validated: OnValidated | None = None,
) -> History:
    """Checks a journal in one pass; calls `on_finished` with each finished step, `on_validated` with each
    validation beside training that is over."""
    history = History(findings, config, on_finished, on_validated)
    history.follow(deadlines.check(entries, config, findings))
    steps = history.steps.values()
    findings.counts["steps finished"] = len(steps)
    findings.counts["rows trained"] = sum(step.num_rows for step in steps)
    if num_again := sum(step.num_again for step in steps):
        findings.counts["rows trained again"] = num_again
    findings.counts["prompt groups dropped"] = sum(step.num_dropped for step in steps)
    return history


def _valid_steps(journal: Path) -> dict[tuple[str, int], int]:
    """Returns the line number of each step's last `step` and `validated` event, without steps that a rewind
    made void."""
    valid: dict[tuple[str, int], int] = {}
    with journal.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            event = parse(line) if _ENDS_OF_STEPS.search(line) else None
            if event is None:
                continue
            if (kind := event.get("event")) in ("step", "validated"):
                valid[kind, int(event["step"])] = number
            elif kind == "rewind":
                valid = {key: at for key, at in valid.items() if key[1] <= int(event["to_step"])}
    return valid
