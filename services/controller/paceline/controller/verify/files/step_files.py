"""Compares the metrics and trajectories of finished steps with the journal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.controller.verify.digests import digest_of
from paceline.controller.verify.files.metrics_lines import MetricsLines
from paceline.controller.verify.files.trajectory_files import FileCheck
from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.journal.steps import recomputed_metrics
from paceline.controller.verify.journal.steps.step import StepHistory
from paceline.controller.verify.journal.term import Shape, Term
from paceline.controller.verify.journal.validation import ValidationCheck
from paceline.controller.verify.rows.trajectory_row import TrajectoryRow
from paceline.core.digest import file_digest
from paceline.core.policy import PolicyRange, PolicyTag, token_ages
from paceline.core.samples.trajectory import SCHEMA_VERSION

_VALIDATION = "val/"
# Each requested set has one such metric.
_COUNTS_PROMPTS = re.compile(r"val/([^/]+/)?num_prompts")
_ANY_NAME = re.compile(r".*")


class StepFiles:
    """Checks the files of steps, one step after another."""

    def __init__(self, run_dir: Path, metrics: MetricsLines, findings: Findings) -> None:
        self._folder, self._metrics, self._findings = run_dir / "trajectories", metrics, findings

    def check(self, step: StepHistory, number: int, entry: JournalEntry, run_id: str, term: Term) -> None:
        """Checks a finished step that no rewind makes void.

        Args:
            entry: the step's event `step`.
            term: the settings of the term in which it was finished.
        """
        computed = dict(step.metrics)
        if step.wanted is not None:
            of_batch = step.term or term
            check = _file_check(run_id, step.wanted.tag, step.shapes, of_batch)
            name = f"step_{number:06d}.parquet"
            self._check_file(name, check, step.rows, step.saved.get(name), of_batch, step.batch)
            computed |= recomputed_metrics.of_components(check.components, "reward")
            if of_batch.max_staleness and step.rows and len(check.num_sampled) == len(step.rows):
                computed["barrier/staleness/mean"], _ = token_ages(_parts(step.rows, check), number)
        if step.validation is not None:
            name = f"val_{number:06d}.parquet"
            computed |= self._check_answers(step.validation, name, step.saved.get(name), run_id)
        names = _ANY_NAME if step.validation is None else _COUNTS_PROMPTS
        line = self._metrics.of(number)
        self._check_line(f"line of step {number}", line, computed, entry, step.term or term, names)

    def check_validation(self, validation: ValidationCheck, entry: JournalEntry, run_id: str) -> None:
        """Checks a validation beside training that is over.

        Args:
            entry: the validation's event `validated`.
        """
        number = validation.step
        computed = self._check_answers(validation, f"val_{number:06d}.parquet", validation.saved, run_id)
        line = self._metrics.of(number, of_validation=True)
        what = f"line of the validation of step {number}"
        if line is None:
            self._findings.record(f"metrics.jsonl lacks the {what}, which is over", entry)
        self._check_line(what, line, computed, entry, validation.term, _COUNTS_PROMPTS)

    def _check_answers(
        self, validation: ValidationCheck, name: str, saved: JournalEntry | None, run_id: str
    ) -> dict[str, float]:
        """Checks a validation's file; returns the metrics that follow from it."""
        term, rows = validation.term, list(validation.rows())
        check = _file_check(run_id, PolicyTag.parse(validation.policy), None, term)
        check.own_shapes = validation.shapes()
        self._check_file(name, check, rows, saved, term, validation.entry)
        return validation.metrics() | _of_answers(validation, rows, check)

    def _check_file(
        self,
        name: str,
        check: FileCheck,
        rows: Sequence[TrajectoryRow],
        saved: JournalEntry | None,
        term: Term,
        shown: JournalEntry | None,
    ) -> None:
        import pyarrow

        if saved is None and not term.save_trajectories:
            return
        findings, path = self._findings, self._folder / name
        if saved is None and term.is_recorded:
            findings.i3(f"{name} of a finished step was not written, according to the journal", shown)
        try:
            is_written = saved is None or file_digest(path, like=saved["digest"]) == saved["digest"]
            num_rows = check.run(path, rows)
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            findings.i3(f"{name} of a finished step cannot be read: {error}", shown)
            return
        for fault in check.faults:
            findings.i3(f"{name} {fault}", shown)
        if not is_written:
            findings.record(f"{name} was changed after it was written", saved)
        findings.counts["rows in parquet files"] += num_rows
        findings.counts["digests of trajectories recomputed"] += check.num_recomputed
        unseen = findings.unseen
        if check.num_without_tokens:
            unseen["tokens, masks and log-probs of rows that have none"] += check.num_without_tokens
        if term.is_recorded and not check.recomputes:
            unseen["digests of trajectories whose messages have a different schema version"] += 1

    def _check_line(
        self,
        what: str,
        line: tuple[bytes, dict[str, Any]] | None,
        computed: Mapping[str, float],
        entry: JournalEntry,
        term: Term,
        may_be_strange: re.Pattern[str],
    ) -> None:
        if line is None:
            return
        text, plain = line
        faults = list(recomputed_metrics.differences(plain, computed))
        if term.is_recorded:
            names = filter(may_be_strange.fullmatch, plain)
            faults += recomputed_metrics.strangers(names, computed, _VALIDATION)
        if entry.get("metrics") not in (None, digest_of(text)):
            faults.append("was changed after it was written")
        for fault in faults:
            self._findings.record(f"the {what} in metrics.jsonl {fault}", entry)


def _file_check(run_id: str, policy: PolicyTag, shapes: Mapping[str, Shape] | None, term: Term) -> FileCheck:
    is_same_schema = term.schema == SCHEMA_VERSION
    return FileCheck(run_id=run_id, policy=policy, shapes=shapes or None, recomputes=is_same_schema)


def _parts(rows: Sequence[TrajectoryRow], check: FileCheck) -> Iterator[PolicyRange]:
    for row, count in zip(rows, check.num_sampled, strict=True):
        yield from row.ranges or [PolicyRange(row.policy or check.policy, 0, count)]


def _of_answers(
    validation: ValidationCheck, rows: Sequence[TrajectoryRow], check: FileCheck
) -> dict[str, float]:
    """Returns components and lengths of each set, from a validation's file."""
    metrics: dict[str, float] = {}
    for of in validation.sets:
        places = [place for place, row in enumerate(rows) if row.key.prompt_id in of.prompts]
        if places and len(check.num_sampled) == len(rows):
            metrics[f"{of.prefix}response_length/mean"] = fmean(check.num_sampled[i] for i in places)
        if places and len(check.components) == len(rows):
            components = [check.components[i] for i in places]
            metrics |= recomputed_metrics.of_components(components, of.prefix.removesuffix("/"))
    return metrics
