"""The states of an episode: which events each takes, and which limit ends it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from paceline.core.errors import ProtocolError
from paceline.rollout.episodes.states import (
    Closed,
    EpisodePhase,
    EpisodeProgress,
    Event,
    Observed,
    Opened,
    TurnSampled,
    advance,
)
from support.episodes import limits

TURN = TurnSampled(num_tokens=10, num_tool_calls=1, is_cut=False)
ANSWER = Observed(seconds=1.0, num_tokens=5)
ALLOWED = {
    (EpisodePhase.OPENING, Opened): EpisodePhase.DECODING,
    (EpisodePhase.DECODING, TurnSampled): EpisodePhase.ACTING,
    (EpisodePhase.ACTING, Observed): EpisodePhase.DECODING,
    (EpisodePhase.CLOSING, Closed): EpisodePhase.ENDED,
}


@pytest.mark.parametrize(
    ("phase", "event"), list(itertools.product(EpisodePhase, [Opened(), TURN, ANSWER, Closed()]))
)
def test_every_phase_takes_one_kind_of_event(phase: EpisodePhase, event: Event) -> None:
    wanted = ALLOWED.get((phase, type(event)))
    if wanted is None:
        with pytest.raises(ProtocolError, match=phase.value):
            advance(EpisodeProgress(phase=phase), event, limits())
    else:
        assert advance(EpisodeProgress(phase=phase), event, limits()).phase is wanted


def test_what_was_used_is_counted() -> None:
    standing = EpisodeProgress()
    for event in (Opened(), TURN, ANSWER, TURN):
        standing = advance(standing, event, limits())
    assert standing == EpisodeProgress(
        phase=EpisodePhase.ACTING, num_turns=2, num_tool_calls=2, num_sampled=20, num_response=25, tool_s=1.0
    )


@pytest.mark.parametrize(
    ("event", "changes", "reason"),
    [
        (replace(TURN, is_cut=True), {}, "max_turn_tokens"),
        (replace(TURN, is_cut=True), {"max_sampled_tokens": 30}, "max_sampled_tokens"),
        (replace(TURN, is_cut=True), {"max_response_tokens": 35}, "max_response_tokens"),
        (replace(TURN, num_tool_calls=9), {"max_tool_calls": 10}, "max_tool_calls"),
    ],
)
def test_what_ends_an_episode_after_a_turn(event: TurnSampled, changes: dict[str, int], reason: str) -> None:
    before = EpisodeProgress(
        phase=EpisodePhase.DECODING, num_turns=2, num_tool_calls=2, num_sampled=20, num_response=25
    )
    after = advance(before, event, limits(**changes))
    assert (after.phase, after.stop_reason) == (EpisodePhase.CLOSING, reason)


@pytest.mark.parametrize(
    ("event", "changes", "reason"),
    [
        (replace(ANSWER, stop_reason="won"), {"max_turns": 2}, "won"),
        (ANSWER, {"max_turns": 2}, "max_turns"),
        (ANSWER, {"tool_s": 2.0}, "tool_time"),
        (ANSWER, {"max_response_tokens": 30}, "max_response_tokens"),
        (ANSWER, {"max_sampled_tokens": 20}, "max_sampled_tokens"),
    ],
)
def test_what_ends_an_episode_after_an_answer(
    event: Observed, changes: dict[str, float], reason: str
) -> None:
    before = EpisodeProgress(
        phase=EpisodePhase.ACTING, num_turns=2, num_sampled=20, num_response=25, tool_s=1.0
    )
    after = advance(before, event, limits(**changes))
    assert (after.phase, after.stop_reason, after.num_response) == (EpisodePhase.CLOSING, reason, 25)


def test_a_turn_gets_what_is_left() -> None:
    standing = EpisodeProgress(phase=EpisodePhase.DECODING, num_sampled=20, num_response=25)
    assert standing.turn_tokens(limits(max_turn_tokens=8)) == 8
    assert standing.turn_tokens(limits(max_sampled_tokens=27)) == 7
    assert standing.turn_tokens(limits(max_response_tokens=31)) == 6
