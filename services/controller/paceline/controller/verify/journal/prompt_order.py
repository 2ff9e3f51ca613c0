"""Repeats the controller's draw of prompts from seed and data, and compares it with the run's requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.journal.term import Term
from paceline.data.mixture import MixtureState, PromptMixture


class PromptOrder:
    """Follows the draw of prompts; does nothing if the journal does not name the prompts.

    Weights that the user's function chose are taken from the journal.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._known: PromptMixture | None = None
        self._draw: PromptMixture | None = None
        self._finished: MixtureState | None = None
        self._after: dict[int, MixtureState] = {}
        self._ends: list[MixtureState] = []
        self._weights_chosen = False

    def begin_term(self, term: Term, *, in_step: bool) -> None:
        """Notes that a controller begins, with the same prompts as the one before.

        Args:
            in_step: whether a step is in progress. Its draw is not checked if no controller before this one
                named the prompts.
        """
        if self._known is None:
            self._known = term.mixture()
            self._draw = None if in_step else self._known
            if self._known is not None and self._finished is None:
                self._finished = self._known.state
            self._weights_chosen = term.weights_chosen

    def dispatch(self, step: int, prompts: Sequence[int], entry: JournalEntry) -> None:
        """Checks the first prompts of a step."""
        expected = self._take(step)
        if expected is None or list(prompts) == expected:
            return
        other = next((p for p in prompts if p not in expected), None)
        what = "in another order" if other is None else f"among them prompt {other}"
        self._findings.i2(
            f"step {step} asked for prompts that are not next, {what}: at {_plain(self._finished)} the "
            f"data's order puts {expected[:8]}",
            entry,
        )

    def again(self, step: int) -> None:
        """Notes that the step begins again: the draw goes back to the end of the step before."""
        if self._draw is not None:
            self._ends.append(self._after.get(step, self._draw.state))
        self._take(step)

    def refill(self, prompts: Sequence[int], asked: Collection[int], entry: JournalEntry) -> None:
        """Checks the prompts that replace others."""
        if self._draw is None:
            return
        expected = self._draw.take_more(len(prompts), without=asked)
        self._after[int(entry["step"])] = self._draw.state
        if list(prompts) != expected:
            self._findings.i2(
                f"step {entry['step']} took the prompts {list(prompts)[:8]} in place of others, but "
                f"{expected[:8]} are next",
                entry,
            )

    def finish(self, entry: JournalEntry) -> None:
        """Checks the cursor's position at the end of a step."""
        stated = entry.get("cursor") or {}
        if self._draw is None or not stated:
            self._go_to(stated)
            return
        # If a controller only finished a step, the one before it had drawn the prompts.
        step = int(entry["step"])
        reached = [self._after.get(step, self._draw.state), *self._ends]
        end = MixtureState.from_plain(stated)
        ends = [replace(state, chosen=end.chosen) for state in reached] if self._weights_chosen else reached
        if end not in ends:
            self._findings.i2(
                f"the cursor stands at {stated} after step {entry['step']}, but what was dispatched leads to "
                f"{_plain(reached[0])}",
                entry,
            )
        ahead = {later: state for later, state in self._after.items() if later > step}
        self._go_to(stated)
        self._after = ahead

    def rewind(self, entry: JournalEntry, finished: Mapping[str, Any] | None) -> None:
        """Checks where a rewind sets the cursor; the step that it goes back to had ended at `finished`."""
        stated = entry.get("cursor") or {}
        if self._draw is None or not stated:
            self._go_to(stated)
            return
        if finished and stated != finished:
            self._findings.i2(
                f"the cursor went back to {stated}, but step {entry['to_step']} had ended at {finished}",
                entry,
            )
        self._go_to(stated)

    def _go_to(self, stated: Mapping[str, Any]) -> None:
        self._draw = self._known
        if stated:
            self._finished, self._ends, self._after = MixtureState.from_plain(stated), [], {}

    def _take(self, step: int) -> list[int] | None:
        if self._draw is None or self._finished is None:
            return None
        self._draw.restore(self._after.get(step - 1, self._finished))
        prompts = sorted(self._draw.take(step))
        self._after[step] = self._draw.state
        return prompts


def _plain(state: MixtureState | None) -> Mapping[str, Any]:
    return {} if state is None else state.to_plain()
