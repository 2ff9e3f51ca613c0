"""The on-policy barrier: which trajectories make up a step's batch.

    scored headers -> judge -> admitted groups -> (closed) -> batch in (prompt id, sample index) order

With v the step's policy version and d its digest, a header is admitted only if its version is v and its
digest is d; each trajectory id is admitted at most once. The barrier closes when every expected group is
complete or dropped; groups may be added while it is open. A complete group may be set aside: it is not
trained, though nothing is wrong with it. The batch does not depend on the order of arrival: of repeats of a
trajectory the first is kept, and repeats carry the same tokens.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.core.errors import ProtocolError
from paceline.core.ids import Purpose, TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.trajectory import FinishReason, ScoredHeader


class Verdict(enum.Enum):
    """The barrier's judgement of one scored header; the value is the word in the journal."""

    ADMITTED = "admitted"
    DUPLICATE = "duplicate"
    WRONG_VERSION = "wrong_version"
    WRONG_DIGEST = "wrong_digest"
    UNKNOWN = "unknown"
    ABORTED = "aborted"
    REWARD_ERROR = "reward_error"
    GROUP_DROPPED = "group_dropped"


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedGroup:
    """A prompt group that is not trained, and why."""

    prompt_id: int
    reason: str
    message: str


class Barrier:
    """Collects the groups of one step.

    Args:
        step, purpose: which collection this is; headers of another are UNKNOWN.
        policy: the only policy whose tokens are admitted.
        expected: number of samples of each prompt id.
        with_greedy: whether each group also needs a greedy answer, which is no row of the batch.
    """

    def __init__(
        self,
        *,
        step: int,
        purpose: Purpose,
        policy: PolicyTag,
        expected: Mapping[int, int],
        with_greedy: bool = False,
    ) -> None:
        self.step, self.purpose, self.policy = step, purpose, policy
        self._expected = dict(expected)
        self._num_greedy = int(with_greedy)
        self._admitted: dict[TrajectoryId, ScoredHeader] = {}
        self._num_admitted = Counter[int]()
        self._dropped: dict[int, DroppedGroup] = {}
        self._aside: set[int] = set()
        self._open = set(self._expected)
        self.verdicts = Counter[Verdict]()

    def expect(self, further: Mapping[int, int]) -> None:
        """Adds groups, samples by prompt id; raises ProtocolError for a prompt that is already expected."""
        known = sorted(further.keys() & self._expected.keys())
        if known:
            raise ProtocolError(f"prompt {known[0]} is asked for twice in step {self.step}")
        self._expected.update(further)
        self._open.update(further)

    @property
    def closed(self) -> bool:
        """Whether every group is complete or dropped."""
        return not self._open

    @property
    def num_admitted(self) -> int:
        """Trajectories admitted so far, including those of groups that were dropped later."""
        return len(self._admitted)

    @property
    def num_wanted(self) -> int:
        """Trajectories that all groups together need."""
        return sum(self._expected.values()) + self._num_greedy * len(self._expected)

    @property
    def num_groups(self) -> int:
        """Groups expected so far, including those that were dropped or set aside."""
        return len(self._expected)

    @property
    def missing(self) -> list[int]:
        """Prompt ids of the groups that are neither complete nor dropped, ascending."""
        return sorted(self._open)

    @property
    def dropped(self) -> list[DroppedGroup]:
        """The groups dropped so far, by prompt id."""
        return [self._dropped[prompt_id] for prompt_id in sorted(self._dropped)]

    def judge(self, header: ScoredHeader) -> Verdict:
        """The verdict on `header`. Changes nothing, so that the journal can be written first."""
        key = header.trajectory_id
        if header.policy.version != self.policy.version:
            return Verdict.WRONG_VERSION
        if header.policy.digest != self.policy.digest:
            return Verdict.WRONG_DIGEST
        if key.step != self.step or not 0 <= key.sample_index < self._num_wanted(key):
            return Verdict.UNKNOWN
        if key.prompt_id in self._dropped or key.prompt_id in self._aside:
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
            if self._num_admitted[prompt_id] == self._expected[prompt_id] + self._num_greedy:
                self._open.discard(prompt_id)
        elif verdict is Verdict.REWARD_ERROR and header.reward_error is not None:
            kind, message = header.reward_error
            self.drop(prompt_id, reason=f"reward:{kind}", message=message)

    def drop(self, prompt_id: int, *, reason: str, message: str) -> None:
        """Drops a group; its trajectories, admitted or still to come, are not trained."""
        self._dropped.setdefault(prompt_id, DroppedGroup(prompt_id=prompt_id, reason=reason, message=message))
        self._open.discard(prompt_id)

    def set_aside(self, prompt_id: int) -> None:
        """Excludes a complete group from training; raises ProtocolError for any other."""
        if not self.is_complete(prompt_id):
            raise ProtocolError(
                f"prompt {prompt_id} of step {self.step} is not complete: it cannot be set aside"
            )
        self._aside.add(prompt_id)

    def is_complete(self, prompt_id: int) -> bool:
        """Whether a group has all its samples, and is neither dropped nor set aside."""
        settled = prompt_id in self._expected and prompt_id not in self._open
        return settled and prompt_id not in self._dropped and prompt_id not in self._aside

    def group(self, prompt_id: int) -> list[ScoredHeader]:
        """The admitted headers of a group, by sample index; a greedy answer comes first."""
        keys = sorted(key for key in self._keys_of(prompt_id) if key in self._admitted)
        return [self._admitted[key] for key in keys]

    def batch(self) -> list[ScoredHeader]:
        """The headers of the groups to train, in (prompt id, sample index) order.

        Raises:
            ProtocolError: the barrier is still open.
        """
        if not self.closed:
            raise ProtocolError(
                f"the barrier of step {self.step} is still open for {len(self._open)} prompt groups"
            )
        return self._samples(lambda prompt_id: prompt_id not in self._aside)

    def aside(self) -> list[ScoredHeader]:
        """The samples of groups that were set aside, in the same order."""
        return self._samples(lambda prompt_id: prompt_id in self._aside)

    def greedy(self) -> dict[int, ScoredHeader]:
        """The greedy answers of groups that were not dropped, by prompt id."""
        return {
            key.prompt_id: self._admitted[key]
            for key in sorted(self._admitted)
            if key.purpose == Purpose.GREEDY.value and key.prompt_id not in self._dropped
        }

    def _samples(self, wanted: Callable[[int], bool]) -> list[ScoredHeader]:
        """Admitted headers of groups that were not dropped, but for greedy answers, in batch order."""
        return [
            self._admitted[key]
            for key in sorted(self._admitted)
            if key.purpose == self.purpose.value
            and key.prompt_id not in self._dropped
            and wanted(key.prompt_id)
        ]

    def _num_wanted(self, key: TrajectoryId) -> int:
        """How many of a trajectory's kind its group wants."""
        if key.prompt_id not in self._expected:
            return 0
        if key.purpose == self.purpose.value:
            return self._expected[key.prompt_id]
        return self._num_greedy if key.purpose == Purpose.GREEDY.value else 0

    def _keys_of(self, prompt_id: int) -> list[TrajectoryId]:
        counts = {self.purpose: self._expected[prompt_id], Purpose.GREEDY: self._num_greedy}
        return [
            TrajectoryId(step=self.step, purpose=purpose.value, prompt_id=prompt_id, sample_index=index)
            for purpose, count in counts.items()
            for index in range(count)
        ]
