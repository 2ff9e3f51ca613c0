"""Samples with their rewards, as a dataflow gets them from a sampling and gives them to the training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from paceline.core.samples.trajectory import ScoredHeader
from paceline.data.prompts import Prompt


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredSample:
    """Holds one sample with its score.

    Attributes:
        prompt: what it answers.
        header: its ids, lengths and components.
        reward: as it was scored, or as the dataflow gave it.
        text: the response; "" where the sampling was told to leave texts out.
        baseline: what `algorithm.adv_estimator: remax` subtracts from the reward; None for none.
        num_baseline_tokens: of the answer that scored the baseline, for `algorithm.overlong`; 0 for none.
        is_given: whether the dataflow gave the reward.
    """

    prompt: Prompt
    header: ScoredHeader
    reward: float
    text: str = ""
    baseline: float | None = None
    num_baseline_tokens: int = 0
    is_given: bool = False

    @property
    def purpose(self) -> str:
        """What it was sampled for."""
        return self.header.trajectory_id.purpose

    @property
    def index(self) -> int:
        """Its number among the samples of its prompt and purpose."""
        return self.header.trajectory_id.sample_index

    @property
    def components(self) -> Mapping[str, float]:
        """The parts of the reward that it was scored with, by scorer."""
        return self.header.components

    def continued(self, text: str) -> str | list[Mapping[str, object]]:
        """Returns the prompt that goes on from the sample: its own, the sample, then `text` by the user."""
        if not self.prompt.messages:
            return self.prompt.context.prompt_text + self.text + text
        answered = {"role": "assistant", "content": self.text}
        return [*self.prompt.messages, answered, {"role": "user", "content": text}]

    def with_reward(self, reward: float) -> ScoredSample:
        """Returns the same sample, worth `reward` at its last token."""
        return replace(self, reward=float(reward), is_given=True)

    def with_baseline(self, baseline: float | None) -> ScoredSample:
        """Returns the same sample with another baseline."""
        value = None if baseline is None else float(baseline)
        return replace(self, baseline=value, num_baseline_tokens=0)


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSamples(Sequence[ScoredSample]):
    """The samples of one sampling, by prompt; those of its first purpose, and others in `beside`."""

    samples: Sequence[ScoredSample]
    beside: Mapping[str, Sequence[ScoredSample]] = field(default_factory=dict)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def groups(self) -> list[list[ScoredSample]]:
        """The samples of each prompt."""
        return grouped(self.samples)

    def against(self, purpose: str) -> list[ScoredSample]:
        """Returns the samples with the reward of their prompt's sample in `beside[purpose]` as baseline."""
        others = {other.prompt.prompt_id: other for other in self.beside.get(purpose, ())}
        return [_against(sample, others.get(sample.prompt.prompt_id)) for sample in self.samples]


def _against(sample: ScoredSample, other: ScoredSample | None) -> ScoredSample:
    if other is None:
        return sample
    return replace(sample, baseline=other.reward, num_baseline_tokens=other.header.num_sampled_tokens)


def grouped(samples: Iterable[ScoredSample]) -> list[list[ScoredSample]]:
    """Returns samples, which lie in the order of their prompts, as a list per prompt."""
    by_prompt: Iterator[tuple[int, Iterator[ScoredSample]]] = groupby(
        samples, key=lambda sample: sample.prompt.prompt_id
    )
    return [list(group) for _, group in by_prompt]
