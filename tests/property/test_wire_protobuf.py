"""Domain types through protobuf and back, and what is refused on the way in."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import InvalidMessageError
from paceline.core.policy import PolicyTag
from paceline.core.run_events import EndEvent, NoticeEvent, PhaseEvent, RunEvent, StepEvent
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.rpc.v1 import common_pb2, controller_pb2, reward_pb2
from paceline.wire import protobuf
from paceline.wire.run_events import run_event_from_proto, run_event_to_proto
from support import domain

items = st.builds(
    ScoreItem,
    trajectory_id=domain.names,
    prompt=domain.texts,
    response=domain.texts,
    ground_truth=domain.texts,
    data_source=domain.texts,
    extra=st.dictionaries(domain.texts, domain.plain, max_size=3),
)
scores = st.builds(
    ScoreResult,
    trajectory_id=domain.names,
    reward=domain.finite,
    components=st.dictionaries(domain.names, domain.finite, max_size=3),
)
counts = st.integers(0, 2**63 - 1)
run_events = st.one_of(
    st.builds(PhaseEvent, step=counts, phase=domain.names, admitted=counts, wanted=counts),
    st.builds(StepEvent, step=counts, metrics=st.dictionaries(domain.names, domain.finite)),
    st.builds(NoticeEvent, message=domain.texts),
    st.builds(EndEvent, ok=st.booleans(), message=domain.texts),
)
failures = st.builds(ScoreResult, trajectory_id=domain.names, reward=st.none(), error=domain.names)


@given(domain.policies, items, scores | failures)
@settings(max_examples=60)
def test_what_goes_comes_back(tag: PolicyTag, item: ScoreItem, result: ScoreResult) -> None:
    sent = protobuf.policy_tag_to_proto(tag).SerializeToString()
    assert protobuf.policy_tag_from_proto(common_pb2.PolicyTag.FromString(sent)) == tag
    sent = protobuf.score_item_to_proto(item).SerializeToString()
    assert protobuf.score_item_from_proto(reward_pb2.ScoreItem.FromString(sent)) == item
    sent = protobuf.score_result_to_proto(result).SerializeToString()
    assert protobuf.score_result_from_proto(reward_pb2.ScoreResult.FromString(sent)) == result


@pytest.mark.parametrize(("version", "digest"), [(-1, ""), (1, "0" * 15), (1, "0" * 17), (1, "G" * 16)])
def test_rejected_policy_tags(version: int, digest: str) -> None:
    with pytest.raises(InvalidMessageError):
        protobuf.policy_tag_from_proto(common_pb2.PolicyTag(version=version, digest=digest))


def test_a_policy_tag_may_have_no_digest_yet() -> None:
    assert protobuf.policy_tag_from_proto(common_pb2.PolicyTag(version=4)) == PolicyTag(version=4, digest="")


@pytest.mark.parametrize(
    ("extra_json", "reason"),
    [
        ("{", "not_json"),
        ("[" * 100_000, "not_json"),
        ("[1]", "wrong_type"),
        ('{"a": NaN}', "not_finite"),
        ('{"a": 1e999}', "not_finite"),
        ('{"a": [[[[[[[[[1]]]]]]]]]}', "too_large"),
    ],
)
def test_rejected_extra_columns(extra_json: str, reason: str) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        protobuf.score_item_from_proto(reward_pb2.ScoreItem(trajectory_id="t", extra_json=extra_json))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (reward_pb2.ScoreResult(reward=1.0), "missing_field"),
        (reward_pb2.ScoreResult(trajectory_id="t", reward=float("nan")), "not_finite"),
        (reward_pb2.ScoreResult(trajectory_id="t", components={"a": float("-inf")}), "not_finite"),
    ],
)
def test_rejected_results(message: reward_pb2.ScoreResult, reason: str) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        protobuf.score_result_from_proto(message)
    assert caught.value.reason == reason


def test_an_error_without_words_is_still_an_error_and_never_a_reward_of_zero() -> None:
    wordless = ScoreResult(trajectory_id="t", reward=None)
    for result in (wordless, dataclasses.replace(wordless, error="")):
        back = protobuf.score_result_from_proto(protobuf.score_result_to_proto(result))
        assert (back.reward, back.error) == (None, "unknown error")


def test_extra_that_json_cannot_say_is_refused_before_it_is_sent() -> None:
    item = ScoreItem(trajectory_id="t", prompt="", response="", ground_truth="", extra={"a": b"bytes"})
    with pytest.raises(InvalidMessageError, match="bytes where JSON has no such thing"):
        protobuf.score_item_to_proto(item)


@given(run_events)
@settings(max_examples=60)
def test_run_events_round_trip(event: RunEvent) -> None:
    sent = run_event_to_proto(event).SerializeToString()
    assert run_event_from_proto(controller_pb2.WatchEvent.FromString(sent)) == event


def test_an_event_of_a_newer_controller_is_no_event() -> None:
    assert run_event_from_proto(controller_pb2.WatchEvent()) is None
