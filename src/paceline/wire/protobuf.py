"""Domain types <-> protobuf messages: policy tags, items to score and their results."""

from __future__ import annotations

import json
import math

from paceline.core.attachment import MAX_DATA_SOURCES, MAX_NAME_CHARS
from paceline.core.errors import InvalidMessageError
from paceline.core.policy import PolicyTag
from paceline.core.scoring import RewardDescription, ScoreItem, ScoreResult
from paceline.core.text import one_line
from paceline.rpc.v1 import common_pb2, reward_pb2
from paceline.wire.fields import DEFAULT_LIMITS, plain_problem, reject


def policy_tag_to_proto(tag: PolicyTag) -> common_pb2.PolicyTag:
    """A policy tag as a message."""
    return common_pb2.PolicyTag(version=tag.version, digest=tag.digest)


def policy_tag_from_proto(message: common_pb2.PolicyTag) -> PolicyTag:
    """Reads a policy tag; its digest may be empty, where it is not known yet.

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
    return PolicyTag(version=message.version, digest=digest)


def score_item_to_proto(item: ScoreItem) -> reward_pb2.ScoreItem:
    """An item to score as a message.

    Raises:
        InvalidMessageError: `extra` holds a value that JSON cannot express.
    """
    check_score_item(item)
    extra = dict(item.extra)
    return reward_pb2.ScoreItem(
        trajectory_id=item.trajectory_id,
        prompt=item.prompt,
        response=item.response,
        ground_truth=item.ground_truth,
        data_source=item.data_source,
        extra_json=json.dumps(extra) if extra else "",
        group=item.group,
    )


def check_score_item(item: ScoreItem) -> None:
    """Refuses an item that no message can hold.

    Raises:
        InvalidMessageError: `extra` holds a value that JSON cannot express, or a text half a surrogate pair.
    """
    problem = plain_problem(dict(item.extra), DEFAULT_LIMITS.max_depth)
    if problem:
        reject("ScoreItem", problem[0], f"extra: {problem[1]}")
    texts = (item.trajectory_id, item.prompt, item.response, item.ground_truth, item.data_source)
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:
        reject("ScoreItem", "not_unicode", f"a text holds half a surrogate pair ({error.reason})")


def score_item_from_proto(message: reward_pb2.ScoreItem) -> ScoreItem:
    """Reads an item to score.

    Raises:
        InvalidMessageError: no trajectory id, or `extra_json` is not a JSON object of finite values.
    """
    if not message.trajectory_id:
        reject("ScoreItem", "missing_field", "no trajectory_id")
    return ScoreItem(
        trajectory_id=message.trajectory_id,
        prompt=message.prompt,
        response=message.response,
        ground_truth=message.ground_truth,
        data_source=message.data_source,
        extra=_read_extra(message),
        group=message.group,
    )


def _read_extra(message: reward_pb2.ScoreItem) -> dict[str, object]:
    if not message.extra_json:
        return {}
    try:
        extra = json.loads(message.extra_json)
    except (ValueError, RecursionError) as error:
        raise InvalidMessageError(
            f"invalid ScoreItem: {message.trajectory_id[:80]}: extra_json is not JSON ({error})",
            reason="not_json",
        ) from error
    if not isinstance(extra, dict):
        reject("ScoreItem", "wrong_type", f"{message.trajectory_id[:80]}: extra_json is not an object")
    problem = plain_problem(extra, DEFAULT_LIMITS.max_depth)
    if problem:
        reject("ScoreItem", problem[0], f"{message.trajectory_id[:80]}: extra_json: {problem[1]}")
    return extra


def score_result_to_proto(result: ScoreResult) -> reward_pb2.ScoreResult:
    """A score as a message; an empty error becomes "unknown error"."""
    if result.error is not None or result.reward is None:
        return reward_pb2.ScoreResult(
            trajectory_id=result.trajectory_id, error=result.error or "unknown error"
        )
    return reward_pb2.ScoreResult(
        trajectory_id=result.trajectory_id,
        reward=result.reward,
        components=dict(result.components),
        placed=[reward_pb2.PlacedReward(end=end, reward=part) for end, part in result.placed],
    )


def score_result_from_proto(message: reward_pb2.ScoreResult) -> ScoreResult:
    """Reads a score.

    Raises:
        InvalidMessageError: no trajectory id, or a number that is not finite.
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
    """What a reward service says that it is, as a message."""
    return reward_pb2.RewardDescription(
        contract=description.contract,
        name=description.name,
        data_sources=sorted(description.data_sources),
        groups=description.groups,
        version=description.version,
    )


def description_from_proto(message: reward_pb2.RewardDescription) -> RewardDescription:
    """Reads what a reward service says that it is.

    Raises:
        InvalidMessageError: it names no version, too many data sources, or one that is too long.
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
    return RewardDescription(
        contract=message.contract,
        name=one_line(message.name),
        data_sources=frozenset(sources),
        groups=message.groups,
        version=message.version,
    )
