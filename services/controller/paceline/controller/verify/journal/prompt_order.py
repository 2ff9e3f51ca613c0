"""Whether a run asks for the prompts that seed and data put next: the controller's walk, once more."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from paceline.controller.verify.findings import Findings, Invariant, JournalEntry
from paceline.controller.verify.journal.term import Term
from paceline.data.cursor import CursorState, PromptCursor


class PromptOrder:
    """Follows the walk over the prompts; does nothing where the journal does not name them."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._known: PromptCursor | None = None
        self._walk: PromptCursor | None = None
        self._finished = CursorState(epoch=0, position=0)
        self._ends: list[Mapping[str, Any]] = []

    def begin_term(self, term: Term, *, in_step: bool) -> None:
        """A controller begins, with the same prompts as those before.

        Args:
            in_step: whether a step is in progress. It is not followed where no controller before named them.
        """
        if self._known is None:
            self._known = term.prompt_cursor()
            self._walk = None if in_step else self._known

    def dispatch(self, step: int, prompts: Sequence[int], entry: JournalEntry) -> None:
        """Checks the prompts with which a step begins."""
        expected = self._take()
        if expected is None or list(prompts) == expected:
            return
        other = next((p for p in prompts if p not in expected), None)
        what = "in another order" if other is None else f"among them prompt {other}"
        self._findings.add(
            Invariant.I2,
            f"step {step} asked for prompts that are not next, {what}: at {asdict(self._finished)} the "
            f"data's order puts {expected[:8]}",
            entry,
        )

    def again(self) -> None:
        """The step begins again: the walk goes back to where the step before it ended."""
        if self._walk is not None:
            self._ends.append(asdict(self._walk.state))
        self._take()

    def refill(self, prompts: Sequence[int], asked: Collection[int], entry: JournalEntry) -> None:
        """Checks the prompts that replace others."""
        if self._walk is None:
            return
        expected = self._walk.take_more(len(prompts), without=asked)
        if list(prompts) != expected:
            self._findings.add(
                Invariant.I2,
                f"step {entry['step']} took the prompts {list(prompts)[:8]} in place of others, but "
                f"{expected[:8]} are next",
                entry,
            )

    def finish(self, entry: JournalEntry) -> None:
        """Checks where the cursor stands at the end of a step."""
        stated = entry.get("cursor") or {}
        if self._walk is None or not stated:
            self._go_to(stated)
            return
        # A step that a second controller only finished was drawn by the one before it.
        reached = [asdict(self._walk.state), *self._ends]
        if stated not in reached:
            self._findings.add(
                Invariant.I2,
                f"the cursor stands at {stated} after step {entry['step']}, but what was dispatched leads to "
                f"{reached[0]}",
                entry,
            )
        self._go_to(stated)

    def rewind(self, entry: JournalEntry, finished: Mapping[str, Any] | None) -> None:
        """Checks where the cursor is set to by a rewind, to a step that ended at `finished`."""
        stated = entry.get("cursor") or {}
        if self._walk is None or not stated:
            self._go_to(stated)
            return
        if finished and stated != finished:
            self._findings.add(
                Invariant.I2,
                f"the cursor went back to {stated}, but step {entry['to_step']} had ended at {finished}",
                entry,
            )
        self._go_to(stated)

    def _go_to(self, stated: Mapping[str, Any]) -> None:
        self._walk = self._known
        if stated:
            self._finished, self._ends = CursorState(**stated), []

    def _take(self) -> list[int] | None:
        if self._walk is None:
            return None
        # Going to a position shuffles the epoch once more.
        if self._walk.state != self._finished:
            self._walk.restore(self._finished)
        return sorted(self._walk.take())
