"""Converts policy tags, items to score and their results to protobuf messages, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.core.attached_clients.attachment import MAX_DATA_SOURCES, MAX_NAME_CHARS
from paceline.core.policy import PolicyTag
from paceline.core.scoring import MAX_ITEMS_PER_CALL, RewardDescription, ScoreItem, ScoreResult
from paceline.core.text import one_line
from paceline.rpc.v1 import common_pb2, reward_pb2
from paceline.wire.fields import LIMITS, reject
from paceline.wire.json_object import check_json_text, read_json_object, write_json_object
from paceline.wire.records import from_proto, to_proto


def policy_tag_to_proto(tag: PolicyTag) -> common_pb2.PolicyTag:
    """Writes a policy tag as a message."""
    return to_proto(tag, common_pb2.PolicyTag)


def policy_tag_from_proto(message: common_pb2.PolicyTag) -> PolicyTag:
    """Reads a policy tag; the digest is empty while it is unknown.

    Raises:
        InvalidMessageError: a negative version, or a digest that is not 16 hexadecimal digits.
    """
    if message.version < 0:
        reject("PolicyTag", "out_of_range", f"version {message.version} is negative")
    digest = message.digest
    if digest and not (len(digest) == 16 and set(digest) <= set("0123456789abcdef")):
        reject(
            "PolicyTag", "out_of_range", f"digest {digest[:40]!r}, wanted 16 lower-case hexadecimal digits"
        )
    return from_proto(message, PolicyTag)


def score_item_to_proto(item: ScoreItem) -> reward_pb2.ScoreItem:
    """Writes an item to score as a message.

    Raises:
        InvalidMessageError: `extra` is too large, or holds a value that JSON cannot express.
    """
    extra = check_score_item(item)
    return to_proto(item, reward_pb2.ScoreItem, without=("extra", "episode"), extra_json=extra)


def check_score_item(item: ScoreItem) -> str:
    """Refuses an item that no message can hold; returns its `extra` as JSON text.

    Raises:
        InvalidMessageError: `extra` is too large or not JSON, or a text holds half a surrogate pair.
    """
    texts = (item.trajectory_id, item.prompt, item.response, item.ground_truth, item.data_source)
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:
        reject("ScoreItem", "not_unicode", f"a text holds half a surrogate pair ({error.reason})")
    return write_json_object(item.extra, f"ScoreItem: {item.trajectory_id[:80]}: extra") if item.extra else ""


def score_items_from_proto(messages: Sequence[reward_pb2.ScoreItem]) -> list[ScoreItem]:
    """Reads the items of a call.

    Raises:
        InvalidMessageError: there are too many items, an item is malformed, or all `extra_json` together
            hold too many values.
    """
    if len(messages) > MAX_ITEMS_PER_CALL:
        detail = f"{len(messages)} items, at most {MAX_ITEMS_PER_CALL}: send fewer items in a call"
        reject("ScoreRequest", "too_large", detail)
    items, left = [], LIMITS.max_values
    for message in messages:
        left -= check_json_text(message.extra_json, _extra_of(message))
        if left < 0:
            most = LIMITS.max_values
            detail = f"over {most} values in extra_json of all items: send fewer items in a call"
            reject("ScoreRequest", "too_large", detail)
        items.append(score_item_from_proto(message))
    return items


def score_item_from_proto(message: reward_pb2.ScoreItem) -> ScoreItem:
    """Reads an item to score.

    Raises:
        InvalidMessageError: there is no trajectory id, or `extra_json` is too large or not an object of
            finite values.
    """
    if not message.trajectory_id:
        reject("ScoreItem", "missing_field", "no trajectory_id")
    extra = read_json_object(message.extra_json, _extra_of(message))
    return from_proto(message, ScoreItem, extra=extra)


def _extra_of(message: reward_pb2.ScoreItem) -> str:
    return f"ScoreItem: {message.trajectory_id[:80]}: extra_json"


def score_result_to_proto(result: ScoreResult) -> reward_pb2.ScoreResult:
    """Writes a score as a message; an empty error becomes "unknown error"."""
    if result.error is not None or result.reward is None:
        return reward_pb2.ScoreResult(
            trajectory_id=result.trajectory_id, error=result.error or "unknown error"
        )
    placed = [reward_pb2.PlacedReward(end=end, reward=part) for end, part in result.placed]
    return to_proto(result, reward_pb2.ScoreResult, placed=placed)


def score_result_from_proto(message: reward_pb2.ScoreResult) -> ScoreResult:
    """Reads the score of one item.

    Raises:
        InvalidMessageError: there is no trajectory id, or a number is not finite.
    """
    if not message.trajectory_id:
        reject("ScoreResult", "missing_field", "no trajectory_id")
    if message.error:
        return ScoreResult(trajectory_id=message.trajectory_id, reward=None, error=message.error)
    components = dict(message.components)
    for name, value in {"reward": message.reward, **components}.items():
        if not math.isfinite(value):
            reject("ScoreResult", "not_finite", f"{message.trajectory_id[:80]}: {name} is {value}")
    placed = tuple((part.end, part.reward) for part in message.placed)
    for end, part in placed:
        if end < 1 or not math.isfinite(part):
            reject("ScoreResult", "out_of_range", f"{message.trajectory_id[:80]}: places {part} at {end}")
    return ScoreResult(
        trajectory_id=message.trajectory_id, reward=message.reward, components=components, placed=placed
    )


def description_to_proto(description: RewardDescription) -> reward_pb2.RewardDescription:
    """Encodes the description of a reward service."""
    sources = sorted(description.data_sources)
    return to_proto(description, reward_pb2.RewardDescription, data_sources=sources)


def description_from_proto(message: reward_pb2.RewardDescription) -> RewardDescription:
    """Decodes the description of a reward service.

    Raises:
        InvalidMessageError: the version is missing, or there are too many or too long data sources.
    """
    if not message.contract:
        reject("RewardDescription", "missing_field", "no contract: write the version that the service speaks")
    sources = message.data_sources
    texts = [message.version, *sources]
    if len(sources) > MAX_DATA_SOURCES or any(len(text) > MAX_NAME_CHARS for text in texts):
        reject(
            "RewardDescription",
            "too_large",
            f"at most {MAX_DATA_SOURCES} data sources, and {MAX_NAME_CHARS} characters in each text",
        )
    name = one_line(message.name)
    return from_proto(message, RewardDescription, name=name, data_sources=frozenset(sources))
