"""One collection of a step, from the journal: which trajectories came in and how each prompt ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.rows.trajectory_row import Admissions
from paceline.core.ids import Purpose, TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.samples.normalizing import Part, Scale, normalized, scales
from paceline.core.training import BatchRow

_TRAIN, _GREEDY = Purpose.TRAIN.value, Purpose.GREEDY.value
_CALLED = {_TRAIN: "samples", _GREEDY: "greedy answers"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The request of a sampling: the step's dispatch, or a later request of its dataflow."""

    entry: JournalEntry
    step: int
    policy: str
    prompts: tuple[int, ...]
    counts: Mapping[str, int]

    @classmethod
    def of(cls, entry: JournalEntry, num_samples: int) -> Wanted:
        """Reads an event `dispatch` or `sampling`; `num_samples` applies if the event names no number."""
        older = {_TRAIN: num_samples} | ({_GREEDY: 1} if entry.get("greedy") else {})
        return cls(
            entry=entry,
            step=int(entry["step"]),
            policy=str(entry["policy"]),
            prompts=tuple(entry["prompts"]),
            counts=entry.get("samples", older),
        )

    @property
    def purpose(self) -> str:
        """The purpose of the samples that form the batch."""
        return next(iter(self.counts), _TRAIN)

    @property
    def num_samples(self) -> int:
        """Number of samples of that purpose per prompt."""
        return self.counts.get(self.purpose, 0)

    @property
    def tag(self) -> PolicyTag:
        """The policy as version and digest."""
        return PolicyTag.parse(self.policy)


class Collection:
    """Admissions, drops and refills of one collection.

    Attributes:
        prompts: the prompts that were requested so far.
        verdicts: how often each verdict was given.
    """

    def __init__(self, wanted: Wanted, findings: Findings) -> None:
        self.wanted, self._findings = wanted, findings
        self.prompts = set(wanted.prompts)
        self._left_out: dict[int, JournalEntry] = {}
        self._admissions = Admissions()
        self.admitted = self._admissions.entries
        self._counts = Counter[tuple[int, str]]()
        self.verdicts = Counter[str]()

    @property
    def drop_reasons(self) -> list[str]:
        """The reason of each dropped prompt."""
        left_out = self._left_out.values()
        return [str(entry.get("reason")) for entry in left_out if entry.kind == "group_dropped"]

    def admit(self, key: TrajectoryId, entry: JournalEntry) -> None:
        """Notes a trajectory that was admitted."""
        wanted, findings = self.wanted, self._findings
        if key.step != wanted.step:
            findings.i1(f"{key} was admitted in step {wanted.step}", wanted.entry, entry)
        is_new = self._admissions.add(key, entry, findings)
        if key.prompt_id not in self.prompts:
            findings.i2(
                f"{key} was admitted, but step {wanted.step} did not ask for prompt {key.prompt_id}", entry
            )
        if is_new:
            num_wanted = wanted.counts.get(key.purpose, 0)
            self._counts[key.prompt_id, key.purpose] += int(0 <= key.sample_index < num_wanted)

    def drop(self, entry: JournalEntry) -> None:
        """Notes a prompt group that was dropped."""
        self._leave_out(int(entry["prompt"]), "dropped", entry)

    def refill(self, entry: JournalEntry) -> None:
        """Notes groups that were set aside, and the prompts in their places."""
        for prompt, _ in entry["set_aside"]:
            self._leave_out(int(prompt), "set aside", entry)
            count, wanted = self._counts[prompt, self.wanted.purpose], self.wanted.num_samples
            if count != wanted:
                self._findings.i2(
                    f"prompt {prompt} of step {self.wanted.step} was set aside with {count} of {wanted} "
                    "samples",
                    entry,
                )
        for prompt in entry["prompts"]:
            if prompt in self.prompts:
                self._findings.i2(
                    f"prompt {prompt} was asked for twice in step {self.wanted.step}",
                    self.wanted.entry,
                    entry,
                )
            self.prompts.add(prompt)

    def close(self, entry: JournalEntry) -> list[int]:
        """Returns the prompts that are trained on, ascending; notes prompts whose end the journal lacks."""
        trained = sorted(self.prompts - self._left_out.keys())
        first = len(self.wanted.prompts)
        if len(trained) > first:
            self._findings.i2(
                f"step {self.wanted.step} trained {len(trained)} prompts, more than the {first} that it "
                "began with",
                self.wanted.entry,
                entry,
            )
        for prompt in trained:
            self._check_complete(prompt, entry)
        return trained

    def rewards(self, prompts: Iterable[int]) -> dict[TrajectoryId, float]:
        """Returns the rewards of these prompts' samples, made of normalised parts."""
        chosen, purpose = set(prompts), self.wanted.purpose
        keys = [key for key in sorted(self.admitted) if key.prompt_id in chosen]
        by_name = scales(_parts(self.admitted[key]) for key in keys if key.purpose == purpose)
        return {key: _reward(self.admitted[key], by_name) for key in keys}

    def rows(self, prompts: Iterable[int]) -> Iterator[BatchRow]:
        """Yields all samples of these prompts as rows, in batch order, with greedy answers as baselines."""
        rewards = self.rewards(prompts)
        for key, reward in rewards.items():
            if key.purpose == self.wanted.purpose:
                greedy = replace(key, purpose=_GREEDY, sample_index=0)
                yield trained_row(key, self.admitted[key], reward, rewards.get(greedy))

    def asks_for(self, key: TrajectoryId) -> bool:
        """Returns whether the sampling wants this sample."""
        count = self.wanted.counts.get(key.purpose, 0)
        return key.prompt_id in self.prompts and 0 <= key.sample_index < count

    def _check_complete(self, prompt: int, entry: JournalEntry) -> None:
        wanted = self.wanted
        for purpose, needed in wanted.counts.items():
            count, what = self._counts[prompt, purpose], _CALLED.get(purpose, f"samples for {purpose}")
            if count != needed:
                self._findings.i2(
                    f"prompt {prompt} of step {wanted.step} was trained with {count} of {needed} {what}",
                    wanted.entry,
                    entry,
                )

    def _leave_out(self, prompt: int, how: str, entry: JournalEntry) -> None:
        step = self.wanted.step
        if not entry.get("reason"):
            self._findings.i2(f"prompt {prompt} of step {step} was {how} without a reason", entry)
        if prompt not in self.prompts:
            self._findings.i2(
                f"prompt {prompt} was {how} in step {step}, which did not ask for it",
                self.wanted.entry,
                entry,
            )
        if prompt in self._left_out:
            self._findings.i2(
                f"prompt {prompt} of step {step} was {how}, but was already left out",
                self._left_out[prompt],
                entry,
            )
        self._left_out.setdefault(prompt, entry)


def trained_row(key: TrajectoryId, entry: JournalEntry, reward: float, baseline: float | None) -> BatchRow:
    """Returns the row of an admitted trajectory, with the fields that enter the digest of a batch."""
    return BatchRow(
        trajectory_id=key,
        blob_key="",
        blob_digest=str(entry.get("digest")),
        reward=reward,
        num_prompt_tokens=1,
        num_response_tokens=1,
        num_sampled_tokens=1,
        greedy_score=baseline,
        token_rewards=tuple((int(at), float(part)) for at, part in entry.get("token_rewards") or ()),
        teacher_digest=str(entry.get("teacher") or ""),
    )


def _parts(entry: JournalEntry) -> list[Part]:
    return [(str(name), float(value), float(weight)) for name, value, weight in entry.get("normalized") or ()]


def _reward(entry: JournalEntry, by_name: Mapping[str, Scale]) -> float:
    return normalized(float(entry.get("reward") or 0.0), _parts(entry), by_name)
