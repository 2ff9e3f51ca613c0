"""The wire: a decoded message is the encoded one; a malformed one is rejected with its reason."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paceline import wire
from paceline.core.errors import InvalidMessageError
from paceline.core.samples.expert_choices import ExpertChoices
from paceline.core.samples.trajectory import (
    SCHEMA_VERSION,
    GroupRefusal,
    PromptGroup,
    RewardContext,
    ScoredHeader,
    Trajectory,
    TrajectoryHeader,
)
from paceline.wire import fields
from support import domain
from support.trajectories import finished_sample

Message = PromptGroup | Trajectory | TrajectoryHeader | ScoredHeader | GroupRefusal

CODECS: dict[type[Message], tuple[Callable[[Any], bytes], Callable[..., Message]]] = {
    PromptGroup: (wire.encode_prompt_group, wire.decode_prompt_group),
    Trajectory: (wire.encode_trajectory, wire.decode_trajectory),
    TrajectoryHeader: (wire.encode_trajectory_header, wire.decode_trajectory_header),
    ScoredHeader: (wire.encode_scored_header, wire.decode_scored),
    GroupRefusal: (wire.encode_group_refusal, wire.decode_scored),
}
ANY_MESSAGE = (
    domain.prompt_groups
    | domain.trajectories()
    | domain.trajectory_headers
    | domain.scored_headers()
    | domain.group_refusals
)
REASONS = {
    "not_msgpack", "unknown_schema", "wrong_kind", "missing_field", "wrong_type", "out_of_range",
    "not_finite", "too_large", "unequal_lengths", "unknown_value", "inconsistent",
}  # fmt: skip


def encode(message: Message) -> bytes:
    return CODECS[type(message)][0](message)


def decode(kind: type[Message], data: bytes, **options: Any) -> Message:
    return CODECS[kind][1](data, **options)


def same(left: object, right: object) -> bool:
    """Equality that looks into arrays: dtype, shape and bits."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, ExpertChoices) and isinstance(right, ExpertChoices):
        return left.to_plain() == right.to_plain() and same(left.array, right.array)
    return left == right


def assert_same(left: Message, right: Message) -> None:
    assert type(left) is type(right)
    for field in dataclasses.fields(left):
        assert same(getattr(left, field.name), getattr(right, field.name)), field.name


def altered(message: Message, /, **fields: Any) -> bytes:
    """The message's bytes with some of its packed fields replaced; None removes a field."""
    content = msgpack.unpackb(encode(message))
    content.update(fields)
    return msgpack.packb({name: value for name, value in content.items() if value is not None})


@given(ANY_MESSAGE)
@settings(max_examples=200)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    assert_same(decode(type(message), encode(message)), message)


@given(domain.trajectories_with_choices(), st.data())
@settings(max_examples=50)
def test_choices_of_experts_come_back_and_are_covered_by_the_digest(
    trajectory: Trajectory, data: st.DataObject
) -> None:
    blob = wire.encode_trajectory(trajectory)
    copy = wire.decode_trajectory(blob)
    assert_same(copy, trajectory)
    # Files of trajectories have their digest only, from which the blob's digest follows.
    choices = trajectory.expert_choices
    assert choices is not None
    assert choices.array is not None
    known = dataclasses.replace(choices, array=None)
    without = wire.encode_trajectory(dataclasses.replace(trajectory, expert_choices=known))
    assert wire.blob_digest(without) == wire.blob_digest(blob)
    assert len(blob) - len(without) == choices.array.nbytes
    other = choices.array.copy()
    other[data.draw(st.integers(0, len(other) - 1)), 0, 0] ^= 1
    changed = dataclasses.replace(trajectory, expert_choices=ExpertChoices.of(other))
    assert wire.blob_digest(wire.encode_trajectory(changed)) != wire.blob_digest(blob)
    # Bytes of other choices, too few and too many are refused, though the blob's digest is the same.
    for torn, reason in (
        (without + other.tobytes(), "inconsistent"),
        (without, "unequal_lengths"),
        (blob[:-1], "unequal_lengths"),
        (blob + b"\0", "unequal_lengths"),
    ):
        with pytest.raises(InvalidMessageError) as refused:
            wire.decode_trajectory(torn)
        assert refused.value.reason == reason


def test_nothing_follows_a_trajectory_without_choices() -> None:
    blob = finished_sample("r", 1, [4, 5]).blobs
    assert blob is not None
    with pytest.raises(InvalidMessageError, match="behind the message"):
        wire.decode_trajectory(next(iter(blob.values())) + b"\0\1")


@given(domain.trajectories())
@settings(max_examples=25)
def test_decoded_arrays_are_ones_own_and_writable(trajectory: Trajectory) -> None:
    copy = wire.decode_trajectory(wire.encode_trajectory(trajectory))
    for name in ("prompt_token_ids", "response_token_ids", "response_log_probs", "response_mask"):
        array = getattr(copy, name)
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert array.dtype.isnative


@given(st.binary(max_size=200), st.sampled_from(sorted(CODECS, key=str)))
@example(b"\x91" * 5000, Trajectory)
@example(b"\xdf\xff\xff\xff\xff", Trajectory)
@example(msgpack.packb(["schema", 2]), PromptGroup)
@example(msgpack.packb({"schema": 2}) + b"\x00", PromptGroup)
@example(msgpack.packb({b"schema": 2, "kind": "prompt_group"}), PromptGroup)
@settings(max_examples=200)
def test_any_bytes_are_a_message_or_a_typed_rejection(data: bytes, kind: type[Message]) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        decode(kind, data)
    assert caught.value.reason in REASONS


JUNK = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=9),
    st.lists(st.none() | st.integers() | st.text(max_size=3) | st.floats(), max_size=4).filter(
        lambda items: all(not isinstance(item, int) or -(2**63) <= item < 2**64 for item in items)
    ),
    st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2),
    st.just(msgpack.ExtType(5, b"code")),
)


@given(ANY_MESSAGE, st.data())
@settings(max_examples=300)
def test_a_field_of_any_content_is_accepted_or_rejected_with_a_reason(
    message: Message, data: st.DataObject
) -> None:
    names = [name for name in msgpack.unpackb(encode(message)) if name not in ("schema", "kind")]
    changed = altered(message, **{data.draw(st.sampled_from(names)): data.draw(JUNK)})
    try:
        decoded = decode(type(message), changed)
    except InvalidMessageError as error:
        assert error.reason in REASONS  # noqa: PT017  (either outcome is allowed)
    else:
        # What passes the door is a message in every respect: it survives another trip.
        assert_same(decode(type(message), encode(decoded)), decoded)


@given(ANY_MESSAGE, st.data())
@settings(max_examples=60)
def test_every_field_is_needed(message: Message, data: st.DataObject) -> None:
    optional = {
        "reward",
        "reward_error",
        "text_key",
        "episode",
        "messages",
        "images",
        "token_rewards",
        "normalized",
        "num_patches",
        "teacher_digest",
    }
    names = [name for name in msgpack.unpackb(encode(message)) if name not in optional]
    name = data.draw(st.sampled_from(names))
    with pytest.raises(InvalidMessageError) as caught:
        decode(type(message), altered(message, **{name: None}))
    expected = {"schema": "unknown_schema", "kind": "wrong_kind"}.get(name, "missing_field")
    assert caught.value.reason in {expected, "wrong_type"}


@given(
    ANY_MESSAGE,
    st.integers(-5, 50).filter(lambda version: version != SCHEMA_VERSION)
    | st.sampled_from([str(SCHEMA_VERSION), float(SCHEMA_VERSION), True]),
)
@settings(max_examples=40)
def test_other_schema_versions_are_rejected(message: Message, version: object) -> None:
    with pytest.raises(InvalidMessageError, match=f"this build reads {SCHEMA_VERSION}") as caught:
        decode(type(message), altered(message, schema=version))
    assert caught.value.reason == "unknown_schema"


@given(ANY_MESSAGE, st.sampled_from(sorted(CODECS, key=str)))
@settings(max_examples=40)
def test_a_message_in_the_wrong_mailbox_is_rejected(message: Message, kind: type[Message]) -> None:
    if CODECS[kind][1] is CODECS[type(message)][1]:
        return
    with pytest.raises(InvalidMessageError) as caught:
        decode(kind, encode(message))
    assert caught.value.reason == "wrong_kind"


@given(ANY_MESSAGE)
@settings(max_examples=25)
def test_unknown_fields_are_ignored(message: Message) -> None:
    assert_same(decode(type(message), altered(message, something_new=[1, 2])), message)


def rejected(message: Message, /, **fields: Any) -> str:
    with pytest.raises(InvalidMessageError) as caught:
        decode(type(message), altered(message, **fields))
    return caught.value.reason


@given(domain.trajectories(), st.data())
@settings(max_examples=40)
def test_a_log_probability_is_finite_and_not_above_zero(trajectory: Trajectory, data: st.DataObject) -> None:
    values = trajectory.response_log_probs.copy()
    bad, reason = data.draw(
        st.sampled_from(
            [(np.nan, "not_finite"), (np.inf, "not_finite"), (-np.inf, "not_finite"), (0.5, "out_of_range")]
        )
    )
    values[data.draw(st.integers(0, len(values) - 1))] = bad
    assert rejected(trajectory, response_log_probs=values.tobytes()) == reason


@given(domain.trajectories(), st.data())
@settings(max_examples=40)
def test_token_ids_are_in_range(trajectory: Trajectory, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["prompt_token_ids", "response_token_ids"]))
    ids = getattr(trajectory, name).copy()
    at = data.draw(st.integers(0, len(ids) - 1))
    ids[at] = data.draw(st.integers(-(2**31), -1))
    assert rejected(trajectory, **{name: ids.tobytes()}) == "out_of_range"
    ids %= 100
    ids[at] = 100
    in_range = altered(
        trajectory, **{name: ids.tobytes(), _other(name): bytes(4 * _length(trajectory, name))}
    )
    assert decode(Trajectory, in_range, vocab_size=101)
    with pytest.raises(InvalidMessageError, match=rf"{name} holds the id 100, allowed are 0 to 99"):
        decode(Trajectory, in_range, vocab_size=100)


def _other(name: str) -> str:
    return "response_token_ids" if name == "prompt_token_ids" else "prompt_token_ids"


def _length(trajectory: Trajectory, name: str) -> int:
    return len(getattr(trajectory, _other(name)))


@given(domain.trajectories(), st.sampled_from(["response_token_ids", "response_log_probs", "response_mask"]))
@settings(max_examples=30)
def test_the_response_arrays_are_equally_long(trajectory: Trajectory, name: str) -> None:
    array = getattr(trajectory, name)
    assert rejected(trajectory, **{name: np.append(array, array[-1:]).tobytes()}) == "unequal_lengths"


@given(domain.trajectories())
@settings(max_examples=25)
def test_empty_and_torn_arrays_and_masks_out_of_range(trajectory: Trajectory) -> None:
    assert rejected(trajectory, prompt_token_ids=b"") == "out_of_range"
    assert rejected(trajectory, response_token_ids=b"\0\0\0") == "unequal_lengths"
    mask = trajectory.response_mask.copy()
    mask[0] = 2
    assert rejected(trajectory, response_mask=mask.tobytes()) == "out_of_range"
    # Lists instead of packed bytes are not accepted: they would be forty times slower to read.
    assert rejected(trajectory, response_token_ids=[1] * len(mask)) == "wrong_type"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"seeds": []}, "out_of_range"),
        ({"seeds": [-1]}, "out_of_range"),
        ({"seeds": [True]}, "wrong_type"),
        ({"seeds": [0] * 5000}, "too_large"),
        ({"step": -1}, "out_of_range"),
        ({"step": 1.0}, "wrong_type"),
        ({"purpose": "Play!"}, "unknown_value"),
        ({"run_id": ""}, "out_of_range"),
        ({"run_id": "x" * 600}, "too_large"),
        ({"policy": [1]}, "unequal_lengths"),
        ({"policy": [-1, "0" * 16]}, "out_of_range"),
        ({"policy": [1, "0" * 15]}, "out_of_range"),
        ({"policy": [1, "0" * 15 + "G"]}, "out_of_range"),
        ({"policy": [1, b"0" * 16]}, "wrong_type"),
    ],
)
@given(group=domain.prompt_groups)
@settings(max_examples=3)
def test_rejections_of_prompt_groups(group: PromptGroup, fields: dict[str, Any], reason: str) -> None:
    assert rejected(group, **fields) == reason


@given(header=domain.scored_headers())
@settings(max_examples=5)
def test_what_is_no_digest_of_a_teachers_tokens_is_rejected(header: ScoredHeader) -> None:
    assert rejected(header, teacher_digest="x" * 32) == "out_of_range"
    assert rejected(header, teacher_digest=b"0" * 32) == "wrong_type"


@pytest.mark.parametrize("name", ["normalized", "token_rewards"])
@pytest.mark.parametrize("part", [None, False, 0, "", [], [None], [0, None], ["a", 1.0, None], {}])
@given(header=domain.scored_headers())
@settings(max_examples=2)
def test_parts_of_a_reward_that_are_none_are_rejected(header: ScoredHeader, name: str, part: object) -> None:
    right: object = ["a", 1.0, 1.0] if name == "normalized" else [0, 1.0]
    assert rejected(header, **{name: [part]}) == "out_of_range"
    assert rejected(header, **{name: [right, part]}) == "out_of_range"


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ("0f" * 32, "wrong_type"),
        (["0f" * 32], "wrong_type"),
        ([{"hash": "0f" * 32}], "missing_field"),
        ([{"hash": "0F" * 32, "grid_thw": [1, 2, 2]}], "out_of_range"),
        ([{"hash": "0f" * 31, "grid_thw": [1, 2, 2]}], "out_of_range"),
        ([{"hash": "0f" * 32, "grid_thw": [2, 2]}], "unequal_lengths"),
        ([{"hash": "0f" * 32, "grid_thw": [1, 2, 0]}], "out_of_range"),
        ([{"hash": "0f" * 32, "grid_thw": [1, 2.0, 2]}], "wrong_type"),
        ([{"hash": "0f" * 32, "grid_thw": [1, 1024, 1025]}], "too_large"),
        ([{"hash": "0f" * 32, "grid_thw": [1, 2, 2]}] * 2000, "too_large"),
    ],
)
@given(message=domain.prompt_groups | domain.trajectories())
@settings(max_examples=3)
def test_rejections_of_images(message: PromptGroup | Trajectory, images: object, reason: str) -> None:
    assert rejected(message, images=images) == reason


grids = st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4))


@st.composite
def pixel_arrays(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], tuple[int, int, int]]:
    grid = draw(grids)
    width = draw(st.integers(1, 5))
    shape = (grid[0] * grid[1] * grid[2], width)
    return draw(hnp.arrays(np.float32, shape, elements=st.floats(-9, 9, width=32))), grid


@given(pixel_arrays(), st.data())
@settings(max_examples=60)
def test_pixels_come_back_as_they_were_under_their_hash(made: Any, data: st.DataObject) -> None:
    pixels, grid = made
    image, blob = wire.image_of(pixels, grid), wire.pack_pixels(pixels)
    loaded = wire.unpack_pixels(image, blob)
    assert loaded.image == image
    assert same(loaded.pixels, pixels)
    assert loaded.pixels.flags.writeable
    # Any other bit, grid or length is noticed.
    at = data.draw(st.integers(0, 8 * len(blob) - 1))
    flipped = bytearray(blob)
    flipped[at // 8] ^= 1 << at % 8
    turned = dataclasses.replace(image, grid=(grid[0], grid[2], grid[1]))
    for other, content, reasons in [
        (image, bytes(flipped), {"inconsistent"}),
        (image, blob[:-1], {"unequal_lengths"}),
        (image, blob[:-4], {"inconsistent", "unequal_lengths"}),
        (image, b"", {"unequal_lengths"}),
        *([(turned, blob, {"inconsistent"})] if turned != image else []),
    ]:
        with pytest.raises(InvalidMessageError) as caught:
            wire.unpack_pixels(other, content)
        assert caught.value.reason in reasons


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": float("nan")}, "not_finite"),
        ({"temperature": -0.1}, "out_of_range"),
        ({"top_p": 0.0}, "out_of_range"),
        ({"top_p": 1.01}, "out_of_range"),
        ({"max_tokens": 0}, "out_of_range"),
        ({"top_k": -1}, "out_of_range"),
        ({"stop_token_ids": [2**31]}, "out_of_range"),
    ],
)
@given(group=domain.prompt_groups)
@settings(max_examples=3)
def test_rejections_of_sampling_parameters(group: PromptGroup, fields: dict[str, Any], reason: str) -> None:
    sampling = msgpack.unpackb(encode(group))["sampling"]
    assert rejected(group, sampling={**sampling, **fields}) == reason


@pytest.mark.parametrize(
    ("trajectory_id", "reason"),
    [
        (["train", 1, 2], "unequal_lengths"),
        (["train", 1, 2, 3, 4], "too_large"),
        (["Play!", 1, 2, 3], "unknown_value"),
        ([7, 1, 2, 3], "wrong_type"),
        (["train", 1, -2, 3], "out_of_range"),
        (["train", 1, "2", 3], "wrong_type"),
        ("train:1:2:3", "wrong_type"),
    ],
)
@given(header=domain.trajectory_headers)
@settings(max_examples=3)
def test_rejections_of_trajectory_ids(header: TrajectoryHeader, trajectory_id: object, reason: str) -> None:
    assert rejected(header, trajectory_id=trajectory_id) == reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reward": 1.0, "reward_error": ["raised", "no"]}, "inconsistent"),
        ({"reward": None, "reward_error": None}, "inconsistent"),
        ({"reward": float("nan"), "reward_error": None}, "not_finite"),
        ({"reward": float("-inf"), "reward_error": None}, "not_finite"),
        ({"reward": "1.0", "reward_error": None}, "wrong_type"),
        ({"reward": True, "reward_error": None}, "wrong_type"),
        ({"reward": None, "reward_error": ["odd", "no"]}, "unknown_value"),
        ({"reward": None, "reward_error": ["raised"]}, "wrong_type"),
        ({"components": {"a": float("nan")}}, "not_finite"),
        ({"components": {"a": "1"}}, "wrong_type"),
        ({"num_response_tokens": 0}, "out_of_range"),
        ({"num_sampled_tokens": -1}, "out_of_range"),
        ({"num_patches": 0}, "out_of_range"),
        ({"episode": {"stop_reason": "done", "num_turns": 0}}, "out_of_range"),
        ({"episode": "done"}, "wrong_type"),
        ({"finish_reason": "tired"}, "unknown_value"),
        ({"generation_s": -1.0}, "out_of_range"),
        ({"text_key": "x" * 513}, "too_large"),
        ({"blob_digest": "0" * 31}, "out_of_range"),
        ({"blob_digest": b"0" * 32}, "wrong_type"),
    ],
)
@given(header=domain.scored_headers())
@settings(max_examples=3)
def test_rejections_of_scored_headers(header: ScoredHeader, fields: dict[str, Any], reason: str) -> None:
    assert rejected(header, **fields) == reason


def row(value: bytes, count: int = 1000) -> bytes:
    return b"\xdc" + count.to_bytes(2, "big") + value * count


@pytest.mark.parametrize(
    ("value", "count", "reason"),
    [
        (row(b"\x80"), 500, "too_large"),
        (row(b"\x90"), 500, "too_large"),
        (row(b"\xa2ab"), 500, "too_large"),
        (b"\x80", 500_000, "not_msgpack"),  # the list's length alone is too much
    ],
    ids=["maps", "lists", "texts", "a list"],
)
def test_a_small_message_does_not_take_much_memory(
    value: bytes, count: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty mapping is a byte on the wire and 64 in memory: eight times as many took up to 340 MiB.

    With an eighth of the values that are allowed: they are slow to count where memory is traced.
    """
    max_values = 2**17
    share = max_values / fields.LIMITS.max_values
    monkeypatch.setattr(fields, "LIMITS", fields.Limits(max_values=max_values))
    opened = b"\x83\xa6schema" + msgpack.packb(SCHEMA_VERSION) + b"\xa4kind" + msgpack.packb("scored_header")
    message = opened + b"\xa1x\xdd" + count.to_bytes(4, "big") + value * count
    tracemalloc.start()
    try:
        with pytest.raises(InvalidMessageError) as caught:
            wire.decode_scored(message)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.reason == reason
    assert peak < 128 * 2**20 * share


@given(domain.trajectory_headers)
@settings(max_examples=1, deadline=None)
def test_a_row_with_many_values_is_read(header: TrajectoryHeader) -> None:
    """The limit is far above what a row holds: here 300,000 values in lists of lists."""
    extra = {"tests": [[number, number + 1] for number in range(100_000)]}
    header = dataclasses.replace(header, context=RewardContext(ground_truth="", extra=extra))
    assert wire.decode_trajectory_header(wire.encode_trajectory_header(header)).context.extra == extra


@given(domain.trajectory_headers, st.sampled_from(["nested", "nan", "bytes"]))
@settings(max_examples=20)
def test_a_reward_context_is_plain_data_in_both_directions(header: TrajectoryHeader, which: str) -> None:
    nested: Any = 0
    for _ in range(9):
        nested = [nested]
    bad, reason = {
        "nested": (nested, "too_large"),
        "nan": (float("nan"), "not_finite"),
        "bytes": (b"code", "wrong_type"),
    }[which]
    context = msgpack.unpackb(encode(header))["context"]
    assert rejected(header, context={**context, "extra": {"key": bad}}) == reason
    unsendable = dataclasses.replace(header, context=dataclasses.replace(header.context, extra={"key": bad}))
    with pytest.raises(InvalidMessageError, match="reward context cannot be encoded"):
        encode(unsendable)


@given(domain.trajectories(), st.sampled_from([np.int64, np.float32, np.uint32]))
@settings(max_examples=10)
def test_arrays_of_another_dtype_are_not_encoded(trajectory: Trajectory, dtype: Any) -> None:
    wrong = dataclasses.replace(trajectory, prompt_token_ids=trajectory.prompt_token_ids.astype(dtype))
    with pytest.raises(InvalidMessageError, match=r"prompt_token_ids is an array of .* it must be int32"):
        encode(wrong)


@given(ANY_MESSAGE)
@settings(max_examples=10)
def test_messages_over_the_size_cap_are_not_even_opened(message: Message) -> None:
    data = encode(message)
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(InvalidMessageError, match=rf"{len(data)} bytes, at most 10 are accepted") as caught,
    ):
        patch.setattr(fields, "LIMITS", fields.Limits(max_bytes=10))
        decode(type(message), data)
    assert caught.value.reason == "too_large"


def test_the_bytes_of_a_schema_version_do_not_change() -> None:
    """Version 6 as it was first written: a reader of another build must understand it."""
    recorded = bytes.fromhex(
        "8da6736368656d6106a46b696e64ac70726f6d70745f67726f7570"
        "a672756e5f6964a172a47374657003a7707572706f7365a5747261696ea970726f6d70745f696407"
        "b070726f6d70745f746f6b656e5f696473c4080500000000010000"
        "a873616d706c696e6785ab74656d7065726174757265cb3ff0000000000000aa6d61785f746f6b656e7304"
        "a5746f705f70cb3ff0000000000000a5746f705f6b00ae73746f705f746f6b656e5f6964739102"
        "a57365656473920b0c"
        "a6706f6c696379920ab030313233343536373839616263646566"
        "a7636f6e7465787484ac67726f756e645f7472757468a23432ab646174615f736f75726365a0"
        "ab70726f6d70745f74657874a0a5657874726181a16b90a86d65737361676573c0a6696d61676573c0"
    )
    group = wire.decode_prompt_group(recorded)
    assert encode(group) == recorded
    assert group.prompt_token_ids.tolist() == [5, 256]
    assert (group.run_id, group.step, group.prompt_id) == ("r", 3, 7)
    assert group.seeds == (11, 12)
    assert (group.policy.version, group.policy.digest) == (10, "0123456789abcdef")
    assert group.context.extra == {"k": []}


@given(domain.trajectories())
@settings(max_examples=10)
def test_what_was_not_sampled_has_no_log_prob(trajectory: Trajectory) -> None:
    mask, log_probs = trajectory.response_mask.copy(), trajectory.response_log_probs.copy()
    mask[-1], log_probs[-1] = 0, -0.5
    unsound = dataclasses.replace(trajectory, response_mask=mask, response_log_probs=log_probs)
    assert rejected(unsound) == "inconsistent"


@pytest.mark.parametrize(
    ("starts", "reason"),
    [
        ((1, 1), "inconsistent"),
        ((2, 1), "inconsistent"),
        ((3,), "inconsistent"),
        ((4,), "out_of_range"),
        ((0,), "out_of_range"),
    ],
)
@given(sample=domain.trajectories())
@settings(max_examples=3)
def test_segments_begin_in_order_each_with_a_prompt(
    starts: tuple[int, ...], reason: str, sample: Trajectory
) -> None:
    sound = dataclasses.replace(
        sample,
        response_token_ids=np.arange(4, dtype=np.int32),
        response_mask=np.array([1, 0, 0, 1], dtype=np.uint8),
        response_log_probs=np.array([-1, 0, 0, -1], dtype=np.float32),
        segment_starts=(1, 2),
    )
    assert wire.decode_trajectory(encode(sound)).segment_starts == (1, 2)
    assert rejected(sound, segment_starts=list(starts)) == reason
