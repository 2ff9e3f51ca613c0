"""Encodes parts that several messages share: ids, policy tags, sampling specs, reward contexts."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from paceline.core.digest import DIGEST
from paceline.core.errors import InvalidMessageError
from paceline.core.ids import TrajectoryId, check_purpose
from paceline.core.policy import PolicyRange, PolicyTag, range_fault
from paceline.core.samples.episode import EpisodeOutcome
from paceline.core.samples.images import Image
from paceline.core.samples.trajectory import RewardContext, SamplingSpec
from paceline.wire.fields import LIMITS, Fields, plain_problem
from paceline.wire.records import values_of

_DIGEST = re.compile(r"[0-9a-f]{16}")
_IMAGE_HASH = re.compile(r"[0-9a-f]{64}")
_Choice = TypeVar("_Choice", bound=enum.Enum)


def pack_trajectory_id(trajectory_id: TrajectoryId) -> list[Any]:
    """Packs [purpose, step, prompt id, sample index], in the order of the text form."""
    key = trajectory_id
    return [key.purpose, key.step, key.prompt_id, key.sample_index]


def read_trajectory_id(fields: Fields) -> TrajectoryId:
    """Reads the field `trajectory_id` as an id."""
    items = fields.items("trajectory_id", max_items=4)
    if len(items) != 4:
        fields.reject("unequal_lengths", f"trajectory_id has {len(items)} parts, wanted 4")
    purpose, *numbers = items
    if type(purpose) is not str:
        fields.reject("wrong_type", f"trajectory_id has a {type(purpose).__name__} as its purpose")
    _check_purpose(fields, purpose)
    for number in numbers:
        if type(number) is not int:
            fields.reject("wrong_type", f"trajectory_id holds a {type(number).__name__} among its numbers")
        if not 0 <= number < 2**63:
            fields.reject("out_of_range", f"trajectory_id holds {number}")
    step, prompt_id, sample_index = numbers
    return TrajectoryId(step=step, purpose=purpose, prompt_id=prompt_id, sample_index=sample_index)


def pack_policy(policy: PolicyTag) -> list[Any]:
    """Packs a policy tag as [version, digest]."""
    return [policy.version, policy.digest]


def read_policy(fields: Fields) -> PolicyTag:
    """Reads the field `policy` as a tag."""
    return _policy_of(fields, fields.items("policy", max_items=2))


def _policy_of(fields: Fields, items: Sequence[Any]) -> PolicyTag:
    if len(items) != 2:
        fields.reject("unequal_lengths", f"policy has {len(items)} parts, wanted version and digest")
    version, digest = items
    if type(version) is not int or type(digest) is not str:
        fields.reject("wrong_type", "policy must be a version number and a digest in text")
    if not 0 <= version < 2**63:
        fields.reject("out_of_range", f"policy version {version}")
    if not _DIGEST.fullmatch(digest):
        fields.reject("out_of_range", f"digest {digest[:40]!r}, wanted 16 lower-case hexadecimal digits")
    return PolicyTag(version=version, digest=digest)


def pack_ranges(ranges: Sequence[PolicyRange]) -> dict[str, Any]:
    """Packs the field `ranges`, each [version, digest, first token, end]; omits it if there are none."""
    packed = [[*pack_policy(part.policy), part.first, part.end] for part in ranges]
    return {"ranges": packed} if packed else {}


def read_ranges(fields: Fields, num_tokens: int) -> tuple[PolicyRange, ...]:
    """Reads the optional field `ranges` of a response of `num_tokens` tokens."""
    if fields.missing("ranges"):
        return ()
    ranges = read_range_list(fields)
    if fault := range_fault(ranges, num_tokens):
        fields.reject("inconsistent", f"ranges: {fault}")
    if ranges[0].policy != read_policy(fields):
        fields.reject("inconsistent", f"ranges begin with {ranges[0].policy}, which is not `policy`")
    return ranges


def read_range_list(fields: Fields) -> tuple[PolicyRange, ...]:
    """Reads the field `ranges`; does not check that they are contiguous."""
    return tuple(_read_range(fields, item) for item in fields.items("ranges", max_items=LIMITS.max_items))


def _read_range(fields: Fields, item: Any) -> PolicyRange:
    if type(item) is not list or len(item) != 4 or any(type(number) is not int for number in item[2:]):
        fields.reject("wrong_type", f"ranges holds {item!r:.80}, wanted version, digest, first and end")
    return PolicyRange(_policy_of(fields, item[:2]), *item[2:])


def read_sampling(fields: Fields) -> SamplingSpec:
    """Reads the field `sampling` as a spec."""
    inner = fields.nested("sampling")
    top_p = inner.number("top_p", minimum=0.0, maximum=1.0)
    if top_p == 0.0:
        inner.reject("out_of_range", "top_p is 0, allowed is more than 0 and at most 1")
    return SamplingSpec(
        temperature=inner.number("temperature", minimum=0.0),
        max_tokens=inner.integer("max_tokens", minimum=1),
        top_p=top_p,
        top_k=inner.integer("top_k"),
        stop_token_ids=inner.integers("stop_token_ids", max_items=1024, maximum=2**31 - 1),
    )


def pack_context(context: RewardContext) -> dict[str, Any]:
    """Packs a reward context; `extra` must be plain data, and its tuples arrive as lists."""
    extra = dict(context.extra)
    problem = plain_problem(extra, LIMITS.max_depth)
    if problem:
        raise InvalidMessageError(
            f"reward context cannot be encoded: extra: {problem[1]}; give numbers, text, lists and mappings",
            reason=problem[0],
        )
    return {
        **values_of(context, without=("val_set",)),
        "extra": extra,
        **({"val_set": context.val_set} if context.val_set else {}),
    }


def read_context(fields: Fields) -> RewardContext:
    """Reads the field `context` of rewards."""
    inner = fields.nested("context")
    return RewardContext(
        ground_truth=inner.text("ground_truth"),
        data_source=inner.text("data_source"),
        prompt_text=inner.text("prompt_text"),
        extra=inner.plain("extra"),
        val_set="" if inner.missing("val_set") else inner.text("val_set"),
    )


def read_blob_digest(fields: Fields, name: str = "blob_digest") -> str:
    """Reads the digest of a blob as text."""
    digest = fields.name(name)
    if not DIGEST.fullmatch(digest):
        fields.reject(
            "out_of_range",
            f"{name} {digest[:40]!r}, wanted sha-256-128: and 32 lower-case hexadecimal digits",
        )
    return digest


def read_choice(fields: Fields, name: str, choices: type[_Choice]) -> _Choice:
    """Reads a field that holds the value of an Enum member."""
    value = fields.name(name)
    try:
        return choices(value)
    except ValueError:
        allowed = ", ".join(str(choice.value) for choice in choices)
        fields.reject("unknown_value", f"{name} is {value[:40]!r}, allowed are {allowed}")


def read_purpose(fields: Fields) -> str:
    """Reads the field `purpose` of a sample."""
    return _check_purpose(fields, fields.name("purpose"))


def _check_purpose(fields: Fields, purpose: str) -> str:
    try:
        return check_purpose(purpose)
    except ValueError as error:
        fields.reject("unknown_value", str(error))


def pack_episode(episode: EpisodeOutcome | None) -> dict[str, Any] | None:
    """Packs an episode's outcome as a mapping; None for a single answer."""
    if episode is None:
        return None
    return {**values_of(episode), "components": dict(episode.components)}


def read_episode(fields: Fields) -> EpisodeOutcome | None:
    """Reads the field `episode`, if there is one."""
    if fields.missing("episode"):
        return None
    nested = fields.nested("episode")
    return EpisodeOutcome(
        stop_reason=nested.name("stop_reason"),
        num_turns=nested.integer("num_turns", minimum=1),
        num_tool_calls=nested.integer("num_tool_calls"),
        tool_s=nested.number("tool_s", minimum=0.0),
        reward=None if nested.missing("reward") else nested.number("reward"),
        components=nested.numbers("components"),
    )


def pack_messages(messages: Sequence[Mapping[str, object]]) -> list[Any] | None:
    """Packs chat messages as a list of mappings; None if there are none."""
    problem = plain_problem(list(messages), LIMITS.max_depth)
    if problem:
        raise InvalidMessageError(f"chat messages cannot be encoded: {problem[1]}", reason=problem[0])
    return [dict(message) for message in messages] or None


def read_messages(fields: Fields) -> tuple[Mapping[str, object], ...]:
    """Reads the field `messages`: mappings of JSON values."""
    if fields.missing("messages"):
        return ()
    items = fields.items("messages", max_items=LIMITS.max_items)
    problem = plain_problem(items, LIMITS.max_depth)
    if problem:
        fields.reject(problem[0], f"messages: {problem[1]}")
    if any(type(item) is not dict for item in items):
        fields.reject("wrong_type", "messages holds an item that is not a mapping")
    return tuple(items)


def pack_images(images: Sequence[Image]) -> list[Any] | None:
    """Packs hash and grid of each image; None if there are none."""
    return [{"hash": image.hash, "grid_thw": list(image.grid)} for image in images] or None


def read_images(fields: Fields) -> tuple[Image, ...]:
    """Reads the field `images`; limits their patches like a message's tokens."""
    if fields.missing("images"):
        return ()
    images = tuple(_read_image(item) for item in fields.mappings("images", max_items=LIMITS.max_items))
    num_patches = sum(image.num_patches for image in images)
    if num_patches > LIMITS.max_tokens:
        fields.reject(
            "too_large", f"images have {num_patches} patches, at most {LIMITS.max_tokens} are accepted"
        )
    return images


def _read_image(fields: Fields) -> Image:
    name = fields.name("hash")
    if not _IMAGE_HASH.fullmatch(name):
        fields.reject("out_of_range", f"hash {name[:40]!r}, wanted 64 lower-case hexadecimal digits")
    grid = fields.integers("grid_thw", max_items=3, minimum=1, maximum=LIMITS.max_tokens)
    if len(grid) != 3:
        fields.reject("unequal_lengths", f"grid_thw has {len(grid)} parts, wanted time, height and width")
    return Image(hash=name, grid=grid)
