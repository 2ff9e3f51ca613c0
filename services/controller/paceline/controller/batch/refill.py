"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): replaces prompt groups without a learning signal.

    complete groups -> equal scores? -> set aside, and the next prompts of the data cursor in their places

With p1, p2, ... the prompts as the cursor yields them, B the prompts of a step, E the bound on further ones
and d(k) the number of the first k groups whose scores are all equal, a step asks for p1 ... pk with the
smallest k for which k = B + min(d(k), E). Each group that is set aside draws one prompt at once, not when all
others are in. That does not make the batch depend on arrival: prompt k + 1 is drawn only when k + 1 - B of
the first k are set aside, which the smallest k rules out in any order. A group without a reward is not
replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from paceline.controller.batch.barrier import Barrier
from paceline.core.errors import ConfigError
from paceline.core.samples.trajectory import ScoredHeader
from paceline.data.prompts import Prompt

DEGENERATE = "degenerate"
"""The reason, in the journal, of a group that was set aside because its scores are equal."""

Draw = Callable[[int, Collection[int]], Mapping[int, Prompt]]
"""`draw(count, without)`: the next `count` prompts with ids not in `without`; fewer if there are no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """Groups set aside, each with its one score, and the prompts that replace them, which may be fewer."""

    set_aside: Mapping[int, float]
    prompts: Mapping[int, Prompt]


class Refill:
    """Draws further prompts for one step's batch.

    Args:
        asked: the prompt ids that the step begins with.
        max_extra: most prompts beyond them.
        metric: the reward component that is compared; None: the reward.
    """

    def __init__(
        self,
        *,
        asked: Collection[int],
        max_extra: int,
        draw: Draw,
        metric: str | None = None,
    ) -> None:
        self._asked = set(asked)
        self._max_extra, self._draw, self._metric = max_extra, draw, metric
        self._num_first, self._num_aside = len(self._asked), 0

    @property
    def num_extra(self) -> int:
        """Prompts drawn so far beyond the step's first ones."""
        return len(self._asked) - self._num_first

    @property
    def num_unfilled(self) -> int:
        """Groups set aside that no prompt replaces: the bound was reached, or there is no further prompt."""
        return self._num_aside - self.num_extra

    def settle(self, barrier: Barrier, prompt_ids: Iterable[int]) -> Replacement:
        """Judges complete groups: `barrier` sets aside those with equal scores, and expects others.

        Raises:
            ConfigError: a sample lacks the component `metric`.
        """
        set_aside = {}
        for prompt_id in sorted(set(prompt_ids)):
            if barrier.is_complete(prompt_id):
                scores = {self._score(header) for header in barrier.group(prompt_id)}
                if len(scores) == 1:
                    barrier.set_aside(prompt_id)
                    set_aside[prompt_id] = scores.pop()
        self._num_aside += len(set_aside)
        count = min(len(set_aside), self._max_extra - self.num_extra)
        drawn = self._draw(count, self._asked) if count else {}
        self._asked.update(drawn)
        barrier.expect(drawn)
        return Replacement(set_aside=set_aside, prompts=drawn)

    def _score(self, header: ScoredHeader) -> float:
        if self._metric is None:
            return header.reward or 0.0
        try:
            return header.components[self._metric]
        except KeyError:
            raise ConfigError(
                f"algorithm.dynamic_sampling.metric={self._metric!r} is no component of the reward of "
                f"{header.trajectory_id}; its components are "
                f"{', '.join(sorted(header.components)) or 'none'}; "
                "write one of them, or null for the whole reward"
            ) from None
