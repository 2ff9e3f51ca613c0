"""The messages between the services: prompt groups, trajectories and their headers.

A trajectory's arrays travel in a blob beside a small header (claim check). The controller and the scheduling
of rewards see only headers, and each learner rank fetches only the rows that it trains on.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyRange, PolicyTag
from paceline.core.samples.episode import EpisodeOutcome
from paceline.core.samples.expert_choices import ExpertChoices
from paceline.core.samples.images import Image
from paceline.core.samples.normalizing import Part

SCHEMA_VERSION = 6

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]


class FinishReason(enum.Enum):
    """Says why a response ended where it did."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSpec:
    """Says how the tokens of a response are drawn.

    `temperature` 0 is greedy; `max_tokens` bounds the response.
    """

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardContext:
    """What a scorer needs besides the response; it travels with the prompt and with each trajectory.

    `val_set` names the set of data.val_sets to which the prompt belongs; "" for all other prompts.
    """

    ground_truth: str
    data_source: str = ""
    prompt_text: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)
    val_set: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptGroup:
    """An order for `len(seeds)` samples of one prompt, drawn from exactly the policy `policy`.

    `messages` are the chat messages from which the prompt was rendered. If there are any, each sample is an
    episode of several turns, otherwise a single answer. `images` are in the order of their placeholders, of
    which `prompt_token_ids` holds one per token of an image.
    """

    run_id: str
    step: int
    purpose: str
    prompt_id: int
    prompt_token_ids: Int32Array
    sampling: SamplingSpec
    seeds: tuple[int, ...]
    policy: PolicyTag
    context: RewardContext
    messages: tuple[Mapping[str, object], ...] = ()
    images: tuple[Image, ...] = ()

    @property
    def num_samples(self) -> int:
        """Number of samples to draw for this prompt."""
        return len(self.seeds)

    def trajectory_id(self, sample_index: int) -> TrajectoryId:
        """Returns the id of one of the samples."""
        return TrajectoryId(
            step=self.step, purpose=str(self.purpose), prompt_id=self.prompt_id, sample_index=sample_index
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """One sample with its arrays. Its origin and time are in the header, so equal samples have equal blobs.

    Shapes: `prompt_token_ids` (P,), the three response arrays (R,) with R >= 1. A response is all that
    follows the prompt: `response_mask` is 1 on tokens that the policy sampled, 0 on those of its environment,
    such as a tool's answer. `response_log_probs` are natural logs under the distribution that was sampled
    from, and 0.0 where the mask is 0. Consecutive sampled tokens belong to one turn.

    A trajectory whose history was rewritten has further segments. Each is a separate sequence that begins
    with a prompt and does not see the tokens before it; `segment_starts` are the positions in the response
    where segments begin.

    `images` are the prompt's. A placeholder in the response is a token like any other.

    `policy` sampled the first token. If it did not sample all tokens, `ranges` say which policy sampled which
    ones.

    `expert_choices` are those of the engine for all P + R tokens, with `actor.router_replay`. The last token
    of a sequence has none, because the engine never computes it.
    """

    run_id: str
    trajectory_id: TrajectoryId
    policy: PolicyTag
    prompt_token_ids: Int32Array
    response_token_ids: Int32Array
    response_log_probs: Float32Array
    response_mask: UInt8Array
    finish_reason: FinishReason
    sampling: SamplingSpec
    seed: int
    segment_starts: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()
    ranges: tuple[PolicyRange, ...] = ()
    expert_choices: ExpertChoices | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartialSample:
    """Response tokens of a sample that is not delivered yet, from token `first` on.

    `token_ids` and `log_probs` are (T,) with T >= 1. `ranges` count from the response's first token, as in
    `Trajectory.ranges`, and cover [first, end).
    """

    sample_index: int
    seed: int
    first: int
    token_ids: Int32Array
    log_probs: Float32Array
    ranges: tuple[PolicyRange, ...]

    @property
    def end(self) -> int:
        """The position in the response after the last of these tokens."""
        return self.first + len(self.token_ids)

    def joined(self, later: PartialSample) -> PartialSample:
        """Returns these tokens and the later ones as one."""
        last, begins = self.ranges[-1], later.ranges[0]
        ranges = (*self.ranges, *later.ranges)
        if last.policy == begins.policy and last.end == begins.first:
            ranges = (*self.ranges[:-1], replace(last, end=begins.end), *later.ranges[1:])
        return replace(
            self,
            token_ids=np.concatenate([self.token_ids, later.token_ids]),
            log_probs=np.concatenate([self.log_probs, later.log_probs]),
            ranges=ranges,
        )


def sampled_spans(mask: UInt8Array) -> list[tuple[int, int]]:
    """Returns the first token and the end of each turn, by `Trajectory.response_mask`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask != 0, [0]])))
    return [(int(first), int(stop)) for first, stop in edges.reshape(-1, 2)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleHeader:
    """The part of a sample that the mailboxes carry, scored or not; the arrays are in the blob `blob_key`.

    `policy` and `ranges` are the trajectory's.
    `blob_digest` is a digest of the blob's bytes, by which a reader recognises the right blob.
    `num_sampled_tokens` counts the response tokens that the policy sampled, `num_patches` the patches of the
    prompt's images. `episode` is None for a single answer.
    """

    run_id: str
    trajectory_id: TrajectoryId
    policy: PolicyTag
    blob_key: str
    blob_digest: str
    num_prompt_tokens: int
    num_response_tokens: int
    num_sampled_tokens: int
    finish_reason: FinishReason
    server_id: str
    episode: EpisodeOutcome | None = None
    num_patches: int = 0
    ranges: tuple[PolicyRange, ...] = ()

    @property
    def policy_ranges(self) -> tuple[PolicyRange, ...]:
        """Which policies sampled which response tokens; a single range if one policy sampled all."""
        return self.ranges or (PolicyRange(self.policy, 0, self.num_response_tokens),)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryHeader(SampleHeader):
    """Adds what scorers need: the reward context, and how long the generation took."""

    seconds: float
    context: RewardContext


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredHeader(SampleHeader):
    """A trajectory's header with its reward, and without the reward context, which only scorers need.

    Exactly one of `reward` and `reward_error` is set. `reward_error` is (RewardErrorKind value, message).
    `text_key` names the blob with the response's text in UTF-8; "" if none was stored. `token_rewards` are
    (position, part): parts of the reward that belong to response tokens before the last. `normalized` are the
    parts of `reward` that are normalised over the batch (`paceline.core.samples.normalizing`).
    `teacher_digest` is the digest of the blob with a served teacher's likeliest tokens; "" if none was asked.
    """

    generation_s: float
    reward: float | None
    components: Mapping[str, float]
    reward_error: tuple[str, str] | None
    scorer: str
    reward_s: float
    text_key: str = ""
    token_rewards: tuple[tuple[int, float], ...] = ()
    normalized: tuple[Part, ...] = ()
    teacher_digest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRefusal:
    """Why a prompt group gets no samples: it cannot be served, or was given up after several deliveries.

    `reason` is a short stable word, `message` a sentence; `deliveries` counts how often the group was taken.
    """

    run_id: str
    step: int
    purpose: str
    prompt_id: int
    policy: PolicyTag
    server_id: str
    reason: str
    message: str
    deliveries: int
