"""Phases and membership: the moves that exist, and the ones that must not."""

from __future__ import annotations

import pytest

from paceline.controller.fleet.membership import SWEEP_S, Fleet, FleetChange, Health
from paceline.controller.fleet.membership import move as move_member
from paceline.controller.phases import Phase, move
from paceline.core.errors import IllegalTransitionError
from paceline.core.members import MemberKind, RolloutState
from paceline.core.policy import PolicyTag
from support.clocks import ManualClock


def test_a_step_goes_round() -> None:
    phase = Phase.STARTING
    walked = []
    for to in (
        Phase.FORMING,
        Phase.PUBLISH,
        Phase.COMMIT,
        Phase.DISPATCH,
        Phase.COLLECT,
        Phase.LEARN,
        Phase.PUBLISH,
        Phase.COMMIT,
        Phase.ENDED,
    ):
        phase = move(phase, to)
        walked.append(phase)
    assert walked[-1] is Phase.ENDED


@pytest.mark.parametrize(
    ("current", "to"),
    [
        (Phase.DISPATCH, Phase.PUBLISH),
        (Phase.DISPATCH, Phase.LEARN),
        (Phase.LEARN, Phase.COMMIT),
        (Phase.FORMING, Phase.COLLECT),
        (Phase.PUBLISH, Phase.DISPATCH),
        (Phase.ENDED, Phase.FAILED),
        (Phase.FAILED, Phase.FORMING),
    ],
)
def test_illegal_moves_name_both_phases(current: Phase, to: Phase) -> None:
    with pytest.raises(IllegalTransitionError, match=f"{current.name} to {to.name}"):
        move(current, to)


def test_the_dead_do_not_come_back() -> None:
    for gone in (Health.DEAD, Health.LEFT):
        with pytest.raises(IllegalTransitionError, match="register again"):
            move_member(gone, Health.ALIVE)


def fleet() -> tuple[Fleet, ManualClock]:
    clock = ManualClock()
    return Fleet(clock, suspect_after_s=5, dead_after_s=12), clock


def register(fleet: Fleet, incarnation: str = "a") -> list[str]:
    changes = fleet.register(
        kind=MemberKind.ROLLOUT, member_id="rollout-0", incarnation=incarnation, address="h:1", num_ranks=1
    )
    return [c.what for c in changes]


def beat(fleet: Fleet, incarnation: str = "a", failure: str = "") -> tuple[bool, list[str]]:
    known, changes = fleet.heartbeat(
        "rollout-0",
        incarnation,
        state=RolloutState.SERVING,
        policy=PolicyTag(version=1, digest="d" * 16),
        in_flight=3,
        failure=failure,
    )
    return known, [c.what for c in changes]


def listen(fleet: Fleet, clock: ManualClock, seconds: float) -> list[FleetChange]:
    """Time in which the controller judges silence all along; returns what changed."""
    changes = fleet.sweep()
    for _ in range(round(seconds / SWEEP_S)):
        clock.advance(SWEEP_S)
        changes += fleet.sweep()
    return changes


def test_nobody_is_dead_for_a_pause_of_the_controller() -> None:
    """The process was stopped, or the machine suspended: that nobody was heard says nothing."""
    members, clock = fleet()
    register(members)
    beat(members)
    assert listen(members, clock, 3) == []
    clock.advance(60)
    assert members.sweep() == []
    assert members.members()[0].health is Health.ALIVE
    # Silence before the pause and after it counts.
    assert [c.what for c in listen(members, clock, 2.5)] == ["suspect"]
    clock.advance(60)
    assert [(c.what, c.reason) for c in listen(members, clock, 7)] == [("dead", "silent for 12.5 s")]


def test_a_member_that_was_heard_in_a_pause_is_not_heard_in_the_future() -> None:
    members, clock = fleet()
    register(members)
    listen(members, clock, 1)
    clock.advance(30)
    beat(members)
    members.sweep()
    assert members.members()[0].last_heard == clock.now


def test_silence_makes_suspect_then_dead_and_death_is_final() -> None:
    members, clock = fleet()
    assert register(members) == ["registered"]
    assert beat(members) == (True, ["state:serving"])
    assert [c.what for c in listen(members, clock, 5.5)] == ["suspect"]
    assert beat(members) == (True, ["alive"])
    assert [c.what for c in listen(members, clock, 5.5)] == ["suspect"]
    assert [(c.what, c.reason) for c in listen(members, clock, 7)] == [("dead", "silent for 12.5 s")]
    assert members.sweep() == []
    assert beat(members) == (False, [])
    assert members.usable(MemberKind.ROLLOUT) == []


def test_a_restart_is_a_new_incarnation_and_ends_the_old_one() -> None:
    members, _ = fleet()
    register(members)
    assert register(members) == []
    assert register(members, "b") == ["dead", "registered"]
    assert beat(members, "a") == (False, [])
    assert beat(members, "b") == (True, ["state:serving"])
    assert [m.incarnation for m in members.usable(MemberKind.ROLLOUT)] == ["b"]


def test_a_reported_failure_is_death_with_its_reason() -> None:
    members, _ = fleet()
    register(members)
    beat(members)
    assert beat(members, failure="the engine died") == (True, ["dead"])
    assert members.members()[0].failure == "the engine died"


def test_leaving_is_not_dying() -> None:
    members, _ = fleet()
    register(members)
    assert [c.what for c in members.leave("rollout-0", "a", "drained")] == ["left"]
    assert members.members()[0].health is Health.LEFT
    assert members.leave("rollout-0", "a", "again") == []
