"""A judge as a batch function: a language model from a folder, which writes a grade."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.data.prompts import encode_prompt, load_tokenizer, stop_token_ids
from paceline.reward.judge.question import GradePattern, JudgePrompt, read_prompt_file
from paceline.reward.models.model import ModelOptions, batches
from paceline.storage.weight_files import require_plain_weights


class GenerativeModel:
    """Asks the model about each item in its chat template, decodes greedily, and reads the grade.

    Raises:
        ConfigError: the prompt file or the pattern is unusable.
        ModelError: the folder has no tokenizer, or names no end-of-sequence token.
    """

    def __init__(self, options: ModelOptions) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        self._options = options
        self._question = JudgePrompt(read_prompt_file(options.prompt_file))
        self._grade = GradePattern(options.pattern, dict(options.words))
        self._tokenizer = load_tokenizer(options.path)
        stops = stop_token_ids(options.path, self._tokenizer)
        self._pad = stops[0]
        require_plain_weights(Path(options.path))
        model: Any = AutoModelForCausalLM.from_pretrained(options.path, dtype=getattr(torch, options.dtype))
        limit = getattr(model.config, "max_position_embeddings", 0) or options.max_batch_tokens
        self._limit = limit - options.max_tokens
        # Replaces the folder's own configuration, which may ask for sampling or penalties.
        model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=options.max_tokens,
            eos_token_id=list(stops),
            pad_token_id=self._pad,
        )
        self._model = model.to(options.device).eval()

    def __call__(self, items: list[ScoreItem]) -> list[float | RewardError]:
        """Returns one grade per item, in the order of the items, or why an item has none."""
        rows = [self._row(item) for item in items]
        values: dict[int, float | RewardError] = {
            index: _too_long(len(row), self._limit, self._options.max_tokens)
            for index, row in enumerate(rows)
            if len(row) > self._limit
        }
        asked = [index for index in range(len(items)) if index not in values]
        lengths = [len(rows[index]) + self._options.max_tokens for index in asked]
        for batch in batches(lengths, self._options.max_batch_tokens):
            chosen = [asked[place] for place in batch]
            for index, answer in zip(chosen, self._answers([rows[index] for index in chosen]), strict=True):
                values[index] = self._value(answer)
        return [values[index] for index in range(len(items))]

    def _row(self, item: ScoreItem) -> list[int]:
        question = self._question.about(item)
        message = [{"role": "user", "content": question}]
        return encode_prompt(self._tokenizer, message if self._tokenizer.chat_template else question, "auto")

    @torch.inference_mode()
    def _answers(self, rows: Sequence[list[int]]) -> list[str]:
        width = max(map(len, rows))
        ids = torch.tensor([[self._pad] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        device = self._options.device
        written: Tensor = self._model.generate(input_ids=ids.to(device), attention_mask=mask.to(device))
        return [self._tokenizer.decode(row, skip_special_tokens=True) for row in written[:, width:].tolist()]

    def _value(self, answer: str) -> float | RewardError:
        try:
            return self._grade.of(answer)
        except RewardError as error:
            return error


def _too_long(length: int, limit: int, max_tokens: int) -> RewardError:
    return RewardError(
        f"the judge's question has {length} tokens: the model reads {limit} beside max_tokens={max_tokens}",
        kind=RewardErrorKind.WRONG_TYPE,
    )
