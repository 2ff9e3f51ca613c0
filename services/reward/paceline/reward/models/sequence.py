"""A reward model with one score per sequence, as a batch function."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.scoring import ScoreItem

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceModelOptions:
    """How a reward model is loaded and fed.

    Args:
        path: folder with a model for sequence classification with one label, and its tokenizer.
        device: torch's name.
        dtype: of the weights; the score itself is computed in float32.
        max_batch_tokens: most tokens at a time, padding counted.
    """

    path: str
    device: str = "cpu"
    dtype: str = "float32"
    max_batch_tokens: int = 16384


class SequenceModel:
    """Scores prompt and response in the model's chat template; calls of different sizes give the same scores.

    Raises:
        ConfigError: the model has another number of labels than one.
    """

    def __init__(self, options: SequenceModelOptions) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._options = options
        self._tokenizer: Any = AutoTokenizer.from_pretrained(options.path)
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            options.path, dtype=getattr(torch, options.dtype)
        )
        if model.config.num_labels != 1:
            raise ConfigError(
                f"{options.path} has {model.config.num_labels} labels: a reward model has one, its score"
            )
        model.config.pad_token_id = self._pad = self._tokenizer.pad_token_id or 0
        self._limit: int = getattr(model.config, "max_position_embeddings", 0) or options.max_batch_tokens
        _score_in_float32(model)
        self._model = model.to(options.device).eval()

    def __call__(self, items: list[ScoreItem]) -> list[float]:
        """One score per item, in the order of the items."""
        rows = [self._tokens(item) for item in items]
        scores = [0.0] * len(items)
        for batch in _batches([len(row) for row in rows], self._options.max_batch_tokens):
            for index, score in zip(batch, self._scores([rows[index] for index in batch]), strict=True):
                scores[index] = score
        return scores

    def _tokens(self, item: ScoreItem) -> list[int]:
        messages = [
            {"role": "user", "content": item.prompt},
            {"role": "assistant", "content": item.response},
        ]
        if self._tokenizer.chat_template:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
            tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            tokens = self._tokenizer(item.prompt + item.response)["input_ids"]
        if len(tokens) > self._limit:
            _log.warning("%d tokens, of which the model takes the last %d", len(tokens), self._limit)
        return tokens[-self._limit :]

    @torch.inference_mode()
    def _scores(self, rows: Sequence[list[int]]) -> list[float]:
        width = max(len(row) for row in rows)
        ids = torch.tensor([row + [self._pad] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        device = self._options.device
        hidden = self._model.base_model(input_ids=ids.to(device), attention_mask=mask.to(device))[0]
        # The last token of each row: a padding token's id may occur in the text, so it tells nothing.
        last = hidden[torch.arange(len(rows)), mask.sum(1) - 1]
        scores: list[float] = self._model.score(last)[:, 0].tolist()
        return scores


def _score_in_float32(model: Any) -> None:
    """The head's product in float32, whatever the model's own type: bfloat16 has three digits."""
    model.score.float()
    model.score.register_forward_pre_hook(lambda _, arguments: (arguments[0].float(),))


def _batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of rows by length, as many as fit with padding; a row alone if it is longer."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[index] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
