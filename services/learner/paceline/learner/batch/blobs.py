"""Fetches a rank's rows of a step and checks that it may train on them; stores its log-probs beside them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from paceline.broker import names
from paceline.core.errors import BrokerError, DataError, LostDataError, VersionMismatchError
from paceline.core.ids import NEVER_TRAINED
from paceline.core.policy import PolicyTag
from paceline.core.samples.expert_choices import joined_choices
from paceline.core.samples.images import ImageSpec
from paceline.core.samples.teacher_top_k import TeacherTopK
from paceline.core.samples.trajectory import Float32Array, Trajectory
from paceline.core.training import BatchRow
from paceline.learner.batch.images import find_images
from paceline.learner.batch.types import PackedRow, ScoredBatch
from paceline.wire import blob_digest, decode_teacher, decode_trajectory, encode_log_probs, unpack_pixels

log = logging.getLogger(__name__)


class ReplayBound(NamedTuple):
    """Rows of the steps before `step` may be trained again, if no token is older than version `oldest`."""

    step: int
    oldest: int


class Blobs(Protocol):
    """Stores bytes by key, as `paceline.broker.redis.redis_blobs.BlobClient` does."""

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values in the order of the keys."""
        ...

    def put(self, blobs: Mapping[str, bytes]) -> None:
        """Stores blobs under their keys."""
        ...


def fetch_rows(
    blobs: Blobs,
    rows: Mapping[int, BatchRow],
    wanted: Sequence[int],
    *,
    policy: PolicyTag,
    vocab_size: int,
    images: ImageSpec | None = None,
    newest: int | None = None,
    replay: ReplayBound | None = None,
    has_teacher: bool = False,
) -> dict[int, PackedRow]:
    """Returns the rows at the places `wanted`, by place; the pixels of an image are fetched once.

    Args:
        rows: rows of the step, or of a part of it, by their places in the batch.
        wanted: places of this rank's rows.
        policy: policy that must have sampled the rows; with `newest`, the oldest policy allowed.
        images: images that the model takes; None: it takes none.
        newest: newest version that tokens may have; None: all must be from `policy`.
        replay: which rows may be trained again; None: no replay, all rows are of `policy`.
        has_teacher: whether every row needs the tokens of a served teacher.

    Raises:
        InvalidMessageError: a blob is not a trajectory.
        VersionMismatchError: a trajectory was sampled from another policy than is allowed.
        LostDataError: a blob is missing, or is not the one that was scored, or that the teacher gave.
        DataError: a trajectory is not the one that its row names, or was not sampled for training, or its
            images are not those of its prompt.
        BrokerError, DeadlineError: the broker does not answer.
    """
    packed, trajectories = {}, {}
    taught = _teacher_blobs(blobs, [rows[index] for index in wanted] if has_teacher else [])
    for index, blob in zip(wanted, blobs.get([rows[index].blob_key for index in wanted]), strict=True):
        _check_blob(blob, rows[index])
        trajectory = decode_trajectory(blob, vocab_size=vocab_size)
        _check_row(trajectory, rows[index])
        if replay is not None and rows[index].trajectory_id.step != replay.step:
            _check_replayed(trajectory, replay)
        else:
            _check_policy(trajectory, policy, newest)
        choices = trajectory.expert_choices
        packed[index] = PackedRow(
            index=index,
            prompt_token_ids=trajectory.prompt_token_ids,
            response_token_ids=trajectory.response_token_ids,
            response_mask=trajectory.response_mask,
            response_log_probs=trajectory.response_log_probs,
            segment_starts=trajectory.segment_starts,
            expert_choices=None if choices is None else choices.array,
            teacher=_read_teacher(taught, rows[index], trajectory, vocab_size) if has_teacher else None,
        )
        if trajectory.images:
            trajectories[index] = trajectory
    if trajectories:
        _add_images(blobs, packed, trajectories, images)
    _share_prompt_choices(packed, rows)
    return packed


def _teacher_blobs(blobs: Blobs, rows: Sequence[BatchRow]) -> dict[str, bytes]:
    """Returns the blobs with a served teacher's tokens, by digest."""
    named = {
        r.teacher_digest: names.teacher_top_k(r.blob_key, r.teacher_digest) for r in rows if r.teacher_digest
    }
    return dict(zip(named, blobs.get(list(named.values())), strict=True)) if named else {}


def _read_teacher(
    taught: Mapping[str, bytes], row: BatchRow, trajectory: Trajectory, vocab_size: int
) -> TeacherTopK:
    """Reads the teacher's tokens for a row."""
    if not row.teacher_digest:
        raise LostDataError(
            f"trajectory {row.trajectory_id} was scored without a teacher, whose tokens the loss reads"
        )
    blob = taught[row.teacher_digest]
    if (digest := blob_digest(blob, like=row.teacher_digest)) != row.teacher_digest:
        raise LostDataError(
            f"the teacher's tokens for trajectory {row.trajectory_id} have the digest {digest}, not the "
            f"header's {row.teacher_digest}"
        )
    return decode_teacher(blob, of=row.blob_digest, mask=trajectory.response_mask, vocab_size=vocab_size)


def _share_prompt_choices(packed: dict[int, PackedRow], rows: Mapping[int, BatchRow]) -> None:
    """Gives all samples of a prompt the first one's choices of experts for the prompt's tokens.

    Samples that one server draws have the same choices for the part of the prompt that its prefix cache
    holds. In the rest, which is computed for each sample, rounding may change a choice; so may another server
    that goes on with the samples or, with `rollout.in_flight: keep`, another version. A shared prompt is
    packed once and can take only one sample's choices. With the first one's, a row has the same log-probs
    with shared prompts or without, in whichever micro-batch.

    A rank knows only its own rows. If samples of a prompt that differ in these choices are spread over ranks,
    numbers depend on how they are spread.
    """
    leaders: dict[tuple[int, int], PackedRow] = {}
    with_choices = [index for index in sorted(packed) if packed[index].expert_choices is not None]
    for index in [*with_choices, *sorted(packed.keys() - with_choices)]:
        key, row = rows[index].trajectory_id, packed[index]
        leader = leaders.setdefault((key.step, key.prompt_id), row)
        length = len(row.prompt_token_ids)
        if leader.expert_choices is None or not np.array_equal(row.prompt_token_ids, leader.prompt_token_ids):
            continue
        own = None if row.expert_choices is None else row.expert_choices[length:]
        parts = [leader.expert_choices[:length], own]
        choices = joined_choices(parts, [length, len(row.response_token_ids)])
        packed[index] = replace(row, expert_choices=choices)


def _add_images(
    blobs: Blobs,
    packed: dict[int, PackedRow],
    trajectories: Mapping[int, Trajectory],
    spec: ImageSpec | None,
) -> None:
    keys = {
        names.image(trajectory.run_id, image.hash): image
        for trajectory in trajectories.values()
        for image in trajectory.images
    }
    loaded = {
        image.hash: unpack_pixels(image, blob)
        for image, blob in zip(keys.values(), blobs.get(list(keys)), strict=True)
    }
    for index, trajectory in trajectories.items():
        if spec is None or trajectory.segment_starts:
            raise DataError(
                f"trajectory {trajectory.trajectory_id} has images, and "
                + (
                    "several turns: images are only possible with one"
                    if spec
                    else "the model takes only text"
                )
            )
        own = [loaded[image.hash] for image in trajectory.images]
        try:
            placed = find_images(trajectory.prompt_token_ids, own, spec)
        except DataError as error:
            raise DataError(f"trajectory {trajectory.trajectory_id}: {error}") from error
        packed[index] = replace(packed[index], images=placed)


def _check_blob(blob: bytes, row: BatchRow) -> None:
    """Checks the digest: a server may have sampled again and replaced the blob after it was scored."""
    digest = blob_digest(blob, like=row.blob_digest)
    if digest != row.blob_digest:
        raise LostDataError(
            f"blob {row.blob_key} of trajectory {row.trajectory_id} holds another sample than the one that "
            f"was scored: its digest is {digest}, the header's {row.blob_digest}"
        )


def _check_policy(trajectory: Trajectory, policy: PolicyTag, newest: int | None) -> None:
    """Refuses tokens of other policies than the step's."""
    last = policy.version if newest is None else newest
    for sampled_from in (trajectory.policy, *(part.policy for part in trajectory.ranges)):
        is_known = sampled_from == policy or sampled_from.version != policy.version
        if not is_known or not policy.version <= sampled_from.version <= last:
            raise VersionMismatchError(
                f"trajectory {trajectory.trajectory_id} was sampled from {sampled_from}, the step trains on "
                f"{policy}"
                + (f" to version {last}" if last > policy.version else "")
                + "; it must not enter the batch"
            )


def _check_replayed(trajectory: Trajectory, replay: ReplayBound) -> None:
    """Refuses a trajectory of a later step, or one that is too old to be trained again."""
    key, last = trajectory.trajectory_id, replay.step - 2
    versions = [trajectory.policy.version, *(part.policy.version for part in trajectory.ranges)]
    if key.step > replay.step or not replay.oldest <= min(versions) <= max(versions) <= last:
        raise VersionMismatchError(
            f"trajectory {key} has tokens of version {min(versions)}; step {replay.step} replays "
            f"only versions {replay.oldest} to {last} (algorithm.replay.max_age); it must not enter the "
            "batch"
        )


def _check_row(trajectory: Trajectory, row: BatchRow) -> None:
    """Checks purpose, identity and lengths: the last check before training, except for policies."""
    name = str(row.trajectory_id)
    if row.trajectory_id.purpose in NEVER_TRAINED:
        raise DataError(f"trajectory {name} was not sampled for training; it must not enter the batch")
    if trajectory.trajectory_id != row.trajectory_id:
        raise DataError(
            f"blob {row.blob_key} holds trajectory {trajectory.trajectory_id}, the batch names {name}"
        )
    lengths = (len(trajectory.prompt_token_ids), len(trajectory.response_token_ids))
    if lengths != (row.num_prompt_tokens, row.num_response_tokens):
        raise DataError(
            f"trajectory {name} has {lengths[0]} + {lengths[1]} tokens, its header says "
            f"{row.num_prompt_tokens} + {row.num_response_tokens}"
        )
    num_patches = sum(image.num_patches for image in trajectory.images)
    if num_patches != row.num_patches:
        raise DataError(
            f"trajectory {name} has images of {num_patches} patches, its header says {row.num_patches}"
        )
    num_sampled = int(trajectory.response_mask.sum(dtype=np.int64))
    if num_sampled != row.num_sampled_tokens or not num_sampled:
        raise DataError(
            f"trajectory {name} has {num_sampled} tokens that the policy sampled, its header says "
            f"{row.num_sampled_tokens}; at least one is needed to learn from"
        )


def deposit_log_probs(blobs: Blobs, rows: Sequence[BatchRow], scored: Sequence[ScoredBatch]) -> None:
    """Stores this rank's log-probs, computed with the weights before the update.

    They are for people to look at, so a step does not fail without them.
    """
    log_probs_of = {
        names.learner_log_probs(rows[index].blob_key): encode_log_probs(log_probs)
        for index, log_probs in _of_rows(scored)
    }
    try:
        blobs.put(log_probs_of)
    except BrokerError as error:
        log.warning("the saved trajectories will lack the learner's log-probs: %s", error)


def _of_rows(scored: Sequence[ScoredBatch]) -> Iterator[tuple[int, Float32Array]]:
    """Yields each row's place in the batch and a log-prob per response token, 0 if it was not sampled."""
    for part in scored:
        if not part.batch.rows or "old" not in part.log_probs:
            continue
        table = part.log_probs["old"].float().where(part.batch.mask, 0.0).cpu().numpy()
        for source, log_probs in zip(part.batch.sources, table, strict=True):
            yield source.index, np.asarray(log_probs[: len(source.response_token_ids)], np.float32)
