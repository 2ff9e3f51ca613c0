"""A training step as controller and learner exchange it: the rows of its batch, orders, and the result."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.core.guard import Adjustments, Reading
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyTag

DIGEST_BYTES = 16
"""Length of the digests of batches and blobs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRow:
    """One trajectory of the batch: where its arrays are, how long it is, and its score.

    Attributes:
        blob_digest: digest of the blob's bytes (`paceline.core.digest`).
        reward: sum of the weighted reward components.
        num_sampled_tokens: response tokens that the policy sampled; the others are its environment's.
        greedy_score: reward of the greedy answer to the same prompt; None if none was sampled.
        token_rewards: (position, part) for parts of the reward that belong to tokens before the last.
        num_patches: number of patches of the prompt's images.
        num_greedy_tokens: tokens that the policy sampled for the greedy answer; 0 without one.
        teacher_digest: digest of the blob with the served teacher's likeliest tokens; "" without a teacher.
    """

    trajectory_id: TrajectoryId
    blob_key: str
    blob_digest: str
    reward: float
    num_prompt_tokens: int
    num_response_tokens: int
    num_sampled_tokens: int
    greedy_score: float | None = None
    token_rewards: tuple[tuple[int, float], ...] = ()
    num_patches: int = 0
    num_greedy_tokens: int = 0
    teacher_digest: str = ""


def batch_digest(policy: PolicyTag, rows: Iterable[BatchRow]) -> str:
    """Identifies a batch: BLAKE2b of the policy and of each row's trajectory, blob digests and scores.

    Returns:
        32 hexadecimal digits; equal for batches that train alike, even if the keys of their blobs differ.
    """
    digest = hashlib.blake2b(f"{policy}\n".encode(), digest_size=DIGEST_BYTES)
    for row in rows:
        greedy_score = None if row.greedy_score is None else float(row.greedy_score)
        fields = [str(row.trajectory_id), row.blob_digest, repr(float(row.reward)), repr(greedy_score)]
        fields += [f"{position}:{float(part)!r}" for position, part in row.token_rewards]
        fields += [f"teacher:{row.teacher_digest}"] if row.teacher_digest else []
        digest.update("\t".join(fields).encode() + b"\n")
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOrder:
    """Asks for training step `step`, counted from 1, on rows that were all sampled from `policy`.

    The step trains version `step` - 1; strictly on policy, this is the version of `policy`.

    Attributes:
        rows: ordered by (prompt id, sample index).
        adjustments: the guard's changes to the configuration.
        digest: digest of policy and rows, see `batch_digest`; it identifies a repeated order.
    """

    step: int
    policy: PolicyTag
    rows: tuple[BatchRow, ...]
    adjustments: Adjustments = field(default_factory=Adjustments)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", batch_digest(self.policy, self.rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkOrder:
    """Asks for the work ahead on a chunk of step `step`, whose batch is not complete yet.

    Attributes:
        first_row: index of the first row in the batch, if no group before it is dropped.
        rows: rows of the chunk, ordered as in the batch.
        with_gradient: whether to compute the gradient, too, once the chunks before it have theirs.
        adjustments: the guard's changes to the configuration for that step.
    """

    step: int
    policy: PolicyTag
    first_row: int
    rows: tuple[BatchRow, ...]
    with_gradient: bool = False
    adjustments: Adjustments = field(default_factory=Adjustments)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """The result of a training step; the same on every rank, apart from timings.

    Attributes:
        skip_reasons: why optimizer steps were skipped, one entry per skipped step.
        readings: the guard's numbers, the worst of each rule and network.
    """

    step: int
    metrics: dict[str, float]
    skip_reasons: tuple[str, ...] = ()
    readings: tuple[Reading, ...] = ()
