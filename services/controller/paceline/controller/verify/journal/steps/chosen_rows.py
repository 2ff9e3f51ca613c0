"""The rows that a step trained on, from the journal: those of its only sampling, or the listed ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.journal.steps.collection import Collection, trained_row
from paceline.core.ids import NEVER_TRAINED, TrajectoryId
from paceline.core.training import BatchRow


def rows_of(
    collections: Sequence[Collection], entry: JournalEntry, findings: Findings
) -> tuple[BatchRow, ...]:
    """Returns the rows of an event `batch`; notes those that no sampling of the step can have given."""
    left = [(collection, collection.close(entry)) for collection in collections]
    listed = entry.get("rows")
    if listed is not None:
        return tuple(_Listed(left, entry, findings).rows(listed))
    if len(left) != 1:
        findings.i3(
            f"the batch of step {entry['step']} does not say to which of {len(left)} samplings it belongs",
            entry,
        )
    return tuple(row for collection, prompts in left[:1] for row in collection.rows(prompts))


class _Listed:
    """Reads the rows that a dataflow chose."""

    def __init__(
        self, left: Sequence[tuple[Collection, list[int]]], entry: JournalEntry, findings: Findings
    ) -> None:
        self._entry, self._findings = entry, findings
        self._samples: dict[TrajectoryId, tuple[Collection, float]] = {}
        for collection, prompts in left:
            for key, reward in collection.rewards(prompts).items():
                if collection.asks_for(key) and key.purpose not in NEVER_TRAINED:
                    self._samples[key] = collection, reward
        self._last: tuple[int, str, int] | None = None

    def rows(self, listed: Sequence[Sequence[Any]]) -> Iterator[BatchRow]:
        for text, given, baseline in listed:
            key = TrajectoryId.parse(text)
            if self._last is not None and key.place <= self._last:
                self._breach(f"{key} is trained twice or out of order")
            self._last = key.place
            if key not in self._samples:
                self._breach(f"{key} was trained, but no sampling of the step kept it")
                continue
            collection, reward = self._samples[key]
            row = trained_row(key, collection.admitted[key], reward, baseline)
            if given is not None:
                self._findings.unseen["the rewards that dataflows gave instead of scorers"] += 1
                row = replace(row, reward=float(given), token_rewards=())
            if not all(math.isfinite(number) for number in (row.reward, baseline or 0.0)):
                self._breach(f"{key} was trained with the reward {row.reward} and the baseline {baseline}")
            yield row

    def _breach(self, sentence: str) -> None:
        self._findings.i3(f"step {self._entry['step']}: {sentence}", self._entry)
