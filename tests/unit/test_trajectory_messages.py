"""What a rollout server appends for a prompt group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.broker.base import Outgoing
from paceline.core.errors import InvalidMessageError
from paceline.core.ids import Purpose
from paceline.core.policy import PolicyRange, PolicyTag
from paceline.core.samples.images import Image
from paceline.core.samples.trajectory import FinishReason, PromptGroup, RewardContext, SamplingSpec
from paceline.rollout.capacity import SamplerLimits
from paceline.rollout.engines.base import Sample
from paceline.rollout.episodes.recorder import Draw
from paceline.rollout.trajectories import sample_requests, trajectory_messages
from paceline.wire import (
    blob_digest,
    decode_scored,
    decode_trajectory,
    decode_trajectory_header,
    decode_trajectory_headers,
    encode_scored_header,
    encode_trajectory,
    encode_trajectory_header,
)
from support import cli_configs
from support.headers import scored


def group() -> PromptGroup:
    return PromptGroup(
        run_id="r",
        step=3,
        purpose=Purpose.TRAIN,
        prompt_id=7,
        prompt_token_ids=np.array([5, 6], np.int32),
        sampling=SamplingSpec(temperature=1.0, max_tokens=4),
        seeds=(1, 2),
        policy=PolicyTag(version=2, digest="0" * 16),
        context=RewardContext(ground_truth="42"),
    )


def messages(
    server_id: str, *, draw: str, seconds: float, together: bool = False, images: tuple[Image, ...] = ()
) -> list[Outgoing]:
    samples = [
        Sample(
            token_ids=np.array([8, 9 + index], np.int32),
            log_probs=np.array([-0.5, -0.25], np.float32),
            finish_reason=FinishReason.STOP,
        )
        for index in range(2)
    ]
    draws = [Draw.single(group().prompt_token_ids, sample) for sample in samples]
    return trajectory_messages(
        replace(group(), images=images),
        draws,
        server_id=server_id,
        draw=draw,
        seconds=seconds,
        together=together,
    )


def test_the_digest_of_a_blob_says_what_was_drawn_not_by_whom_or_when() -> None:
    """Else the digest of a batch would depend on which of two equal copies came first."""
    first = [decode_trajectory_header(m.payload) for m in messages("rollout-0", draw="a/1", seconds=0.5)]
    copies = messages("rollout-1", draw="b/1", seconds=0.75)
    second = [decode_trajectory_header(m.payload) for m in copies]
    assert [h.blob_digest for h in first] == [h.blob_digest for h in second]
    assert first[0].blob_digest != first[1].blob_digest
    assert {h.blob_key for h in first}.isdisjoint(h.blob_key for h in second)
    assert [h.seconds for h in second] == [0.75, 0.75]
    assert [h.server_id for h in second] == ["rollout-1", "rollout-1"]
    for header, copy in zip(second, copies, strict=True):
        assert header.blob_digest == blob_digest(copy.blobs[header.blob_key])


V2, V3 = (PolicyTag(version=v, digest=f"{v:016x}") for v in (2, 3))
OLD = PolicyTag(version=1, digest="1" * 16)


def mixed(versions: tuple[tuple[int, int], ...]) -> Outgoing:
    drawn = Sample(
        token_ids=np.arange(5, dtype=np.int32),
        log_probs=np.full(5, -0.5, np.float32),
        finish_reason=FinishReason.STOP,
        versions=versions,
    )
    draws = [Draw.single(group().prompt_token_ids, drawn)]
    known = {2: V2, 3: V3}
    (message,) = trajectory_messages(
        replace(group(), policy=OLD), draws, server_id="s", draw="a", seconds=0.1, policies=known
    )
    return message


def test_a_sample_of_two_versions_says_which_of_them_drew_which_tokens() -> None:
    message = mixed(((0, 2), (3, 3)))
    header = decode_trajectory_header(message.payload)
    assert (header.policy, header.ranges) == (V2, (PolicyRange(V2, 0, 3), PolicyRange(V3, 3, 5)))
    trajectory = decode_trajectory(message.blobs[header.blob_key])
    assert (trajectory.policy, trajectory.ranges) == (V2, header.ranges)
    single = decode_trajectory_header(mixed(((0, 3),)).payload)
    assert (single.policy, single.ranges) == (V3, ())
    assert single.policy_ranges == (PolicyRange(V3, 0, 5),)


def test_a_sample_of_one_version_has_the_bytes_that_it_had_before_there_were_ranges() -> None:
    for message in messages("rollout-0", draw="a/1", seconds=0.5):
        (blob,) = message.blobs.values()
        assert b"ranges" not in message.payload + blob


def test_a_sample_whose_first_version_nobody_knows_any_more_is_not_sent() -> None:
    with pytest.raises(InvalidMessageError, match="older than the bound allows"):
        mixed(((0, 1), (3, 3)))


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([(V2, 0, 3), (V3, 2, 5)], "overlap at token 2"),
        ([(V2, 0, 2), (V3, 3, 5)], "leave a hole at token 2"),
        ([(V2, 1, 3), (V3, 3, 5)], "leave a hole at token 0"),
        ([(V2, 0, 3), (V3, 3, 4)], "end at 4, and it has 5"),
        ([(V2, 0, 3), (V2, 3, 5)], "version 2 sampled tokens after version 2"),
        ([(V2, 0, 0), (V3, 0, 5)], "at 0 ends at 0"),
        ([(V3, 0, 5)], "which is not `policy`"),
    ],
)
def test_ranges_that_do_not_follow_each_other_are_refused(
    ranges: list[tuple[PolicyTag, int, int]], words: str
) -> None:
    message = mixed(((0, 2), (3, 3)))
    header = decode_trajectory_header(message.payload)
    planted = tuple(PolicyRange(*part) for part in ranges)
    with pytest.raises(InvalidMessageError, match=words):
        decode_trajectory_header(encode_trajectory_header(replace(header, ranges=planted)))
    trajectory = decode_trajectory(message.blobs[header.blob_key])
    with pytest.raises(InvalidMessageError, match=words):
        decode_trajectory(encode_trajectory(replace(trajectory, ranges=planted)))


def test_samples_that_are_scored_together_go_on_in_one_message_with_all_their_blobs() -> None:
    single = messages("rollout-0", draw="a/1", seconds=0.5)
    (message,) = messages("rollout-0", draw="a/1", seconds=0.5, together=True)
    headers = decode_trajectory_headers(message.payload)
    assert headers == tuple(decode_trajectory_headers(m.payload) for m in single)
    assert dict(message.blobs) == {key: blob for m in single for key, blob in m.blobs.items()}


def test_headers_count_the_patches_of_the_prompts_images() -> None:
    images = (Image(hash="a" * 64, grid=(1, 4, 6)), Image(hash="b" * 64, grid=(1, 2, 2)))
    for given, num_patches in (((), 0), (images, 28)):
        sent = messages("rollout-0", draw="a/1", seconds=0.5, images=given)
        headers = [decode_trajectory_header(message.payload) for message in sent]
        assert [header.num_patches for header in headers] == [num_patches] * 2
        for header, message in zip(headers, sent, strict=True):
            assert decode_trajectory(message.blobs[header.blob_key]).images == given


def test_they_do_where_a_scorer_asks_for_groups() -> None:
    for is_grouped in (False, True):
        function = {"name": "rank.py:rank", "group": is_grouped}
        limits = SamplerLimits.of(cli_configs.config(reward={"functions": [{"name": "gsm8k"}, function]}))
        assert limits.groups_together is is_grouped
        of_set = {"files": "hard.jsonl", "reward": {"functions": [function]}}
        data = {"train_files": "t.jsonl", "val_sets": {"hard": of_set}}
        assert SamplerLimits.of(cli_configs.config(data=data)).groups_together is is_grouped


def test_requests_of_two_policies_share_no_cached_prefix() -> None:
    def salts(digest: str) -> set[str]:
        policy = PolicyTag(version=2, digest=digest)
        return {request.cache_salt for request in sample_requests(replace(group(), policy=policy), serial=0)}

    assert len(salts("0" * 16)) == 1
    assert salts("0" * 16).isdisjoint(salts("f" * 16))


def test_a_sample_without_a_token_of_the_policy_is_scored_all_the_same() -> None:
    header = replace(scored(7), num_sampled_tokens=0)
    assert decode_scored(encode_scored_header(header)) == header
