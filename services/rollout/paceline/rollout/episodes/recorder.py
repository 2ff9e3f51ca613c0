"""Records the tokens of an episode: sampled tokens with their log-probs, and the environment's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.core.samples.episode import EpisodeOutcome
from paceline.core.samples.expert_choices import ChoiceArray, joined_choices
from paceline.core.samples.trajectory import FinishReason, Float32Array, Int32Array, UInt8Array
from paceline.rollout.engines.base import Sample


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draw:
    """A finished sample or episode in the form of its trajectory; all arrays but the prompt's are (R,).

    `versions` is that of the `Sample` if the draw is a single answer, and empty for an episode.
    `expert_choices` are those of all tokens, the prompt's included; the last ones may lack.
    """

    prompt_token_ids: Int32Array
    token_ids: Int32Array
    log_probs: Float32Array
    mask: UInt8Array
    finish_reason: FinishReason
    episode: EpisodeOutcome | None = None
    segment_starts: tuple[int, ...] = ()
    versions: tuple[tuple[int, int], ...] = ()
    expert_choices: ChoiceArray | None = None

    @classmethod
    def joined(cls, draws: Sequence[Draw]) -> Draw:
        """Joins the segments of an episode; all prompts but the first become part of the response."""
        first, *others = draws
        token_ids, log_probs, mask = [first.token_ids], [first.log_probs], [first.mask]
        starts, num_tokens = [], len(first.token_ids)
        for other in others:
            prompt = other.prompt_token_ids
            starts.append(num_tokens)
            num_tokens += len(prompt) + len(other.token_ids)
            token_ids += [prompt, other.token_ids]
            log_probs += [np.zeros(len(prompt), dtype=np.float32), other.log_probs]
            mask += [np.zeros(len(prompt), dtype=np.uint8), other.mask]
        return replace(
            draws[-1],
            prompt_token_ids=first.prompt_token_ids,
            token_ids=np.concatenate(token_ids),
            log_probs=np.concatenate(log_probs),
            mask=np.concatenate(mask),
            segment_starts=tuple(starts),
            expert_choices=joined_choices(
                [draw.expert_choices for draw in draws],
                [len(draw.prompt_token_ids) + len(draw.token_ids) for draw in draws],
            ),
        )

    @classmethod
    def single(cls, prompt_token_ids: Int32Array, sample: Sample) -> Draw:
        """Returns the draw of a single answer."""
        return cls(
            prompt_token_ids=prompt_token_ids,
            token_ids=sample.token_ids,
            log_probs=sample.log_probs,
            mask=np.ones(len(sample.token_ids), dtype=np.uint8),
            finish_reason=sample.finish_reason,
            versions=sample.versions,
            expert_choices=sample.expert_choices,
        )


class Recorder:
    """Records an episode by appending: a recorded token is never changed, moved or encoded again."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._prompt = np.asarray(prompt_token_ids, dtype=np.int32)
        self._token_ids: list[Int32Array] = []
        self._log_probs: list[Float32Array] = []
        self._mask: list[UInt8Array] = []
        self._choices: list[ChoiceArray] = []
        self._finish_reason = FinishReason.STOP

    @property
    def context(self) -> list[int]:
        """Returns all tokens so far, from which the engine continues."""
        return [int(token) for part in (self._prompt, *self._token_ids) for token in part.tolist()]

    def sampled(self, sample: Sample) -> None:
        """Records a turn of the policy."""
        self._append(sample.token_ids, sample.log_probs, 1)
        if sample.expert_choices is not None:
            # Earlier tokens keep the choices with which they were drawn.
            self._choices.append(sample.expert_choices[sum(map(len, self._choices)) :])
        self._finish_reason = sample.finish_reason

    def observed(self, token_ids: Sequence[int]) -> None:
        """Records an answer of the environment."""
        ids = np.asarray(token_ids, dtype=np.int32)
        self._append(ids, np.zeros(len(ids), dtype=np.float32), 0)

    def draw(self, outcome: EpisodeOutcome) -> Draw:
        """Returns the draw of the finished episode."""
        return Draw(
            prompt_token_ids=self._prompt,
            token_ids=np.concatenate(self._token_ids),
            log_probs=np.concatenate(self._log_probs),
            mask=np.concatenate(self._mask),
            finish_reason=self._finish_reason,
            episode=outcome,
            expert_choices=np.concatenate(self._choices) if self._choices else None,
        )

    def _append(self, token_ids: Int32Array, log_probs: Float32Array, mask: int) -> None:
        self._token_ids.append(token_ids)
        self._log_probs.append(log_probs)
        self._mask.append(np.full(len(token_ids), mask, dtype=np.uint8))
