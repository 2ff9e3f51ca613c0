"""Trajectories with their blobs, as a rollout server leaves them in the mailbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.broker import Outgoing, names
from paceline.core.ids import Purpose, TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.samples.episode import EpisodeOutcome
from paceline.core.samples.trajectory import (
    FinishReason,
    RewardContext,
    SamplingSpec,
    Trajectory,
    TrajectoryHeader,
)
from paceline.wire import blob_digest, encode_trajectory, encode_trajectory_header

POLICY = PolicyTag(version=3, digest="00000000000000aa")


def finished_sample(
    run_id: str,
    prompt_id: int,
    response_token_ids: Sequence[int],
    *,
    sample_index: int = 0,
    step: int = 4,
    ground_truth: str = "",
    extra: Mapping[str, object] | None = None,
    traceparent: str = "",
    mask: Sequence[int] = (),
    episode: EpisodeOutcome | None = None,
    num_patches: int = 0,
    val_set: str = "",
    purpose: Purpose = Purpose.TRAIN,
    segment_starts: Sequence[int] = (),
) -> Outgoing:
    """The message, its blob included, that a rollout server appends for one sample."""
    trajectory_id = TrajectoryId(
        step=step, purpose=purpose.value, prompt_id=prompt_id, sample_index=sample_index
    )
    response = np.asarray(response_token_ids, dtype=np.int32)
    sampled = np.asarray(mask or [1] * len(response), dtype=np.uint8)
    trajectory = Trajectory(
        run_id=run_id,
        trajectory_id=trajectory_id,
        policy=POLICY,
        prompt_token_ids=np.asarray([1, 2, 3], dtype=np.int32),
        response_token_ids=response,
        response_log_probs=np.where(sampled, np.float32(-0.5), np.float32(0.0)),
        response_mask=sampled,
        finish_reason=FinishReason.STOP,
        sampling=SamplingSpec(temperature=1.0, max_tokens=16),
        seed=7,
        segment_starts=tuple(segment_starts),
    )
    blob = encode_trajectory(trajectory)
    key = names.blob(run_id, str(trajectory_id), "rollout-0", "0")
    header = TrajectoryHeader(
        run_id=run_id,
        trajectory_id=trajectory_id,
        policy=POLICY,
        blob_key=key,
        blob_digest=blob_digest(blob),
        num_prompt_tokens=3,
        num_response_tokens=len(response),
        num_sampled_tokens=int(sampled.sum()),
        finish_reason=FinishReason.STOP,
        server_id="rollout-0",
        seconds=0.25,
        context=RewardContext(
            ground_truth=ground_truth,
            data_source="test",
            prompt_text="how many?",
            extra=extra or {},
            val_set=val_set,
        ),
        episode=episode,
        num_patches=num_patches,
    )
    return Outgoing(
        stream=names.trajectories(run_id),
        payload=encode_trajectory_header(header),
        traceparent=traceparent,
        blobs={key: blob},
    )
