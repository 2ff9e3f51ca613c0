"""Limits how much a sampler has under way at once, and counts it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from paceline.config.run import RunConfig
from paceline.core.samples.trajectory import PromptGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerLimits:
    """Limits how much may be under way at once, and for how long.

    Args:
        num_samples: samples that the engine decodes at once. While that many are unfinished or wait for room
            in the mailbox, no group begins, because another server could decode samples that would wait here.
        num_groups: most groups, of any size.
        num_open: most samples that have not ended, including those that wait for a tool.
        group_timeout_s: longest time that one group may take in the engine.
        max_deliveries: attempts that a group gets before it is refused.
        groups_together: whether a group's samples are sent in one message.
        probe_timeout_s: longest time for a single token, before the engine counts as hung.
        in_flight: treatment of samples under way when new weights come (`rollout.in_flight`).
        save_progress_s: `rollout.save_progress_s`.
        validates: whether this server answers held-out prompts, from the validation servers' own mailboxes.
        reports_beside: whether messages about held-out prompts go to the mailbox of validations beside
            training.
        max_staleness: how many versions older than the server's a group's version may be; a group's version
            is the oldest that may draw it.
    """

    num_samples: int
    num_groups: int
    group_timeout_s: float
    lease_s: float
    max_stream_length: int
    append_timeout_s: float
    max_deliveries: int
    probe_timeout_s: float = 60.0
    num_open: int = 2**31
    groups_together: bool = False
    in_flight: str = "wait"
    max_staleness: int = 0
    save_progress_s: float = 5.0
    validates: bool = False
    reports_beside: bool = False

    @property
    def mixes_versions(self) -> bool:
        """Whether samples under way go on with new weights."""
        return self.in_flight != "wait"

    @classmethod
    def of(cls, config: RunConfig, *, validates: bool = False) -> SamplerLimits:
        """Returns the limits that the configuration sets.

        Args:
            validates: whether the server only answers held-out prompts, each with a single version.
        """
        rollout, in_flight = config.rollout, config.pushes_in_flight and not validates
        return cls(
            num_samples=rollout.max_num_seqs,
            num_groups=rollout.max_groups_in_flight or 2**31,
            group_timeout_s=config.request_timeout_s,
            lease_s=config.broker.lease_s,
            max_stream_length=config.broker.max_stream_length,
            append_timeout_s=config.stall_timeout_s,
            max_deliveries=rollout.max_deliveries,
            groups_together=config.scores_groups,
            in_flight=rollout.in_flight if in_flight else "wait",
            max_staleness=config.barrier.bound if in_flight else 0,
            validates=validates,
            reports_beside=config.validates_beside,
            save_progress_s=rollout.save_progress_s,
            num_open=max(rollout.episode.max_open or 4 * rollout.max_num_seqs, rollout.max_num_seqs),
        )


class Capacity:
    """Counts groups and samples against the limits.

    A sample is first *drawing*, in the engine, and then *delivering*, on its way into the mailbox. An episode
    is *acting* while it waits for a tool or its environment, and then takes no room in the engine. A group
    counts until all of its samples have been delivered.

    Args:
        is_full: whether episodes of the groups under way wait for room in the engine's memory.

    Attributes:
        num_groups: how many prompt groups are under way.
    """

    def __init__(self, limits: SamplerLimits, is_full: Callable[[], bool] = bool) -> None:
        self._limits, self._is_full = limits, is_full
        self._changed = asyncio.Event()
        self.clear()

    def clear(self) -> None:
        """Notes that no group is under way."""
        self._drawing = self._delivering = self._acting = self.num_groups = 0

    @property
    def num_samples(self) -> int:
        """Samples that are under way: drawn, waiting for a tool, or waiting for their delivery."""
        return self._drawing + self._acting + self._delivering

    async def wait_for_room(self) -> None:
        """Returns as soon as there is room for a group."""
        limits = self._limits
        while (
            max(self._drawing, self._delivering) >= limits.num_samples
            or self._drawing + self._acting >= limits.num_open
            or self.num_groups >= limits.num_groups
            or self._is_full()
        ):
            self._changed.clear()
            await self._changed.wait()

    async def wait_until_idle(self) -> None:
        """Returns as soon as no group is under way."""
        while self.num_groups:
            self._changed.clear()
            await self._changed.wait()

    def group_began(self, group: PromptGroup) -> None:
        """Notes that the engine is about to draw the group's samples."""
        self.num_groups += 1
        self._drawing += group.num_samples

    def samples_ended(self, num_samples: int) -> None:
        """Notes that the engine is done with this many samples."""
        self._drawing -= num_samples
        self._changed.set()

    def turn_ended(self) -> None:
        """Notes that a sample waits for its tool or environment."""
        self._drawing -= 1
        self._acting += 1
        self._changed.set()

    def turn_began(self) -> None:
        """Notes that an episode is drawn again. It waits for no room: the oldest episodes go on first."""
        self._drawing += 1
        self._acting -= 1

    def delivery_began(self, num_samples: int) -> None:
        """Notes that this many samples are on their way into the mailbox."""
        self._delivering += num_samples

    def group_ended(self, *, undrawn: int, delivering: int) -> None:
        """Notes that a group is over: delivered, refused or aborted.

        Args:
            undrawn: number of its samples that the engine had not finished.
            delivering: number of its samples whose delivery has begun.
        """
        self.num_groups -= 1
        self._delivering -= delivering
        self.samples_ended(undrawn)
