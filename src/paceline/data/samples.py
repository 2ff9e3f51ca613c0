"""Samples with rewards: a dataflow gets them from sampling and passes them to training."""

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
        reward: the reward, from the scorers or from the dataflow.
        text: the response; "" if texts were left out of the sampling.
        baseline: number that `algorithm.adv_estimator: remax` subtracts from the reward; None for none.
        num_baseline_tokens: length of the answer with the baseline score, for `algorithm.overlong`; 0 for
            none.
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
        """The purpose for which it was sampled."""
        return self.header.trajectory_id.purpose

    @property
    def index(self) -> int:
        """The sample's number among those of its prompt and purpose."""
        return self.header.trajectory_id.sample_index

    @property
    def components(self) -> Mapping[str, float]:
        """The parts of the scored reward, by scorer."""
        return self.header.components

    def continued(self, text: str) -> str | list[Mapping[str, object]]:
        """Returns a prompt that continues the sample: its prompt, the sample, and the user's `text`."""
        if not self.prompt.messages:
            return self.prompt.context.prompt_text + self.text + text
        answered = {"role": "assistant", "content": self.text}
        return [*self.prompt.messages, answered, {"role": "user", "content": text}]

    def with_reward(self, reward: float) -> ScoredSample:
        """Returns the same sample with `reward` at its last token."""
        return replace(self, reward=float(reward), is_given=True)

    def with_baseline(self, baseline: float | None) -> ScoredSample:
        """Returns the same sample with another baseline."""
        value = None if baseline is None else float(baseline)
        return replace(self, baseline=value, num_baseline_tokens=0)


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSamples(Sequence[ScoredSample]):
    """The samples of one sampling, by prompt, for its first purpose; `beside` holds those for its others."""

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
        """Returns the samples with baselines: the reward of their prompt's sample in `beside[purpose]`."""
        others = {other.prompt.prompt_id: other for other in self.beside.get(purpose, ())}
        return [_against(sample, others.get(sample.prompt.prompt_id)) for sample in self.samples]


def _against(sample: ScoredSample, other: ScoredSample | None) -> ScoredSample:
    if other is None:
        return sample
    return replace(sample, baseline=other.reward, num_baseline_tokens=other.header.num_sampled_tokens)


def grouped(samples: Iterable[ScoredSample]) -> list[list[ScoredSample]]:
    """Splits samples, ordered by prompt, into a list per prompt."""
    by_prompt: Iterator[tuple[int, Iterator[ScoredSample]]] = groupby(
        samples, key=lambda sample: sample.prompt.prompt_id
    )
    return [list(group) for _, group in by_prompt]
