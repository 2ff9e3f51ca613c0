"""Tracks which members of a run work, by polling its controller."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NoReturn

import psutil

from paceline.chaos.faults import CONTROLLER, Fault, FaultKind
from paceline.config.run import RunConfig
from paceline.core.errors import PacelineError
from paceline.core.members import LearnerState, RewardState, RolloutState
from paceline.runs import run_dir as run_dirs
from paceline.runs.controller_client import ControllerClient, MemberStatus
from paceline.runs.run_dir import RunNote

_POLL_S = 0.3
# To the controller, a killed member counts as working until its silence is noticed.
_FRESH_S = 2.5
_WORKING = frozenset(
    state.value
    for state in (
        RolloutState.SERVING,
        RolloutState.SYNCING,
        RewardState.SERVING,
        *(set(LearnerState) - {LearnerState.LOADING}),
    )
)


class Roster:
    """Knows which members of the run in `run_dir` work."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.all = frozenset(_member_ids(config))
        self._working: frozenset[str] = frozenset()
        self._asked_at = -1.0
        self._pids: dict[str, int] = {}
        self._since: dict[str, float] = {}

    async def run(self) -> NoReturn:
        """Asks until it is cancelled."""
        while True:
            asked_at = asyncio.get_running_loop().time()
            with contextlib.suppress(PacelineError):
                note = run_dirs.read_note(self._run_dir)
                if note is not None and note.controller:
                    async with ControllerClient.of_run(note) as controller:
                        members = (await controller.status()).members
                    self._note_pids(_running(note), asyncio.get_running_loop().time())
                    self._working = frozenset(m.member_id for m in members if self._works(m, asked_at))
                    self._asked_at = asked_at
            await asyncio.sleep(_POLL_S)

    async def until_working(
        self, members: Collection[str], *, service: str = "", unlike: int | None = None
    ) -> None:
        """Waits until an answer from now on names all `members` as working.

        With `unlike`, the process of `service` must also differ from that process.
        """
        since = asyncio.get_running_loop().time()
        while True:
            replaced = unlike is None or self._pids.get(service, unlike) != unlike
            if replaced and self._asked_at >= since and self._working.issuperset(members):
                return
            await asyncio.sleep(_POLL_S)

    def affected_by(self, fault: Fault) -> frozenset[str]:
        """Returns the members that must work again before a fault is over, if it comes now."""
        service = fault.target.partition("/")[0]
        if fault.place.startswith("link") and service == CONTROLLER:
            # A member that is restarting because of another fault is not affected by this one.
            return self._working
        if service.startswith("learner"):
            return frozenset({"learner-0"})
        return self.all & {service, f"{service}-0"}

    def _note_pids(self, pids: dict[str, int], now: float) -> None:
        self._since = {
            name: self._since[name] if self._pids.get(name) == pid else now for name, pid in pids.items()
        }
        self._pids = pids

    def _works(self, member: MemberStatus, asked_at: float) -> bool:
        heard = asked_at - member.seconds_since_heartbeat
        # A report from before the process began is about its predecessor.
        since = [
            self._since[name]
            for name in (member.member_id, member.member_id.rpartition("-")[0])
            if name in self._since
        ]
        is_fresh = member.seconds_since_heartbeat < _FRESH_S
        return bool(since) and heard >= max(since) and is_fresh and member.state in _WORKING


def ends_its_process(fault: Fault) -> bool:
    """Returns whether a new process replaces a service that is hit."""
    return fault.kind is FaultKind.KILL and not fault.target.endswith("/child")


def _running(note: RunNote) -> dict[str, int]:
    """Returns the ids of the running processes; the launcher replaces the ids of restarted ones."""
    pids = {}
    for name, pid in note.pids.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                pids[name] = pid
    return pids


def _member_ids(config: RunConfig) -> Iterator[str]:
    yield from ("learner-0", "reward-0")
    yield from (f"rollout-{i}" for i in range(config.rollout.replicas))
