"""Which rank is silent, turn by turn."""

from __future__ import annotations

import pytest

from paceline.learner.distributed.heartbeats import Silence

pytestmark = pytest.mark.torch


def test_a_rank_is_lost_after_so_many_turns_without_a_new_count() -> None:
    silence = Silence([0, 2], limit=3)
    silence.heard({0: 5, 2: 5})
    assert [silence.turn(), silence.turn()] == [None, None]
    silence.heard({0: 6, 2: 5})  # the old count is no sign of life
    assert silence.silent_for(2) == 2
    assert silence.turn() == 2


def test_the_store_itself_is_silent_when_rank_0_is_frozen() -> None:
    silence = Silence([0, 2], limit=3)
    silence.heard({0: 1, 2: 1})
    assert [silence.turn(), silence.turn(), silence.turn()] == [None, None, 0]


def test_a_rank_that_was_paused_itself_takes_nobody_for_dead() -> None:
    silence = Silence([1], limit=3)
    for count in range(20):
        # One turn, however long it took; the others beat meanwhile.
        assert silence.turn() is None
        silence.heard({1: count})
