"""A run that loses members tries again for a time, not a number of times."""

from __future__ import annotations

from paceline.controller.run.backoff import MemberLossBackoff


def test_pauses_double_and_patience_ends() -> None:
    backoff = MemberLossBackoff(patience_s=60)
    assert [backoff.next_pause(4, now) for now in (100, 101, 102, 103, 104, 105, 106)] == [
        0.25, 0.5, 1, 2, 4, 5, 5,
    ]  # fmt: skip
    assert backoff.next_pause(4, 160) == 5
    assert backoff.next_pause(4, 161) is None


def test_a_finished_step_renews_the_patience() -> None:
    backoff = MemberLossBackoff(patience_s=60)
    assert backoff.next_pause(-1, 0) == 0.25
    assert backoff.next_pause(-1, 50) == 0.5
    assert backoff.next_pause(0, 70) == 0.25
    assert backoff.next_pause(0, 129) == 0.5
    assert backoff.next_pause(0, 131) is None
