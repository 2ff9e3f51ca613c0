"""A run's services and broker, which outlive its controller and lose things."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from paceline.broker import names
from paceline.broker.base import Outgoing
from paceline.core.members import LearnerState, MemberKind
from paceline.core.samples.trajectory import ScoredHeader
from paceline.wire import decode_scored, encode_scored_header
from support.fake_fleet import FakeServices, score_by_component
from support.memory_broker import MemoryBroker
from support.sequencer_run import RUN, SequencerRun, config, run_of


class Killed(Exception):
    """The controller's process ends here."""


class FaultyFleet:
    """The parts of a run that outlive its controller."""

    def __init__(self, folder: Path, changes: dict[str, Any]) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.changes = folder, changes
        self.services, self.broker, self.restarts = FakeServices(), MemoryBroker(), 0
        self.services.writes, self.answer = True, score_by_component
        self.services.has_blob = lambda key: key in self.broker._store.blobs

    def empty(self) -> None:
        store = self.broker._store
        store.streams.clear()
        store.blobs.clear()
        store.last_number = 0

    def lose_store(self, name: str) -> None:
        """A blob store dies and comes back empty."""
        blobs = self.broker._store.blobs
        for key in [key for key in blobs if names.store_of(key) == name]:
            del blobs[key]

    def lose_messages(self, share: str) -> None:
        """Only the marker, the groups and the blobs stay, and every other message if `share` is half."""
        for stream in self.broker._store.streams.values():
            for number in list(stream.entries)[:: 2 if share == "half" else 1]:
                del stream.entries[number]
                for group in stream.groups.values():
                    group.pending.pop(number, None)

    def scored_headers(self) -> list[ScoredHeader]:
        """Those that the broker holds."""
        stream = self.broker._store.streams.get(names.scored(RUN))
        entries = [] if stream is None else stream.entries.values()
        messages = [decode_scored(entry.payload) for entry in entries]
        return [message for message in messages if isinstance(message, ScoredHeader)]

    def send(self, headers: Iterable[ScoredHeader]) -> None:
        """Appends headers to the log of scored samples, as a reward service does."""
        messages = [
            Outgoing(stream=names.scored(RUN), payload=encode_scored_header(header)) for header in headers
        ]
        self.sending = asyncio.get_running_loop().create_task(self.broker.append(messages))

    def journal(self) -> list[dict[str, Any]]:
        """The events of all its controllers."""
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]

    def restart_learner(self, it: SequencerRun, reason: str) -> None:
        steps = [int(path.parent.name[5:]) for path in self.folder.glob("checkpoints/step_*/manifest.json")]
        services, self.restarts = self.services, self.restarts + 1
        services.version = max(steps, default=0)
        services.source = services.sources.get(services.version, services.version)
        services.trained.clear()
        changes = it.supervisor.fleet.register(
            kind=MemberKind.LEARNER,
            member_id="learner",
            incarnation=f"life {self.restarts}",
            address="learner",
            num_ranks=1,
            state=LearnerState.READY,
        )
        self.restarting = asyncio.get_running_loop().create_task(it.supervisor.apply(changes))

    def end_servers(self, it: SequencerRun, names: Collection[str]) -> None:
        """Servers end, and come back without weights."""
        self.restarts += 1
        for member in it.supervisor.fleet.members(MemberKind.ROLLOUT):
            if member.member_id in names:
                self.services.standings.pop(member.member_id, None)
                standing = self.services.standings[member.member_id] = self.services.standing(
                    member.member_id
                )
                member.state, member.policy = standing.state, standing.policy
                member.incarnation = f"life {self.restarts}"

    async def live(self, at: Callable[[SequencerRun, dict[str, Any]], None]) -> bool:
        """One life of a controller; `at` is called after each event; returns whether it reached the end."""
        async with run_of(config(**self.changes), self.folder, self.services, self.broker) as it:
            self.services.restarted = lambda reason: self.restart_learner(it, reason)
            record_all, dead, life = it.journal.record_all, list[Any](), asyncio.current_task()
            assert life is not None

            def recording(events: Any) -> None:
                for event in list(events):
                    if dead:
                        raise Killed
                    record_all([event])
                    try:
                        at(it, dict(event))
                    except Killed:
                        dead.append(event)
                        if asyncio.current_task() is not life:
                            # The process ends, whichever of its tasks met its end.
                            life.cancel()
                        raise

            it.journal.record_all = recording  # type: ignore[method-assign]
            try:
                await it.enlist_all()
                await it.go(self.answer)
            except Killed:
                return False
            except asyncio.CancelledError:
                if not dead:
                    raise
                life.uncancel()
                return False
            finally:
                others = asyncio.all_tasks() - {asyncio.current_task()}
                for task in others:
                    task.cancel()
                with contextlib.suppress(Killed):
                    await asyncio.gather(*others, return_exceptions=True)
        return True


def nothing(it: SequencerRun, event: dict[str, Any]) -> None:
    """Disturbs nothing."""
