"""A reward model with one score per step of a response, as a batch function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.core.scoring import ScoreItem
from paceline.data.prompts import exchange_text
from paceline.reward.models.model import ModelOptions, RewardModel, TokenRow

Value = dict[str, float | list[tuple[int, float]]]
"""The score, and its parts, each with the character at which its step ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Steps(TokenRow):
    """The steps' last tokens, and where the steps end in the response."""

    positions: tuple[int, ...]
    ends: tuple[int, ...]


class ProcessModel(RewardModel[_Steps, Value]):
    """Scores each step of a response; the response's score is their mean.

    A response that the chat template changes counts as one step.

    Raises:
        ConfigError: the model has another number of labels than one.
    """

    def __init__(self, options: ModelOptions) -> None:
        from transformers import AutoModelForTokenClassification

        super().__init__(options, AutoModelForTokenClassification)

    def _row(self, item: ScoreItem) -> _Steps:
        text = exchange_text(self._tokenizer, item.prompt, item.response)
        plain = not self._tokenizer.chat_template
        encoded = self._tokenizer(text, add_special_tokens=plain, return_offsets_mapping=True)
        token_ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        start = text.rfind(item.response) if item.response else -1
        last = len(token_ids) - 1
        if start < 0:
            return _Steps(token_ids=token_ids, positions=(last,), ends=(len(item.response),))
        ends = step_ends(item.response, self._options.step_separator)
        positions = tuple(
            next((index for index, (_, stop) in enumerate(offsets) if stop >= start + end), last)
            for end in ends
        )
        return _Steps(token_ids=token_ids, positions=positions, ends=ends)

    def _values(self, rows: Sequence[_Steps], hidden: Tensor) -> list[Value]:
        values: list[Value] = []
        for states, row in zip(hidden, rows, strict=True):
            left_out = max(0, len(row.token_ids) - self._limit)
            places = [max(0, position - left_out) for position in row.positions]
            scores = self._scores(states[places])
            parts = [score / len(scores) for score in scores]
            placed = [(end, part) for end, part in zip(row.ends, parts, strict=True) if end]
            values.append({"score": sum(parts), "placed": placed})
        return values


def step_ends(response: str, separator: str) -> tuple[int, ...]:
    """Returns where steps end, after their separators; a blank line belongs to the step before."""
    ends: list[int] = []
    begin, end = 0, 0
    while end < len(response):
        at = response.find(separator, begin)
        end = len(response) if at < 0 else at + len(separator)
        is_first = not response[: ends[-1]].strip() if ends else True
        if response[begin:end].strip() and not is_first:
            ends.append(end)
        else:
            ends[-1:] = [end]
        begin = end
    return tuple(ends)
