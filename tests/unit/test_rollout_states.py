from __future__ import annotations

import itertools

import pytest

from paceline.core.errors import IllegalTransitionError, VersionMismatchError
from paceline.core.members import RolloutState
from paceline.core.policy import PolicyTag
from paceline.rollout import states
from paceline.rollout.states import Standing, advance

V3 = PolicyTag(version=3, digest="0" * 16)
V4 = PolicyTag(version=4, digest="1" * 16)
EVENTS: list[states.Event] = [
    states.EngineReady(),
    states.ReceiveBegan(),
    states.ReceiveEnded(3),
    states.ReceiveFailed(),
    states.Committed(V3),
    states.Forgotten(),
    states.Drained(),
]


def run(*events: states.Event) -> Standing:
    standing = Standing()
    for event in events:
        standing = advance(standing, event)
    return standing


SERVING_V3 = (states.EngineReady(), states.ReceiveBegan(), states.ReceiveEnded(3), states.Committed(V3))


def test_a_push_leads_from_joining_to_serving() -> None:
    seen = [run(*SERVING_V3[:n]) for n in range(5)]
    assert [s.state.value for s in seen] == ["joining", "stale", "syncing", "syncing", "serving"]
    assert [s.received for s in seen] == [None, None, None, 3, None]
    assert [s.policy for s in seen] == [None, None, None, None, V3]


def test_the_next_push_takes_the_policy_away_until_its_commit() -> None:
    assert run(*SERVING_V3, states.ReceiveBegan()) == Standing(state=RolloutState.SYNCING)
    again = run(*SERVING_V3, states.ReceiveBegan(), states.ReceiveEnded(4), states.Committed(V4))
    assert again == Standing(state=RolloutState.SERVING, policy=V4)


@pytest.mark.parametrize("received", [None, 2, 4])
def test_a_version_that_was_not_received_cannot_be_committed(received: int | None) -> None:
    events: list[states.Event] = [states.EngineReady(), states.ReceiveBegan()]
    if received is not None:
        events.append(states.ReceiveEnded(received))
    with pytest.raises(VersionMismatchError, match=r"v3@0{16}.*push version 3 first"):
        run(*events, states.Committed(V3))


def test_a_repeated_commit_changes_nothing_and_another_is_illegal() -> None:
    serving = run(*SERVING_V3)
    assert advance(serving, states.Committed(V3)) is serving
    with pytest.raises(IllegalTransitionError, match=r"serving has no move for Committed"):
        advance(serving, states.Committed(V4))


def test_a_broken_push_leaves_no_way_to_serving_but_another_push() -> None:
    stale = run(*SERVING_V3, states.ReceiveBegan(), states.ReceiveFailed())
    assert stale == Standing(state=RolloutState.STALE)
    with pytest.raises(IllegalTransitionError):
        advance(stale, states.Committed(V3))


def test_serving_is_reached_through_a_complete_push_alone() -> None:
    """All sequences of up to five events: SERVING takes a ReceiveEnded(3) after the last ReceiveBegan."""
    reached = 0
    for length in range(1, 6):
        for sequence in itertools.product(EVENTS, repeat=length):
            try:
                standing = run(*sequence)
            except (IllegalTransitionError, VersionMismatchError):
                continue
            if standing.state is RolloutState.SERVING:
                reached += 1
                begun = max(i for i, event in enumerate(sequence) if event == states.ReceiveBegan())
                assert states.ReceiveEnded(3) in sequence[begun:]
                assert standing.policy == V3
    # The shortest way, and with one more event: either push event twice, or a repeated commit.
    assert reached == 4
