"""Domain types through protobuf and back, and what is refused on the way in."""

from __future__ import annotations

import dataclasses
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import InvalidMessageError
from paceline.core.policy import PolicyTag
from paceline.core.run_record.run_events import (
    EndEvent,
    NoticeEvent,
    PhaseEvent,
    RunEvent,
    StepEvent,
    ValidationEvent,
)
from paceline.core.scoring import MAX_ITEMS_PER_CALL, ScoreItem, ScoreResult
from paceline.rpc.v1 import common_pb2, controller_pb2, reward_pb2
from paceline.wire.calls import protobuf
from paceline.wire.calls.run_events import run_event_from_proto, run_event_to_proto
from paceline.wire.fields import LIMITS
from paceline.wire.json_object import MAX_JSON_BYTES
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
    st.builds(ValidationEvent, step=counts, metrics=st.dictionaries(domain.names, domain.finite)),
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
        ("[" * 8, "not_json"),
        ("[" * 100_000, "too_large"),
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


MOST_VALUES = LIMITS.max_values


def with_extra(extra_json: str) -> reward_pb2.ScoreItem:
    return reward_pb2.ScoreItem(trajectory_id="t", extra_json=extra_json)


def sized(num_bytes: int, text: str = "x") -> str:
    """An object of one text, in `num_bytes` of JSON."""
    left, size = num_bytes - len('{"a": ""}'), len(text.encode())
    return '{"a": "' + text * (left // size) + "x" * (left % size) + '"}'


def valued(num_values: int) -> str:
    """An object with a list: both, and what is in them."""
    return '{"a": [' + "0," * (num_values - 2) + "0]}"


@pytest.mark.parametrize(
    ("most", "over", "limit"),
    [
        (sized(MAX_JSON_BYTES), sized(MAX_JSON_BYTES + 1), f"at most {MAX_JSON_BYTES} are accepted"),
        (
            sized(MAX_JSON_BYTES, "é"),
            sized(MAX_JSON_BYTES + 1, "é"),
            f"at most {MAX_JSON_BYTES} are accepted",
        ),
        (valued(MOST_VALUES), valued(MOST_VALUES + 1), f"at most {MOST_VALUES} are accepted"),
        ('{"a":' * 8 + "1" + "}" * 8, '{"a":' * 9 + "1" + "}" * 9, "at most 8 levels are accepted"),
    ],
    ids=["bytes", "bytes of other letters", "values", "depth"],
)
def test_the_limits_of_extra_columns(
    most: str, over: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert protobuf.score_item_from_proto(with_extra(most)).extra
    # One more is refused, unparsed.
    monkeypatch.setattr("json.loads", lambda text: pytest.fail("it was parsed"))
    with pytest.raises(InvalidMessageError, match=limit) as caught:
        protobuf.score_item_from_proto(with_extra(over))
    assert caught.value.reason == "too_large"
    assert "ScoreItem: t: extra_json" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["," * (MOST_VALUES + 1), "[{" * 9, '\\"' + "[" * 9, "\n" + "[" * 9, "\\" + "[" * 9],
    ids=["commas", "brackets", "after a quotation mark", "after a line's end", "after a backslash"],
)
def test_commas_and_brackets_within_texts_are_no_values(text: str) -> None:
    extra = {"a": text[-40:], "b": text, "c": [text[:40], {"d": 1}]}
    item = ScoreItem(trajectory_id="t", prompt="", response="", ground_truth="", extra=extra)
    assert protobuf.score_item_from_proto(protobuf.score_item_to_proto(item)) == item


def test_what_would_be_refused_is_not_sent() -> None:
    wide: dict[str, object] = {"a": [0] * MOST_VALUES}
    long: dict[str, object] = {"a": "x" * MAX_JSON_BYTES}
    for extra in (wide, long):
        item = ScoreItem(trajectory_id="t", prompt="", response="", ground_truth="", extra=extra)
        with pytest.raises(InvalidMessageError, match=r"ScoreItem: t: extra: .* are accepted"):
            protobuf.score_item_to_proto(item)


def test_the_extra_columns_of_a_call_have_a_limit_together() -> None:
    parts = [with_extra(valued(MOST_VALUES // 4)) for _ in range(4)]
    assert len(protobuf.score_items_from_proto(parts)) == 4
    with pytest.raises(InvalidMessageError, match=f"over {MOST_VALUES} values .* send fewer items"):
        protobuf.score_items_from_proto([*parts, with_extra("[]")])


def test_a_call_has_a_most_number_of_items() -> None:
    """It is looked at before any item is read."""
    items = [reward_pb2.ScoreItem(trajectory_id="t")] * MAX_ITEMS_PER_CALL
    assert len(protobuf.score_items_from_proto(items)) == MAX_ITEMS_PER_CALL
    with pytest.raises(InvalidMessageError, match="65537 items, at most 65536: send fewer items") as caught:
        protobuf.score_items_from_proto([reward_pb2.ScoreItem(), *items])
    assert caught.value.reason == "too_large"


@pytest.mark.parametrize("value", ["{}", "[]", '""', "0", '{"":[]}'])
def test_extra_columns_do_not_take_much_memory(value: str) -> None:
    """As many as fit of the smallest values. An item's empty mappings alone took 400 MiB."""
    text = '{"a": [' + ",".join([value] * (MAX_JSON_BYTES // (len(value) + 1) - 9)) + "]}"
    messages = [with_extra(text)] * 4
    tracemalloc.start()
    try:
        with pytest.raises(InvalidMessageError, match="are accepted"):
            protobuf.score_items_from_proto(messages)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 128 * 2**20


@pytest.mark.parametrize(
    "text",
    ['"' * 2**20, '\\"' * 2**19, '"' + "\\" * 2**20, '"' + '\\"' * 2**19, "]" * 2**20],
    ids=["texts", "escaped", "backslashes", "an endless text", "ends"],
)
def test_texts_that_never_end_are_read_once(text: str) -> None:
    """A search that begins anew at each quotation mark takes hours for this."""
    with pytest.raises(InvalidMessageError):
        protobuf.score_item_from_proto(with_extra("," * (MOST_VALUES + 1) + text))
    with pytest.raises(InvalidMessageError):
        protobuf.score_item_from_proto(with_extra("[" * 9 + text))


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
