"""Scored headers for tests."""

from __future__ import annotations

from paceline.core.ids import Purpose, TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import FinishReason, ScoredHeader
from paceline.wire import blob_digest

POLICY = PolicyTag(version=3, digest="00000000000000aa")


def scored(
    prompt_id: int,
    sample_index: int = 0,
    *,
    step: int = 4,
    purpose: Purpose = Purpose.TRAIN,
    policy: PolicyTag = POLICY,
    reward: float | None = 1.0,
    reward_error: tuple[str, str] | None = None,
    finish_reason: FinishReason = FinishReason.STOP,
    server_id: str = "rollout-0",
) -> ScoredHeader:
    """One header; with `reward_error` the reward is none."""
    return ScoredHeader(
        run_id="r",
        trajectory_id=TrajectoryId(
            step=step, purpose=purpose.value, prompt_id=prompt_id, sample_index=sample_index
        ),
        policy=policy,
        blob_key=f"b:{prompt_id}:{sample_index}:{server_id}",
        blob_digest=blob_digest(f"{prompt_id}:{sample_index}:{server_id}".encode()),
        num_prompt_tokens=4,
        num_response_tokens=2,
        num_sampled_tokens=2,
        finish_reason=finish_reason,
        server_id=server_id,
        generation_s=0.1,
        reward=None if reward_error else reward,
        components={},
        reward_error=reward_error,
        scorer="test",
        reward_s=0.0,
    )
