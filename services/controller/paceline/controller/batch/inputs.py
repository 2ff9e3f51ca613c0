"""What a run works on: prompts, where it stands in them, and how answers are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.run import RunConfig
from paceline.core.trajectory import SamplingSpec
from paceline.data.cursor import PromptCursor
from paceline.data.prompts import PromptSet


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Training and held-out prompts, the walk over the former, and the tokens that end an answer."""

    train: PromptSet
    val: PromptSet | None
    cursor: PromptCursor
    stop_token_ids: tuple[int, ...]

    def sampling(self, config: RunConfig, temperature: float) -> SamplingSpec:
        """How answers are drawn at a temperature."""
        return SamplingSpec(
            temperature=temperature,
            max_tokens=config.data.max_response_length,
            stop_token_ids=self.stop_token_ids,
        )
