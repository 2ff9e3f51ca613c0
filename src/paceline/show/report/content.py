"""Reads what a page shows of a run directory, as plain values for JSON, also during the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.broker.address import redact
from paceline.runs.run_dir import RESOLVED, START, read_tree
from paceline.service import process_ends
from paceline.show.metrics import TRAIN_REWARD, VAL_REWARD, before_and_after, headlines
from paceline.show.report.journal import JournalView, read_end
from paceline.show.report.lines import GrowingFile, evenly
from paceline.show.report.samples import SampleFiles
from paceline.show.report.step_table import StepTable
from paceline.show.report.timeline import timelines
from paceline.show.report.token_texts import TokenTexts

METRICS = "metrics.jsonl"
JOURNAL = "events.jsonl"
NOTE = "note.txt"

MAX_LINES = 3000
_NUM_SPARKS = 40


class RunContent:
    """Reads a run directory; a missing file counts as empty. Not safe for several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics, self._journal = GrowingFile(folder / METRICS), GrowingFile(folder / JOURNAL)
        self._table, self._view = StepTable(), JournalView()
        self._settings, self._settings_at = dict[str, Any](), -1.0
        self.samples = SampleFiles(folder / "trajectories", TokenTexts(_tokenizer_folders(folder)))

    def head(self) -> dict[str, Any]:
        """Returns name, note, facts, start, duration, progress and rewards."""
        self._read_metrics()
        tree = self._tree()
        times = [time for _, time in self._table.points("time")]
        return {
            "name": self.folder.name,
            "note": _note(self.folder / NOTE),
            "began": min(times, default=None),
            "seconds": max(times) - min(times) if times else None,
            "spark": _spark(self._table),
            "facts": _facts(tree),
            "end": read_end(self.folder / JOURNAL),
            "step": max(self._table.steps, default=None),
            "total_steps": (tree.get("trainer") or {}).get("total_steps"),
            "headlines": {
                title: _before_and_after(self._table, name)
                for title, name in headlines(self._table.names()).items()
            },
        }

    def metrics(self, *, generation: int = 0, start: int = 0) -> dict[str, Any]:
        """Returns the lines of metrics.jsonl from `start` on, or all if the file was replaced since."""
        self._read_metrics()
        same = generation == self._metrics.generation
        part = self._table.part(min(start, len(self._table)) if same else 0, MAX_LINES)
        return {"generation": self._metrics.generation, "is_new": not same, **part}

    def journal(self) -> dict[str, Any]:
        """Returns notes, fleet, fired guard rules and verdicts; slow for a long run."""
        self._read_journal()
        return self._view.content(process_ends.read(self.folder))

    def timelines(self, steps: set[int]) -> dict[int, list[dict[str, Any]]]:
        """Returns the spans of each of the steps."""
        return timelines(self.folder / "spans.jsonl", steps)

    def config(self) -> str:
        """Returns config.resolved.yaml without its passwords."""
        path = self.folder / RESOLVED
        return redact(path.read_text(encoding="utf-8")) if path.is_file() else ""

    def steps_of_interest(self) -> list[int]:
        """Returns the first, the middle, the last and the slowest step."""
        self._read_metrics()
        seconds = [(step, s) for step, s in self._table.points("timing_s/step") if step > 0]
        if not seconds:
            return []
        steps = [step for step, _ in seconds]
        slowest = max(seconds, key=lambda pair: pair[1])[0]
        return sorted({steps[0], steps[len(steps) // 2], steps[-1], slowest})

    def _tree(self) -> Mapping[str, Any]:
        """Returns the configuration, which is read again when it has changed."""
        path = self.folder / RESOLVED
        changed_at = path.stat().st_mtime if path.is_file() else 0.0
        if changed_at != self._settings_at:
            self._settings, self._settings_at = read_tree(path), changed_at
        return self._settings

    def _read_metrics(self) -> None:
        generation = self._metrics.generation
        for row in self._metrics.new(at_most=MAX_LINES):
            if self._metrics.generation != generation:
                self._table, generation = StepTable(), self._metrics.generation
            self._table.add([row])

    def _read_journal(self) -> None:
        generation = self._journal.generation
        for lines in self._journal.new_portions():
            if self._journal.generation != generation:
                self._view, generation = JournalView(), self._journal.generation
            self._view.add(lines)


def is_run(folder: Path) -> bool:
    """Returns whether a folder holds a run, even one that has only begun."""
    return any((folder / name).is_file() for name in (METRICS, JOURNAL, RESOLVED, START))


def _facts(tree: Mapping[str, Any]) -> list[str]:
    model, algorithm, learner, rollout = (
        tree.get(name) or {} for name in ("model", "algorithm", "learner", "rollout")
    )
    facts = [
        model.get("path"),
        algorithm.get("adv_estimator"),
        _count(learner.get("world_size"), "learner rank"),
        _count(rollout.get("replicas"), "rollout server"),
        model.get("dtype"),
    ]
    return [str(fact) for fact in facts if fact]


def _count(number: object, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}" if number else ""


def _before_and_after(table: StepTable, name: str) -> list[float] | None:
    """Returns the result of `before_and_after` as a list; None without values."""
    values = [value for _, value in table.points(name)]
    return [*before_and_after(name, values)] if values else None


def _spark(table: StepTable) -> list[float]:
    """Returns evenly spaced rewards of validations, or of training if there are fewer than three."""
    names = (VAL_REWARD, TRAIN_REWARD)
    of_both = [[float(f"{value:.4g}") for _, value in table.points(name)] for name in names]
    values = of_both[0] if len(of_both[0]) > 2 else of_both[1]
    return [values[place] for place in evenly(0, len(values), _NUM_SPARKS)]


def _note(path: Path) -> str:
    """Returns the first line of a run's note, which its owner wrote."""
    try:
        return path.read_text(encoding="utf-8").strip().partition("\n")[0][:200]
    except (OSError, UnicodeDecodeError):
        return ""


def _tokenizer_folders(folder: Path) -> list[Path]:
    model = read_tree(folder / RESOLVED).get("model") or {}
    named = [model.get("tokenizer_path"), model.get("path")]
    return [folder / "model", *(Path(str(name)) for name in named if name)]
