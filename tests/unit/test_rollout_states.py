from __future__ import annotations

import itertools

import pytest

from paceline.core.errors import IllegalTransitionError, VersionMismatchError
from paceline.core.members import EnginePart, RolloutState
from paceline.core.policy import PolicyTag
from paceline.rollout import states
from paceline.rollout.states import RolloutStatus, advance

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
    states.Slept(),
    states.Woken(EnginePart.WEIGHTS),
    states.Woken(EnginePart.KV_CACHE),
]


def run(*events: states.Event) -> RolloutStatus:
    standing = RolloutStatus()
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
    assert run(*SERVING_V3, states.ReceiveBegan()) == RolloutStatus(state=RolloutState.SYNCING)
    again = run(*SERVING_V3, states.ReceiveBegan(), states.ReceiveEnded(4), states.Committed(V4))
    assert again == RolloutStatus(state=RolloutState.SERVING, policy=V4)


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
    assert stale == RolloutStatus(state=RolloutState.STALE)
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
    # The shortest way, and with one more event: either push event twice, a repeated commit, or a part that is
    # awake woken after any of the four.
    assert reached == 4 + 4 * 2


WEIGHTS, KV_CACHE = states.Woken(EnginePart.WEIGHTS), states.Woken(EnginePart.KV_CACHE)
V4_RECEIVED = (states.ReceiveBegan(), states.ReceiveEnded(4))


def test_a_server_that_slept_serves_after_weights_a_push_and_the_kv_cache_alone() -> None:
    asleep = run(*SERVING_V3, states.Slept())
    assert (asleep.state, asleep.policy, asleep.asleep) == (RolloutState.ASLEEP, None, frozenset(EnginePart))
    assert run(*SERVING_V3, states.Slept(), WEIGHTS).state is RolloutState.STALE
    serving = run(*SERVING_V3, states.Slept(), WEIGHTS, *V4_RECEIVED, KV_CACHE, states.Committed(V4))
    assert serving == RolloutStatus(state=RolloutState.SERVING, policy=V4)
    early = run(*SERVING_V3, states.Slept(), WEIGHTS, KV_CACHE, *V4_RECEIVED, states.Committed(V4))
    assert early == serving


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        (V4_RECEIVED, "asleep has no move for ReceiveBegan"),
        ([KV_CACHE], "wakes its weights first"),
        ([states.Committed(V3)], "asleep has no move for Committed"),
        ([WEIGHTS, *V4_RECEIVED, states.Committed(V4)], "while kv_cache of the engine is asleep"),
    ],
)
def test_a_sleeping_engine_neither_receives_nor_serves(events: list[states.Event], reason: str) -> None:
    with pytest.raises(IllegalTransitionError, match=reason):
        run(*SERVING_V3, states.Slept(), *events)


def test_to_sleep_and_to_wake_may_be_repeated_and_a_broken_push_keeps_what_is_asleep() -> None:
    asleep = run(*SERVING_V3, states.Slept())
    assert advance(asleep, states.Slept()) is asleep
    awake = run(*SERVING_V3)
    assert advance(awake, KV_CACHE) is awake
    broken = run(*SERVING_V3, states.Slept(), WEIGHTS, states.ReceiveBegan(), states.ReceiveFailed())
    assert (broken.state, broken.asleep) == (RolloutState.STALE, {EnginePart.KV_CACHE})
