"""Chooses the prompt groups of earlier steps that a step trains again (`algorithm.replay`).

trained groups, oldest first -> filter, age, size -> the buffer -> drawn by (seed, step)

The draw is a function of what was trained, the settings and the step: it needs no state, and
`paceline verify` repeats it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedGroup:
    """A prompt group that a step trained for the first time.

    Attributes:
        oldest_version: the oldest version that sampled one of its tokens.
    """

    step: int
    prompt_id: int
    num_rows: int
    oldest_version: int


def groups_of(step: int, rows: Iterable[tuple[int, int]]) -> list[TrainedGroup]:
    """Returns the groups of a step's rows, each given by its prompt and the oldest version of its tokens."""
    versions: dict[int, list[int]] = {}
    for prompt, version in rows:
        versions.setdefault(prompt, []).append(version)
    return [
        TrainedGroup(step=step, prompt_id=prompt, num_rows=len(of), oldest_version=min(of))
        for prompt, of in versions.items()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRule:
    """The settings of `algorithm.replay`, and the run's seed."""

    seed: int
    prompts_per_step: int
    size: int
    filter_probability: float
    max_age: int

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ReplayRule:
        """Reads the rule from its form in the journal."""
        return cls(**{name: plain[name] for name in cls.__dataclass_fields__})

    def steps_before(self, step: int) -> range:
        """Returns the steps whose groups may be young enough to be trained again in `step`."""
        return range(max(1, step - self.max_age), step)

    def buffer(
        self, groups: Iterable[TrainedGroup], step: int, *, without: Collection[int] = ()
    ) -> list[TrainedGroup]:
        """Returns the groups that `step` may train again, newest first; only the newest of each prompt.

        Args:
            groups: groups that earlier steps trained for the first time.
            without: ids of the prompts that the step trains with new samples.
        """
        newest = sorted(groups, key=lambda group: (-group.step, group.prompt_id))
        return [
            group
            for group in self._newest(newest)
            if self._is_young(group, step) and group.prompt_id not in without
        ]

    def draw(
        self, groups: Iterable[TrainedGroup], step: int, *, without: Collection[int] = ()
    ) -> list[TrainedGroup]:
        """Returns the groups that `step` trains again, by prompt id: at most `prompts_per_step`."""
        buffer = self.buffer(groups, step, without=without)
        drawn = sorted(buffer, key=lambda group: self._number(group, f"drawn in {step}"))
        return sorted(drawn[: self.prompts_per_step], key=lambda group: group.prompt_id)

    def _is_young(self, group: TrainedGroup, step: int) -> bool:
        """Returns whether a group's oldest token is at most `max_age` versions behind the step."""
        return group.step < step and step - 1 - group.oldest_version <= self.max_age

    def _newest(self, groups: Iterable[TrainedGroup]) -> Iterator[TrainedGroup]:
        """Yields the groups that pass the filter among the newest `size` trajectories; each prompt once."""
        room, known = self.size, set[int]()
        for group in groups:
            if self._number(group, "kept") >= self.filter_probability:
                continue
            room -= group.num_rows
            if room < 0:
                return
            if group.prompt_id not in known:
                known.add(group.prompt_id)
                yield group

    def _number(self, group: TrainedGroup, what: str) -> float:
        """Returns a number in [0, 1) that follows from the seed and the group."""
        words = f"{self.seed}/{group.step}/{group.prompt_id}/{what}".encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") / 2**64
