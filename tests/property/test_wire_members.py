"""Kinds and states of members survive the wire; words that are none are rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InvalidMessageError
from paceline.core.members import LearnerState, MemberKind, MemberState, RewardState, RolloutState
from paceline.rpc.v1 import common_pb2
from paceline.wire.calls.members import member_kind_from_proto, member_kind_to_proto, member_state_from_word

STATES = [
    *((MemberKind.ROLLOUT, state) for state in RolloutState),
    *((MemberKind.LEARNER, state) for state in LearnerState),
    *((MemberKind.REWARD, state) for state in RewardState),
]


@pytest.mark.parametrize("kind", MemberKind)
def test_a_kind_survives(kind: MemberKind) -> None:
    assert member_kind_from_proto(member_kind_to_proto(kind)) is kind


def test_an_unspecified_kind_is_rejected() -> None:
    with pytest.raises(InvalidMessageError, match="kind 0 is none of learner, reward, rollout") as caught:
        member_kind_from_proto(common_pb2.MEMBER_KIND_UNSPECIFIED)
    assert caught.value.reason == "incomplete_registration"


@pytest.mark.parametrize(("kind", "state"), STATES)
def test_a_state_survives_as_its_word(kind: MemberKind, state: MemberState) -> None:
    assert member_state_from_word(kind, state.value) is state


@given(kind=st.sampled_from(MemberKind), word=st.text())
def test_a_word_is_a_state_of_its_kind_or_rejected(kind: MemberKind, word: str) -> None:
    known = {state.value: state for its_kind, state in STATES if its_kind is kind}
    if word in known:
        assert member_state_from_word(kind, word) is known[word]
        return
    with pytest.raises(InvalidMessageError, match=f"a {kind.value} member has no state") as caught:
        member_state_from_word(kind, word)
    assert caught.value.reason == "unknown_state"


def test_a_word_of_another_kind_is_rejected() -> None:
    with pytest.raises(InvalidMessageError, match="has no state 'ready', only starting, serving"):
        member_state_from_word(MemberKind.REWARD, LearnerState.READY.value)
