"""Checks that a remote service's description of itself fits the configuration."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import grpc

from paceline.core.errors import ConfigError, RewardError, RewardErrorKind
from paceline.core.scoring import REWARD_CONTRACT, RewardDescription, ScoreItem
from paceline.reward.remote.client import call_describe
from paceline.reward.scoring.shape import Shape
from paceline.service.tasks import cancel

_log = logging.getLogger(__name__)

_LONGEST_S = 5.0


class Handshake:
    """Asks for a service's description before the first call on a connection, and again after a lost one.

    Calls that begin at the same time share one request and its answer or error.

    Args:
        peer: the service, in messages.
        timeout_s: deadline of a call.
    """

    def __init__(self, peer: str, shape: Shape, *, timeout_s: float) -> None:
        self._peer, self._shape, self._timeout_s = peer, shape, min(timeout_s, _LONGEST_S)
        self._described: RewardDescription | None = None
        self._asking: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def shake(self, channel: grpc.aio.Channel) -> None:
        """Asks for the service's description, unless it was received on this connection.

        Raises:
            ConfigError: the service has another version of the contract, or does not score what is required.
            PacelineError: the service did not answer, or the answer cannot be read.
        """
        if self._described is None or channel.get_state() is not grpc.ChannelConnectivity.READY:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask(channel), name=f"describe {self._peer}")
                self._tasks.add(self._asking)
                self._asking.add_done_callback(self._on_asked)
            await asyncio.shield(self._asking)  # others may wait for it, too
        if (problem := self.problem) is not None:
            raise ConfigError(problem)

    async def close(self) -> None:
        """Stops asking; callers that wait for an answer are cancelled."""
        await cancel(*self._tasks)

    async def _ask(self, channel: grpc.aio.Channel) -> None:
        described = await call_describe(channel, timeout_s=self._timeout_s, peer=self._peer)
        self._note(described)
        self._described = described

    def _on_asked(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._asking is task:
            self._asking = None
        if not task.cancelled():
            task.exception()  # marks it as retrieved, since nobody may be waiting

    @property
    def problem(self) -> str | None:
        """Says why the service cannot do what the configuration requires; None if it can."""
        problem = _mismatch(self._described, self._shape) if self._described is not None else None
        return None if problem is None else f"{self._peer} {problem}"

    def version(self, channel: grpc.aio.Channel) -> str | None:
        """Returns the version that the service named; None if it must be asked (again)."""
        if self._described is None or channel.get_state() is not grpc.ChannelConnectivity.READY:
            return None
        return self._described.version

    def forget(self) -> None:
        """Forgets the description: after a lost connection another version may answer."""
        self._described = self._asking = None

    def refused(self, items: Sequence[ScoreItem]) -> dict[str, RewardError]:
        """Returns, by trajectory id, errors for items of data sources that the service does not score."""
        sources = self._described.data_sources if self._described is not None else frozenset()
        if not sources:
            return {}
        return {
            item.trajectory_id: RewardError(
                f"it does not score the data source {item.data_source!r} but {', '.join(sorted(sources))}: "
                "name those under data_sources of the service, and add another scorer for the others",
                kind=RewardErrorKind.WRONG_TYPE,
            )
            for item in items
            if item.data_source not in sources
        }

    def _note(self, described: RewardDescription) -> None:
        if described == self._described:
            return
        if described.contract == 1:
            _log.info("%s speaks version 1 of the contract: it cannot say what it scores", self._peer)
            return
        sources = ", ".join(sorted(described.data_sources)) or "everything"
        _log.info("%s is %s and scores %s", self._peer, described.name or "unnamed", sources)


def _mismatch(described: RewardDescription, shape: Shape) -> str | None:
    if described.contract > REWARD_CONTRACT:
        return (
            f"speaks version {described.contract} of the contract of reward services; this Paceline speaks "
            f"versions 1 to {REWARD_CONTRACT}: upgrade Paceline on the run's hosts, or start the service "
            "with an earlier version"
        )
    if shape.group and not described.groups:
        return (
            "does not score the samples of a prompt together, as group: true of its configuration requires: "
            f"serve version {REWARD_CONTRACT} of the contract with groups (serve_reward(f, group=True)), or "
            "remove group"
        )
    if described.groups and not shape.group:
        return "scores the samples of a prompt together: write group: true in its configuration"
    missing = sorted(set(shape.data_sources) - described.data_sources) if described.data_sources else []
    if missing:
        return (
            f"scores {', '.join(sorted(described.data_sources))}, but not {', '.join(missing)}, which "
            "data_sources of its configuration names: correct one of the two"
        )
    return None
