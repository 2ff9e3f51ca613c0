"""Encodes the saved progress of a group's unfinished samples: appended frames, each of them a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from paceline.core.policy import range_fault
from paceline.core.samples.trajectory import PartialSample
from paceline.wire.fields import LIMITS, Fields, pack, pack_array, reject, unpack
from paceline.wire.mailbox.messages import MAX_SEED, check_log_probs
from paceline.wire.parts import pack_ranges, read_range_list

PROGRESS: Final = "progress"

_LENGTH_BYTES: Final = 4


def encode_progress(parts: Sequence[PartialSample]) -> bytes:
    """Packs the tokens sampled since the last frame as one frame."""
    message = pack(PROGRESS, {"parts": [_pack_part(part) for part in parts]})
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


def decode_progress(data: bytes, *, vocab_size: int | None = None) -> dict[int, PartialSample]:
    """Reads and checks frames; returns all saved tokens of each sample by its index.

    Raises:
        InvalidMessageError: a frame is invalid, or does not continue where the previous one ended.
    """
    if len(data) > LIMITS.max_bytes:
        reject(PROGRESS, "too_large", f"{len(data)} bytes, at most {LIMITS.max_bytes} are accepted")
    samples: dict[int, PartialSample] = {}
    for message in _frames(data):
        for fields in unpack(PROGRESS, message).mappings("parts", max_items=LIMITS.max_samples):
            part = _read_part(fields, vocab_size)
            before = samples.get(part.sample_index)
            if part.first != (before.end if before else 0) or (before and before.seed != part.seed):
                fields.reject("inconsistent", f"sample {part.sample_index} does not continue at {part.first}")
            samples[part.sample_index] = before.joined(part) if before else part
    for sample in samples.values():
        if fault := range_fault(sample.ranges, sample.end):
            reject(PROGRESS, "inconsistent", f"sample {sample.sample_index}: {fault}")
    return samples


def _pack_part(part: PartialSample) -> dict[str, object]:
    return {
        "sample_index": part.sample_index,
        "seed": part.seed,
        "first": part.first,
        "response_token_ids": pack_array("response_token_ids", part.token_ids, "<i4"),
        "response_log_probs": pack_array("response_log_probs", part.log_probs, "<f4"),
        **pack_ranges(part.ranges),
    }


def _read_part(fields: Fields, vocab_size: int | None) -> PartialSample:
    token_ids = fields.token_ids("response_token_ids", vocab_size)
    log_probs = fields.array("response_log_probs", "<f4", min_items=1)
    if len(token_ids) != len(log_probs):
        fields.reject("unequal_lengths", f"{len(token_ids)} tokens, {len(log_probs)} log-probs")
    check_log_probs(fields, log_probs)
    ranges = read_range_list(fields)
    if not ranges:
        fields.reject("missing_field", "ranges is empty: it must say which policy drew the tokens")
    return PartialSample(
        sample_index=fields.integer("sample_index", maximum=LIMITS.max_samples - 1),
        seed=fields.integer("seed", maximum=MAX_SEED),
        first=fields.integer("first", maximum=LIMITS.max_tokens),
        token_ids=token_ids,
        log_probs=log_probs,
        ranges=ranges,
    )


def _frames(data: bytes) -> Iterator[bytes]:
    first = 0
    while first < len(data):
        begin = first + _LENGTH_BYTES
        end = begin + int.from_bytes(data[first:begin], "little")
        if end > len(data) or end == begin:
            reject(PROGRESS, "not_msgpack", f"a frame ends at byte {end} of {len(data)}")
        yield data[begin:end]
        first = end
