"""All checks of a run directory, in order."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.controller.verify import deadlines, files
from paceline.controller.verify.entries import read
from paceline.controller.verify.findings import Entry, Findings
from paceline.controller.verify.history import History
from paceline.service import process_ends
from paceline.storage.places import checkpoints_of


def verify(run_dir: Path) -> Findings:
    """Checks a run directory.

    Raises:
        DataError: it holds no run, or one whose journal is too old.
        ConfigError: config.resolved.yaml cannot be read.
    """
    config = load(RunConfig, run_dir / "config.resolved.yaml")
    findings = Findings()
    history = follow(read(run_dir / "events.jsonl", findings), findings, config)
    files.check_metrics(run_dir, history)
    if config.trainer.save_trajectories:
        files.check_trajectories(run_dir, history)
    files.check_checkpoints(checkpoints_of(config, run_dir, history.run_id), history, history.run_id)
    findings.ends = [str(end) for end in process_ends.read(run_dir)]
    findings.counts["processes that ended"] = len(findings.ends)
    return findings


def follow(entries: Iterable[Entry], findings: Findings, config: RunConfig) -> History:
    """Checks a journal alone, in one pass."""
    on_cpu = config.learner.device == "cpu"
    history = History(findings, num_samples=config.rollout.n, repeatable=on_cpu)
    history.follow(deadlines.check(entries, config, findings))
    steps = history.steps.values()
    findings.counts["steps finished"] = len(steps)
    findings.counts["rows trained"] = sum(len(step.rows) for step in steps)
    findings.counts["prompt groups dropped"] = sum(step.num_dropped for step in steps)
    return history
