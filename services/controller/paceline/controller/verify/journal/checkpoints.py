"""The checkpoints that the journal says were written."""

from __future__ import annotations

from paceline.controller.verify.findings import Findings, JournalEntry


class WrittenCheckpoints:
    """Follows the events `checkpoint` and `checkpoint_removed`.

    Attributes:
        by_step: the `checkpoint` events by step, except for void and removed checkpoints.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self.by_step: dict[int, JournalEntry] = {}

    def write(self, entry: JournalEntry, newest: int) -> None:
        """Takes a written checkpoint, whose version must be committed."""
        number = int(entry["step"])
        if number > newest:
            self._findings.i2(f"a checkpoint of step {number}, but version {newest} is committed", entry)
        self.by_step[number] = entry

    def remove(self, entry: JournalEntry) -> None:
        """Forgets a checkpoint that was removed from disk."""
        name = str(entry["folder"]).rstrip("/").rpartition("/")[2]
        # Checkpoints of void steps are named void_step_N; the rewind has removed them from this list.
        if name.startswith("step_"):
            self.by_step.pop(int(name.removeprefix("step_")), None)

    def rewind(self, to_step: int) -> None:
        """Makes the checkpoints of later steps void."""
        self.by_step = {number: entry for number, entry in self.by_step.items() if number <= to_step}
