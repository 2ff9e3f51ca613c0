"""What reward models have in common: conversations in the model's chat template, batches by tokens."""

from __future__ import annotations

import abc
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from paceline.config.reward import NUMBER
from paceline.core.errors import ConfigError, ModelError
from paceline.core.scoring import ScoreItem
from paceline.data.prompts import load_tokenizer
from paceline.storage.weight_files import require_plain_weights

_log = logging.getLogger(__name__)

RowT = TypeVar("RowT", bound="TokenRow")
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """How a reward model is loaded and fed.

    Args:
        path: folder with a model with one label, and its tokenizer.
        dtype: data type of the weights; the score itself is computed in float32.
        max_batch_tokens: most tokens of a batch, including padding.
        step_separator: text that ends a step of a response.
        prompt_file, pattern, words, max_tokens: for a judge: its prompt, how its grade is read, and the
            length of its longest answer.
    """

    path: str
    device: str = "cpu"
    dtype: str = "float32"
    max_batch_tokens: int = 16384
    step_separator: str = "\n"
    prompt_file: str = ""
    pattern: str = NUMBER
    words: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """A conversation's tokens, of which the model takes the last `limit`."""

    token_ids: list[int]


class RewardModel(abc.ABC, Generic[RowT, ValueT]):
    """A model as a batch function; calls of different sizes give the same scores.

    Args:
        kind: transformers' class that loads the model.

    Raises:
        ConfigError: the model has another number of labels than one.
        ModelError: the folder has no tokenizer, or a quantised model.
    """

    def __init__(self, options: ModelOptions, kind: Any) -> None:
        self._options = options
        require_plain_weights(Path(options.path))
        self._tokenizer: Any = load_tokenizer(options.path)
        model: Any = kind.from_pretrained(options.path, dtype=getattr(torch, options.dtype))
        if model.config.num_labels != 1:
            raise ConfigError(
                f"{options.path} has {model.config.num_labels} labels: a reward model has one, its score"
            )
        model.config.pad_token_id = self._pad = self._tokenizer.pad_token_id or 0
        self._limit: int = getattr(model.config, "max_position_embeddings", 0) or options.max_batch_tokens
        _score_in_float32(model)
        self._model = model.to(options.device).eval()

    def __call__(self, items: list[ScoreItem]) -> list[ValueT]:
        """Returns one value per item, in the order of the items.

        Raises:
            ModelError: the tokenizer has no token for an item.
        """
        rows = [self._row(item) for item in items]
        values: dict[int, ValueT] = {}
        lengths = [min(len(row.token_ids), self._limit) for row in rows]
        if 0 in lengths:
            item = items[lengths.index(0)]
            raise ModelError(
                f"the tokenizer in {self._options.path} has no token for the prompt {item.prompt[:40]!r} and "
                "its answer; save the one with which the reward model was trained"
            )
        for batch in batches(lengths, self._options.max_batch_tokens):
            chosen = [rows[index] for index in batch]
            values.update(zip(batch, self._values(chosen, self._hidden(chosen)), strict=True))
        return [values[index] for index in range(len(items))]

    @abc.abstractmethod
    def _row(self, item: ScoreItem) -> RowT:
        """Returns the part of an item that the model reads."""

    @abc.abstractmethod
    def _values(self, rows: Sequence[RowT], hidden: Tensor) -> list[ValueT]:
        """Returns the rows' values from their states (B, T, H), without tokens that were cut off."""

    @torch.inference_mode()
    def _hidden(self, rows: Sequence[RowT]) -> Tensor:
        taken = [row.token_ids[-self._limit :] for row in rows]
        longest = max(len(row.token_ids) for row in rows)
        if longest > self._limit:
            _log.warning("%d tokens, of which the model takes the last %d", longest, self._limit)
        width = max(map(len, taken))
        ids = torch.tensor([row + [self._pad] * (width - len(row)) for row in taken])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in taken])
        device = self._options.device
        hidden: Tensor = self._model.base_model(input_ids=ids.to(device), attention_mask=mask.to(device))[0]
        return hidden

    @torch.inference_mode()
    def _scores(self, states: Tensor) -> list[float]:
        """Returns the scores of states (N, H)."""
        scores: list[float] = self._model.score(states)[:, 0].tolist()
        return scores


def _score_in_float32(model: Any) -> None:
    """Makes the head compute in float32, whatever the model's type: bfloat16 has only three digits."""
    model.score.float()
    model.score.register_forward_pre_hook(lambda _, arguments: (arguments[0].float(),))


def batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yields batches of row indices, sorted by length, that fit with padding; a longer row gets its own."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[index] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
