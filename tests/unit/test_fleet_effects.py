"""Settings of the fleet that must take effect: silence, heartbeats, terms, checkpoints, keep-alive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.controller.events import EventHub
from paceline.controller.fleet.membership import START_PATIENCE, SWEEP_S, Fleet, Health
from paceline.controller.fleet.supervisor import Supervisor
from paceline.controller.journal import Journal
from paceline.controller.progress import Progress, Run
from paceline.controller.servicer import ControllerServicer
from paceline.core.members import LearnerState, MemberKind, MemberState, RewardState, RolloutState
from paceline.rpc.v1 import common_pb2
from paceline.rpc.v1 import controller_pb2 as pb
from paceline.service.grpc.connection import common_options
from paceline.service.identity.credentials import Credentials
from paceline.storage.folder import Folder
from support.clocks import ManualClock
from support.sequencer_run import config, turns_of


@pytest.mark.parametrize(("suspect_after_s", "dead_after_s"), [(3.0, 7.0), (5.0, 30.0)])
def test_silence_makes_a_member_suspect_and_dead_when_the_settings_say_so(
    suspect_after_s: float, dead_after_s: float
) -> None:
    seen = silence(RolloutState.SERVING, suspect_after_s=suspect_after_s, dead_after_s=dead_after_s)
    assert seen[Health.SUSPECT] == pytest.approx(suspect_after_s, abs=2 * SWEEP_S)
    assert seen[Health.DEAD] == pytest.approx(dead_after_s, abs=2 * SWEEP_S)


@pytest.mark.parametrize(
    "state", [None, RolloutState.JOINING, LearnerState.LOADING, RewardState.STARTING], ids=str
)
def test_a_member_that_starts_may_be_silent_for_longer(state: MemberState | None) -> None:
    """Imports of large libraries from a cold disk kept heartbeats back for more than five seconds."""
    seen = silence(state, suspect_after_s=5.0, dead_after_s=12.0)
    assert seen[Health.SUSPECT] == pytest.approx(5.0 * START_PATIENCE, abs=2 * SWEEP_S)
    assert seen[Health.DEAD] == pytest.approx(12.0 * START_PATIENCE, abs=2 * SWEEP_S)


def silence(state: MemberState | None, *, suspect_after_s: float, dead_after_s: float) -> dict[Health, float]:
    """When a member that says nothing more comes into each health."""
    clock = ManualClock()
    fleet = Fleet(clock, suspect_after_s=suspect_after_s, dead_after_s=dead_after_s)
    fleet.register(kind=MemberKind.ROLLOUT, member_id="r", incarnation="a", address="h:1", num_ranks=1)
    (member,) = fleet.members()
    member.state = state
    seen: dict[Health, float] = {}
    while clock.now < START_PATIENCE * dead_after_s + 2:
        fleet.sweep()
        seen.setdefault(member.health, clock.now)
        clock.advance(SWEEP_S)
    return seen


def test_a_controller_that_was_paused_takes_nobody_for_dead() -> None:
    """It heard nothing because it did not listen."""
    clock = ManualClock()
    fleet = Fleet(clock, suspect_after_s=5.0, dead_after_s=12.0)
    fleet.register(kind=MemberKind.ROLLOUT, member_id="r", incarnation="a", address="h:1", num_ranks=1)
    fleet.sweep()
    clock.advance(13.0)
    assert fleet.sweep() == []
    assert fleet.members()[0].health is Health.ALIVE


async def test_a_member_learns_the_term_the_heartbeat_and_the_checkpoints_newest_first(
    tmp_path: Path,
) -> None:
    clock, events = ManualClock(), EventHub()
    journal = Journal(tmp_path / "events.jsonl", clock)
    journal.term = 7
    supervisor = Supervisor(Fleet(clock, suspect_after_s=5, dead_after_s=12), journal, events, clock)
    run = Run(
        config=config(service__heartbeat_s=0.25), id="run-1", dir=tmp_path, journal=journal, events=events
    )
    folders = [tmp_path / "checkpoints" / f"step_{step:06d}" for step in (9, 6, 3)]
    servicer = ControllerServicer(
        run,
        Progress(run),
        supervisor,
        turns=turns_of(run, supervisor),
        broker_url="redis://127.0.0.1:1/0",
        credentials=Credentials(),
        checkpoints=lambda: [Folder.at(folder) for folder in folders],
        checkpoint_marker="m",
        stop=lambda _: None,
    )
    context: Any = None
    request = pb.RegisterRequest(
        kind=common_pb2.MEMBER_KIND_LEARNER, member_id="learner", incarnation="a", address="h:1"
    )
    answer = await servicer.Register(request, context)
    assert (answer.term, answer.heartbeat_s) == (7, 0.25)
    assert list(answer.checkpoints) == [str(folder) for folder in folders]
    journal.close()


def test_a_connection_to_a_frozen_peer_ends_within_fifteen_seconds() -> None:
    """Without calls too: a follower's stream and an idle connection must end as well."""
    options = dict(common_options(1 << 20))
    silence_ms = int(options["grpc.keepalive_time_ms"]) + int(options["grpc.keepalive_timeout_ms"])
    assert silence_ms <= 15_000
    assert options["grpc.keepalive_permit_without_calls"] == 1
