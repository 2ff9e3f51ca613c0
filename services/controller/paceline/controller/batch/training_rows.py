"""The rows of a training step: those of one sampling, or those that a dataflow chose from several.

samplings -> note -> choose -> rows for the learner, one batch for metrics, guard and files
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.controller.batch.barrier import Verdict
from paceline.controller.batch.collected_batch import Batch
from paceline.controller.batch.dispatch import Order
from paceline.core.errors import ConfigError, DataError
from paceline.core.ids import NEVER_TRAINED, Purpose, TrajectoryId
from paceline.core.samples.trajectory import ScoredHeader
from paceline.core.training import BatchRow
from paceline.data.samples import ScoredSample, ScoredSamples


class TrainingRows:
    """The samples of a step's samplings, and the rows of those that are trained.

    Attributes:
        batch: all samplings as one; its samples are those that are trained, once they are chosen.
    """

    def __init__(self) -> None:
        self._batches: list[Batch] = []
        self._known: dict[TrajectoryId, ScoredSample] = {}
        self._asked: set[tuple[str, int]] = set()
        self._plain: tuple[BatchRow, ...] = ()
        self.batch: Batch

    def reserve(self, order: Order) -> None:
        """Notes a sampling's request; raises ConfigError if an earlier sampling had the same."""
        for ask in order.asks:
            keys = {(str(ask.purpose), prompt_id) for prompt_id in order.prompts}
            if again := keys & self._asked:
                raise ConfigError(
                    f"the dataflow samples prompt {min(again)[1]} twice for {ask.purpose!r} in step "
                    f"{order.step}; name another purpose, which gives other samples"
                )
            self._asked |= keys

    def note(self, batch: Batch, samples: ScoredSamples) -> None:
        """Takes the samples of a sampling that is complete."""
        self._batches.append(batch)
        for sample in (*samples, *(s for beside in samples.beside.values() for s in beside)):
            self._known[sample.header.trajectory_id] = sample
        self._plain = rows(batch) if len(self._batches) == 1 else ()

    def choose(self, samples: Iterable[ScoredSample]) -> tuple[tuple[BatchRow, ...], list[Any] | None]:
        """Makes the rows of the samples to train, by (prompt id, purpose, sample index).

        Returns:
            The rows, and how the journal lists them; None if they are all samples of one sampling, unchanged.

        Raises:
            ConfigError: a sample occurs twice, is not of this step or may not be trained.
            DataError: there are no samples.
        """
        chosen: dict[TrajectoryId, ScoredSample] = {}
        for sample in samples:
            key = sample.header.trajectory_id
            self._check(key, sample, chosen)
            chosen[key] = sample
        if not chosen:
            raise DataError("the dataflow trains no sample; choose at least one of the step's samples")
        ordered = sorted(chosen.values(), key=lambda s: s.header.trajectory_id.place)
        made = tuple(_sample_row(sample) for sample in ordered)
        self.batch = _merged(self._batches, [_header(sample) for sample in ordered])
        return made, None if made == self._plain else [_listed(sample) for sample in ordered]

    def _check(
        self, key: TrajectoryId, sample: ScoredSample, chosen: Mapping[TrajectoryId, ScoredSample]
    ) -> None:
        known = self._known.get(key)
        if known is None or known.header is not sample.header:
            raise ConfigError(f"the dataflow trains {key}, which is no sample of this step")
        if key in chosen:
            raise ConfigError(f"the dataflow trains {key} twice; each sample is trained once")
        if key.purpose in NEVER_TRAINED:
            raise ConfigError(
                f"the dataflow trains {key}, and samples for {key.purpose!r} are never trained; sample for "
                "a purpose of another name"
            )
        baseline = 0.0 if sample.baseline is None else sample.baseline
        if not (math.isfinite(sample.reward) and math.isfinite(baseline)):
            raise ConfigError(
                f"the dataflow gives {key} the reward {sample.reward} and the baseline {baseline}; give "
                "finite ones"
            )


def _merged(batches: Sequence[Batch], samples: Sequence[ScoredHeader]) -> Batch:
    """Returns all samplings of a step as one batch with these samples."""
    extra = [batch.num_extra for batch in batches if batch.num_extra is not None]
    beside: dict[str, list[ScoredHeader]] = {}
    for batch in batches:
        for purpose, headers in batch.beside.items():
            beside.setdefault(purpose, []).extend(headers)
    return Batch(
        samples=samples,
        dropped=[group for batch in batches for group in batch.dropped],
        verdicts=sum((batch.verdicts for batch in batches), Counter[Verdict]()),
        num_groups=sum(batch.num_groups for batch in batches),
        beside=beside,
        set_aside=[header for batch in batches for header in batch.set_aside],
        num_extra=sum(extra) if extra else None,
        gen_s=sum(batch.gen_s for batch in batches),
        reward_s=sum(batch.reward_s for batch in batches),
        wait_s=sum(batch.wait_s for batch in batches),
    )


def _header(sample: ScoredSample) -> ScoredHeader:
    """Returns the sample's header as metrics and files show it."""
    return replace(sample.header, reward=sample.reward) if sample.is_given else sample.header


def _listed(sample: ScoredSample) -> list[Any]:
    """Returns a row as the journal lists it: the id, the reward if the dataflow gave it, the baseline."""
    reward = sample.reward if sample.is_given else None
    return [str(sample.header.trajectory_id), reward, sample.baseline]


def _sample_row(sample: ScoredSample) -> BatchRow:
    row = _row(sample.header, sample.baseline, sample.num_baseline_tokens)
    # A reward that the dataflow gave has no parts.
    return replace(row, reward=sample.reward, token_rewards=()) if sample.is_given else row


def rows(batch: Batch) -> tuple[BatchRow, ...]:
    """Returns all samples of a batch as rows, in batch order, with their greedy answers as baselines."""
    greedy = batch.greedy
    return tuple(_against(header, greedy.get(header.trajectory_id.prompt_id)) for header in batch.samples)


def group_rows(group: Sequence[ScoredHeader]) -> list[BatchRow]:
    """Returns the rows of a complete prompt group, without its greedy answer."""
    greedy = next((h for h in group if h.trajectory_id.purpose == Purpose.GREEDY), None)
    return [_against(header, greedy) for header in group if header is not greedy]


def _against(header: ScoredHeader, greedy: ScoredHeader | None) -> BatchRow:
    if greedy is None:
        return _row(header, None, 0)
    return _row(header, greedy.reward or 0.0, greedy.num_sampled_tokens)


def _row(header: ScoredHeader, baseline: float | None, num_baseline_tokens: int) -> BatchRow:
    return BatchRow(
        trajectory_id=header.trajectory_id,
        blob_key=header.blob_key,
        blob_digest=header.blob_digest,
        reward=header.reward or 0.0,
        num_prompt_tokens=header.num_prompt_tokens,
        num_response_tokens=header.num_response_tokens,
        num_sampled_tokens=header.num_sampled_tokens,
        greedy_score=baseline,
        token_rewards=header.token_rewards,
        num_patches=header.num_patches,
        num_greedy_tokens=num_baseline_tokens,
        teacher_digest=header.teacher_digest,
    )
