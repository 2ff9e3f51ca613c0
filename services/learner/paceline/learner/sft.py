"""`python -m paceline.learner.sft --config resolved.yaml`: supervised fine-tuning on prompt/answer pairs.

One process per rank. Networks, packing, micro-batches and optimizer are those of reinforcement learning; the
loss is the mean negative log-prob of the answers' tokens, end of sequence included.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from paceline.config.training.tuning import SftConfig
from paceline.config.tuning import SftRunConfig
from paceline.core.errors import DataError
from paceline.core.samples.images import ImageSpec
from paceline.core.samples.trajectory import Int32Array
from paceline.data.images import ImageReader, ImageSource
from paceline.data.prompts import encode_prompt, encode_with_images
from paceline.data.rows import StoredRows
from paceline.learner import pair_training
from paceline.learner.batch.images import find_images
from paceline.learner.batch.types import MicroBatch, PackedRow, PromptImage
from paceline.learner.distributed.ranks import RankEnvironment, Ranks
from paceline.learner.model.decoder.layers import LayerOptions
from paceline.learner.model.loading import Precision, load_policy
from paceline.learner.model.networks import PolicyNetwork
from paceline.learner.train.state.learner import DTYPES


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pair:
    """Token ids of a prompt, and of its answer including the end of sequence; and the prompt's images."""

    prompt: Int32Array
    answer: Int32Array
    images: tuple[ImageSource, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and answer together."""
        return len(self.prompt) + len(self.answer)


def read_pairs(
    config: SftRunConfig, files: Sequence[str], reader: ImageReader | None = None
) -> tuple[list[Pair], int]:
    """Returns all pairs that fit the length limits, and the number of pairs that do not.

    Args:
        reader: reader of the images of `data.image_key`.

    Raises:
        DataError: a file or column is missing, a row is unusable, or no pair fits.
        ModelError: the tokenizer is unusable.
    """
    sft, data = config.sft, config.data
    tokenizer = pair_training.tokenizer_of(config)
    columns = [data.prompt_key, sft.answer_key, *([] if reader is None else [reader.column])]
    rows = StoredRows(files, columns)[:]
    answers = [row[sft.answer_key] for row, _ in rows]
    for number, answer in enumerate(answers):
        if not isinstance(answer, str):
            raise DataError(
                f"row {number}: column {sft.answer_key!r} holds {type(answer).__name__}, need text"
            )
    encoded = tokenizer(answers, add_special_tokens=False)["input_ids"]
    pairs = []
    for number, ((row, folder), answer_ids) in enumerate(zip(rows, encoded, strict=True)):
        value, images = row[data.prompt_key], tuple[ImageSource, ...]()
        try:
            if reader is None:
                prompt = encode_prompt(tokenizer, value, data.prompt_format)
            else:
                prompt, images = encode_with_images(tokenizer, value, data.prompt_format, row, folder, reader)
        except DataError as error:
            raise DataError(f"row {number}: {error}") from error
        if 0 < len(prompt) <= data.max_prompt_length and len(answer_ids) < data.max_response_length:
            pairs.append(
                Pair(
                    prompt=np.asarray(prompt, np.int32),
                    answer=np.asarray([*answer_ids, tokenizer.eos_token_id], np.int32),
                    images=images,
                )
            )
    pair_training.require_some(len(pairs), len(rows), data)
    return pairs, len(rows) - len(pairs)


class SftTrainer(pair_training.PairTrainer[PolicyNetwork]):
    """Takes optimizer steps on batches of pairs; every rank calls it.

    Args:
        reader: makes the pixels of pairs' images.
    """

    def __init__(
        self, tuning: SftConfig, network: PolicyNetwork, ranks: Ranks, reader: ImageReader | None = None
    ) -> None:
        super().__init__(tuning, network, ranks)
        self._reader = reader

    def step(self, step: int, pairs: Sequence[Pair]) -> dict[str, float]:
        """Takes one optimizer step, counted from 1; returns its numbers, measured before it.

        `loss` is the mean negative log-prob per answer token.

        Raises:
            NumericsError: too many steps in a row had no finite loss or gradient.
        """
        losses = [partial(self._loss, batch, _num_answer_tokens(pairs)) for batch in self._batches(pairs)]
        (loss,), numbers = self._update(losses, step=step)
        return {"loss": loss, **numbers}

    def loss(self, pairs: Sequence[Pair]) -> float:
        """Returns the mean negative log-prob of the answers' tokens."""
        num_tokens = _num_answer_tokens(pairs)
        return self._total(self._batches(pairs), lambda batch: self._loss(batch, num_tokens)[1])

    def _batches(self, pairs: Sequence[Pair]) -> list[MicroBatch]:
        return self._cut(
            (
                (len(pair.prompt), len(pair.answer), *(image.num_patches for image in pair.images))
                for pair in pairs
            ),
            lambda index: [self._row(index, pairs[index])],
        )

    def _row(self, index: int, pair: Pair) -> PackedRow:
        images = tuple[PromptImage, ...]()
        if pair.images:
            assert self._reader is not None
            loaded = [self._reader.process(image) for image in pair.images]
            images = find_images(pair.prompt, loaded, ImageSpec.of(self.network.lm.config))
        return PackedRow.unsampled(index, pair.prompt, pair.answer, images=images)

    def _loss(self, batch: MicroBatch, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Returns a micro-batch's share of the loss, for the backward pass and as a number."""
        log_probs = self.network(batch).log_probs
        share = -batch.table(log_probs).where(batch.mask, 0.0).sum() / num_tokens
        return share, share.detach().double().reshape(1)


def _num_answer_tokens(pairs: Sequence[Pair]) -> int:
    return sum(len(pair.answer) for pair in pairs)


def train(config: SftRunConfig, environment: RankEnvironment) -> None:
    """Trains and writes the folder; the main function of one rank.

    Raises:
        DataError, ModelError, ConfigError: the data, the model or the configuration is unusable.
        NumericsError: training diverged.
    """
    ranks = pair_training.form_ranks(config.learner, environment)
    pair_training.check(config)
    model, sft = config.model, config.sft
    network = load_policy(
        model.path,
        ranks,
        Precision(compute=DTYPES[model.dtype]),
        options=LayerOptions.of(sft.memory, num_tokens=sft.max_token_len_per_gpu, ranks=ranks),
        random_seed=config.seed if model.load_format == "random" else None,
        vision=model.vision.train,
    )
    reader = ImageReader.load(config.data, model.path)
    pairs, num_left_out = read_pairs(config, sft.train_files, reader)
    pair_training.announce(network, sft, len(pairs), num_left_out, name="sft", ranks=ranks)
    val = read_pairs(config, sft.val_files, reader)[0] if sft.val_files else []
    trainer = SftTrainer(sft, network, ranks, reader)
    began, num_tokens = time.monotonic(), 0

    def take_step(step: int, indices: list[int]) -> str:
        nonlocal num_tokens
        batch = [pairs[index] for index in indices]
        progress = trainer.step(step, batch)
        num_tokens += sum(pair.num_tokens for pair in batch)
        rate = num_tokens / (time.monotonic() - began)
        return f"{pair_training.in_words(progress)} {rate:,.0f} tokens/s"

    def held_out() -> str:
        return f"loss {trainer.loss(val):.4f} on {len(val):,}"

    pair_training.complete(
        config, sft, trainer, len(pairs), take_step, held_out=held_out, name="sft", ranks=ranks
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line and trains; returns the exit code."""
    return pair_training.run_rank("sft", SftRunConfig, train, argv)


if __name__ == "__main__":
    sys.exit(main())
