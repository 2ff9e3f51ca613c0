"""Which ends are restarted and how often, and when a process that runs counts as hung."""

from __future__ import annotations

import math

import pytest

from paceline.core.errors import (
    BrokerError,
    CheckpointError,
    ConfigError,
    DataError,
    DeadlineError,
    EnvironmentLackError,
    GuardError,
    ModelError,
    NumericsError,
    PeerLostError,
    exit_code,
)
from paceline.launch.presence import Presence, Sighting
from paceline.launch.processes.restarts import End, RestartHistory, RestartRule, judge


@pytest.mark.parametrize(
    ("codes", "end"),
    [
        ([0], End.LEFT),
        ([1], End.FAILED),
        ([2], End.FINAL),
        ([3], End.FINAL),
        ([-9], End.KILLED),
        ([1, 0], End.FAILED),
        ([1, 2], End.FINAL),
        ([1, 2, -9], End.KILLED),
        ([4], End.AGAIN),
        ([1, 4, 0], End.AGAIN),
        ([4, 2], End.FINAL),
    ],
)
def test_what_an_end_means(codes: list[int], end: End) -> None:
    assert judge(codes) is end


@pytest.mark.parametrize("kind", [ConfigError, DataError, ModelError, EnvironmentLackError])
def test_errors_in_what_was_given_are_final(kind: type[Exception]) -> None:
    assert judge([exit_code(kind("x"))]) is End.FINAL


@pytest.mark.parametrize("kind", [GuardError, NumericsError, CheckpointError])
def test_errors_of_the_run_itself_are_final(kind: type[Exception]) -> None:
    assert judge([exit_code(kind("x"))]) is End.FINAL


@pytest.mark.parametrize(
    "error",
    [
        PeerLostError("x", peer="redis"),
        BrokerError("x"),
        DeadlineError(phase="COLLECT", peer="rollout-0", seconds=3),
        ValueError("a bug"),
        ExceptionGroup("several", [GuardError("x"), BrokerError("y")]),
    ],
)
def test_losses_and_crashes_are_not_final(error: Exception) -> None:
    assert judge([exit_code(error)]) is End.FAILED


def test_pauses_double_up_to_a_limit_and_attempts_run_out() -> None:
    rule = RestartRule(max_restarts=5, window_s=300, first_pause_s=1, longest_pause_s=5)
    history = RestartHistory(rule)
    assert [history.next_pause(now) for now in (10, 20, 30, 40, 50)] == [1, 2, 4, 5, 5]
    assert history.next_pause(309) is None
    assert history.recent == 5


def test_attempts_are_forgotten_after_the_window() -> None:
    history = RestartHistory(RestartRule(max_restarts=2, window_s=100, first_pause_s=1))
    assert [history.next_pause(now) for now in (0, 50, 99)] == [1, 2, None]
    assert history.next_pause(100) == 2, "the first has left the window"
    assert history.next_pause(149) is None
    assert history.next_pause(1000) == 1


def test_no_restarts_at_all() -> None:
    assert RestartHistory(RestartRule(max_restarts=0, window_s=100)).next_pause(0) is None


def seen(heard_s_ago: float = 0.1, *, alive: bool = True, ready: bool = True) -> Sighting:
    return Sighting(heard_s_ago=heard_s_ago, alive=alive, ready=ready)


def looks_at_silence(seconds: float, first: float) -> list[str | None]:
    """What each look says of a member that is silent from 0 on for so long, declared dead after 12 s."""
    presence = Presence(startup_s=60, silence_s=12)
    presence.start(-100)
    assert presence.look(seen(), 0) is None
    times = [first + 2 * i for i in range(20)]
    return [presence.look(seen(now, alive=now < 12) if now < seconds else seen(), now) for now in times]


@pytest.mark.parametrize("first", [0.0, 0.3, 0.6, 1.9])
def test_a_member_that_was_cut_off_and_comes_back_in_time_is_not_hung(first: float) -> None:
    """19 s without a network, and the time that the connection takes to be there again."""
    assert looks_at_silence(19.0 + 4.0, first) == [None] * 20


@pytest.mark.parametrize("first", [0.0, 0.3, 0.6, 1.9])
def test_a_member_that_is_frozen_is_hung_after_a_grace(first: float) -> None:
    hung = [first + 2 * i for i, reason in enumerate(looks_at_silence(math.inf, first)) if reason is not None]
    assert 24 < hung[0] <= 26


def test_a_member_that_failed_a_push_is_not_hung_before_it_is_silent() -> None:
    presence = Presence(startup_s=60, silence_s=12)
    presence.start(100)
    assert presence.look(seen(), 102) is None
    dead = [presence.look(seen(alive=False, heard_s_ago=1.0), now) for now in range(104, 160, 2)]
    assert dead == [None] * len(dead)


def test_a_member_that_comes_back_is_not_hung() -> None:
    presence = Presence(startup_s=60, silence_s=12)
    presence.start(0)
    looks = [seen(), seen(2, alive=False), seen(4, alive=False), seen(), seen(2, alive=False), None]
    assert [presence.look(sighting, 2.0 * i + 5) for i, sighting in enumerate(looks)] == [None] * 6


def test_what_the_controller_says_of_an_earlier_process_does_not_count() -> None:
    presence = Presence(startup_s=60, silence_s=12)
    presence.start(100)
    # The earlier process was heard last at 95.
    for now in range(102, 162, 2):
        assert presence.look(seen(now - 95, alive=False), now) is None
    assert not presence.was_ready
    assert presence.look(seen(67, alive=False), 162) == "has not registered within 62 s of its start"


def test_an_absent_controller_makes_nobody_hung() -> None:
    presence = Presence(startup_s=60, silence_s=12)
    presence.start(0)
    presence.look(seen(), 2)
    for now in range(4, 200, 2):
        presence.skip(now)
    assert [presence.look(None, now) for now in range(200, 211, 2)] == [None] * 6
    assert presence.look(None, 212) == "runs, but has not been heard of for 14 s"
    assert presence.was_ready


def test_a_launcher_that_was_stopped_itself_kills_nobody() -> None:
    presence = Presence(startup_s=60, silence_s=12)
    presence.start(0)
    presence.look(seen(), 2)
    assert presence.look(None, 1000) is None
