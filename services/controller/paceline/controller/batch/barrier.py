"""The on-policy barrier: which trajectories make up a step's batch.

    scored headers -> judge -> admitted groups -> (closed) -> batch in (prompt id, sample index) order

With v the version that the step samples from and d its digest, a header is admitted only if its version is v
and its digest is d; each trajectory id is admitted at most once. Step s trains version s - 1. Strictly on
policy, v is s - 1; with a bound of k (`barrier.max_staleness`), v is at least s - 1 - k. Where pushes land in
mid-answer (`rollout.in_flight`), each range of a header's tokens is of a committed version from v to s - 1.

A sample is settled when it is admitted or has failed: its reward could not be computed, or its group was
refused. The barrier closes when every sample is settled; only then are the groups with failed samples
dropped. If a good copy of a failed sample arrives before that, the copy is admitted. Groups may be added
while the barrier is open. A complete group may be set aside: it is valid but not trained on. The batch does
not depend on the order of arrival: the first copy of a trajectory is kept, and all copies carry the same
tokens.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from paceline.core.errors import ProtocolError
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import FinishReason, ScoredHeader


class Verdict(enum.Enum):
    """The barrier's judgement of one scored header; the value is the word in the journal.

    LOST: a blob store has lost the sample, which counts as not delivered.
    """

    ADMITTED = "admitted"
    DUPLICATE = "duplicate"
    WRONG_VERSION = "wrong_version"
    WRONG_DIGEST = "wrong_digest"
    UNKNOWN = "unknown"
    ABORTED = "aborted"
    REWARD_ERROR = "reward_error"
    LOST = "lost"
    GROUP_DROPPED = "group_dropped"


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedGroup:
    """A prompt group that is not trained on, and the reason."""

    prompt_id: int
    reason: str
    message: str

    @property
    def fields(self) -> dict[str, object]:
        """Its fields in the journal."""
        return {"prompt": self.prompt_id, "reason": self.reason, "message": self.message}


_Failure = tuple[str, str]
"""Reason and message."""


class Barrier:
    """Collects the groups of one step.

    Args:
        step: the step; headers of another step are UNKNOWN.
        policy: the only policy whose tokens are admitted; with `commits`, the oldest such policy.
        max_staleness: most versions by which the policy may be behind the one that the step trains.
        commits: the digests of committed versions, if versions later than `policy` may have sampled, too.
        counts: samples of each prompt by purpose; those of the first purpose are the batch. Headers of
            another purpose are UNKNOWN.
        prompt_counts: counts of single prompts, which replace `counts`.

    Raises:
        ProtocolError: the policy is too far behind.
    """

    def __init__(
        self,
        *,
        step: int,
        policy: PolicyTag,
        counts: Mapping[str, int],
        prompts: Iterable[int],
        prompt_counts: Mapping[int, Mapping[str, int]] | None = None,
        max_staleness: int = 0,
        commits: Mapping[int, str] | None = None,
    ) -> None:
        staleness = policy.staleness_in(step)
        if staleness > max_staleness:
            raise ProtocolError(
                f"step {step} samples from {policy}, {staleness} versions behind the one that it trains; the "
                f"barrier admits at most {max_staleness}"
            )
        self.step, self.policy = step, policy
        self._commits = {policy.version: policy.digest} if commits is None else commits
        self._newest = policy.version if commits is None else max(policy.version, step - 1)
        self._counts = {str(purpose): count for purpose, count in counts.items()}
        self._prompt_counts = prompt_counts or {}
        self.purpose = next(iter(self._counts))
        self._expected = set(prompts)
        self._admitted: dict[TrajectoryId, ScoredHeader] = {}
        self._num_admitted = Counter[int]()
        self._failures: dict[int, dict[TrajectoryId, _Failure]] = {}
        self._aside: set[int] = set()
        self._open = set(self._expected)
        self.verdicts = Counter[Verdict]()

    def expect(self, further: Iterable[int]) -> None:
        """Adds groups by their prompts' ids; raises ProtocolError for a prompt that is already expected."""
        further = set(further)
        known = sorted(further & self._expected)
        if known:
            raise ProtocolError(f"prompt {known[0]} is asked for twice in step {self.step}")
        self._expected.update(further)
        self._open.update(further)

    @property
    def closed(self) -> bool:
        """Whether every sample is settled."""
        return not self._open

    @property
    def num_admitted(self) -> int:
        """Trajectories admitted so far, including those of groups that will be dropped."""
        return len(self._admitted)

    @property
    def num_wanted(self) -> int:
        """Number of trajectories that all groups together need."""
        return sum(self._group_size(prompt_id) for prompt_id in self._expected)

    @property
    def num_groups(self) -> int:
        """Groups expected so far, including those that were dropped or set aside."""
        return len(self._expected)

    @property
    def missing(self) -> list[int]:
        """Prompt ids of the groups with samples that are not settled, ascending."""
        return sorted(self._open)

    @property
    def dropped(self) -> list[DroppedGroup]:
        """The groups with failed samples, by prompt id, each with the reason of the first of them."""
        failed = {p: sorted(failures.items()) for p, failures in sorted(self._failures.items()) if failures}
        return [
            DroppedGroup(prompt_id=prompt_id, reason=failures[0][1][0], message=failures[0][1][1])
            for prompt_id, failures in failed.items()
        ]

    def judge(self, header: ScoredHeader) -> Verdict:
        """Returns the verdict on a trajectory by its header.

        Changes nothing, so that the journal can be written first.
        """
        key = header.trajectory_id
        policies = [part.policy for part in header.policy_ranges]
        if any(not self.policy.version <= policy.version <= self._newest for policy in policies):
            return Verdict.WRONG_VERSION
        if any(policy.digest != self._commits.get(policy.version) for policy in policies):
            return Verdict.WRONG_DIGEST
        counts = self._counts_of(key.prompt_id) if key.prompt_id in self._expected else {}
        if key.step != self.step or not 0 <= key.sample_index < counts.get(key.purpose, 0):
            return Verdict.UNKNOWN
        if key.prompt_id in self._aside:
            return Verdict.GROUP_DROPPED
        if key in self._admitted:
            return Verdict.DUPLICATE
        if header.finish_reason is FinishReason.ABORT:
            return Verdict.ABORTED
        return Verdict.REWARD_ERROR if header.reward_error is not None else Verdict.ADMITTED

    def apply(self, header: ScoredHeader, verdict: Verdict) -> None:
        """Applies a verdict of `judge`."""
        self.verdicts[verdict] += 1
        prompt_id = header.trajectory_id.prompt_id
        if verdict is Verdict.ADMITTED:
            self._admitted[header.trajectory_id] = header
            self._num_admitted[prompt_id] += 1
            self._failures.get(prompt_id, {}).pop(header.trajectory_id, None)
        elif verdict is Verdict.REWARD_ERROR and header.reward_error is not None:
            kind, message = header.reward_error
            self._fail(header.trajectory_id, (f"reward:{kind}", message))
        self._settle(prompt_id)

    def refuse(self, prompt_id: int, purpose: str, *, reason: str, message: str) -> bool:
        """Notes that some samples of a group will not be generated; returns whether they were wanted."""
        if prompt_id not in self._expected or prompt_id in self._aside:
            return False
        keys = [key for key in self._keys_of(prompt_id) if key.purpose == purpose]
        missing = [key for key in keys if key not in self._admitted]
        for key in missing:
            self._fail(key, (reason, message))
        self._settle(prompt_id)
        return bool(missing)

    def _fail(self, key: TrajectoryId, failure: _Failure) -> None:
        failures = self._failures.setdefault(key.prompt_id, {})
        # If a sample fails several times, the smallest reason is kept, so that it does not depend on the
        # order of arrival.
        failures[key] = min(failure, failures.get(key, failure))

    def _settle(self, prompt_id: int) -> None:
        if prompt_id in self._open:
            num_failed = len(self._failures.get(prompt_id, ()))
            if self._num_admitted[prompt_id] + num_failed == self._group_size(prompt_id):
                self._open.discard(prompt_id)

    def set_aside(self, prompt_id: int) -> None:
        """Excludes a complete group from training; raises ProtocolError for any other."""
        if not self.is_complete(prompt_id):
            raise ProtocolError(
                f"prompt {prompt_id} of step {self.step} is not complete: it cannot be set aside"
            )
        self._aside.add(prompt_id)

    def is_complete(self, prompt_id: int) -> bool:
        """Returns whether a group has all its samples and is not set aside."""
        settled = prompt_id in self._expected and prompt_id not in self._open
        return settled and not self._has_failed(prompt_id) and prompt_id not in self._aside

    def _has_failed(self, prompt_id: int) -> bool:
        return bool(self._failures.get(prompt_id))

    def group(self, prompt_id: int) -> list[ScoredHeader]:
        """Returns the admitted headers of a group, by purpose and sample index."""
        keys = sorted(key for key in self._keys_of(prompt_id) if key in self._admitted)
        return [self._admitted[key] for key in keys]

    def batch(self) -> list[ScoredHeader]:
        """Returns the headers of the first purpose in groups to train, in (prompt id, sample index) order.

        Raises:
            ProtocolError: the barrier is still open.
        """
        if not self.closed:
            raise ProtocolError(
                f"the barrier of step {self.step} is still open for {len(self._open)} prompt groups"
            )
        return self._samples(self.purpose, lambda prompt_id: prompt_id not in self._aside)

    def aside(self) -> list[ScoredHeader]:
        """Returns the samples of groups that were set aside, in batch order."""
        return self._samples(self.purpose, lambda prompt_id: prompt_id in self._aside)

    def beside(self) -> dict[str, list[ScoredHeader]]:
        """Returns the headers of the other purposes in groups that were not dropped, in batch order."""
        others = [purpose for purpose in self._counts if purpose != self.purpose]
        return {purpose: self._samples(purpose, lambda prompt_id: True) for purpose in others}

    def _samples(self, purpose: str, wanted: Callable[[int], bool]) -> list[ScoredHeader]:
        """Returns admitted headers of a purpose in groups that were not dropped, in batch order."""
        return [
            self._admitted[key]
            for key in sorted(self._admitted)
            if key.purpose == purpose and not self._has_failed(key.prompt_id) and wanted(key.prompt_id)
        ]

    def _counts_of(self, prompt_id: int) -> Mapping[str, int]:
        return self._prompt_counts.get(prompt_id, self._counts)

    def _group_size(self, prompt_id: int) -> int:
        return sum(self._counts_of(prompt_id).values())

    def _keys_of(self, prompt_id: int) -> list[TrajectoryId]:
        return [
            TrajectoryId(step=self.step, purpose=purpose, prompt_id=prompt_id, sample_index=index)
            for purpose, count in self._counts_of(prompt_id).items()
            for index in range(count)
        ]
