"""A reward model with one score per sequence, as a batch function."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.scoring import ScoreItem
from paceline.data.prompts import encode_exchange
from paceline.reward.models.model import ModelOptions, RewardModel, TokenRow


class SequenceModel(RewardModel[TokenRow, float]):
    """Scores prompt and response in the model's chat template.

    Raises:
        ConfigError: the model has another number of labels than one.
    """

    def __init__(self, options: ModelOptions) -> None:
        from transformers import AutoModelForSequenceClassification

        super().__init__(options, AutoModelForSequenceClassification)

    def _row(self, item: ScoreItem) -> TokenRow:
        return TokenRow(token_ids=encode_exchange(self._tokenizer, item.prompt, item.response))

    def _values(self, rows: Sequence[TokenRow], hidden: Tensor) -> list[float]:
        # Takes each row's last token by length, because the padding token may also occur in the text.
        last = torch.tensor([min(len(row.token_ids), self._limit) - 1 for row in rows])
        return self._scores(hidden[torch.arange(len(rows)), last])
