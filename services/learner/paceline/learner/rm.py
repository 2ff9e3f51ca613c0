"""`python -m paceline.learner.rm --config resolved.yaml`: trains a reward model on pairs of answers.

One process per rank. The network is a critic without a bias; its value after a conversation's last token is
the score. Packing, micro-batches and optimizer are those of reinforcement learning. The loss is the
Bradley-Terry model's: -log sigmoid(score of the better answer - score of the worse answer - margin).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.tuning import RmRunConfig
from paceline.core.errors import DataError
from paceline.core.samples.trajectory import Int32Array
from paceline.data.prompts import Tokenizer, encode_exchange, last_message, load_tokenizer
from paceline.data.rows import Row, read_rows
from paceline.learner import pair_training
from paceline.learner.batch.types import MicroBatch, PackedRow
from paceline.learner.distributed.ranks import RankEnvironment, Ranks
from paceline.learner.model.architectures import require_text_alone
from paceline.learner.model.decoder.layers import LayerOptions
from paceline.learner.model.loading import Precision, load_critic, read_config
from paceline.learner.model.networks import ValueNetwork
from paceline.learner.train.state.learner import DTYPES


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Comparison:
    """Token ids of a conversation with the better and with the worse answer, and the margin between them."""

    chosen: Int32Array
    rejected: Int32Array
    margin: float = 0.0


def read_comparisons(config: RmRunConfig, files: Sequence[str]) -> tuple[list[Comparison], int]:
    """Returns all pairs that fit the length limits, and the number of pairs that do not.

    Raises:
        DataError: a file or column is missing, a row is unusable, or no pair fits.
        ModelError: the tokenizer is unusable.
    """
    rm, data = config.rm, config.data
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path)
    keys = [data.prompt_key, rm.chosen_key, rm.rejected_key]
    rows = read_rows(files, keys if rm.margin_key is None else [*keys, rm.margin_key])
    limit = data.max_prompt_length + data.max_response_length
    pairs = [_comparison(config, tokenizer, number, row) for number, row in enumerate(rows)]
    fitting = [pair for pair in pairs if max(len(pair.chosen), len(pair.rejected)) <= limit]
    if not fitting:
        raise DataError(
            f"none of the {len(rows)} pairs fits data.max_prompt_length + data.max_response_length = "
            f"{limit}; raise them"
        )
    return fitting, len(rows) - len(fitting)


def _comparison(config: RmRunConfig, tokenizer: Tokenizer, number: int, row: Row) -> Comparison:
    rm, prompt = config.rm, last_message(row[config.data.prompt_key])
    margin = rm.margin if rm.margin_key is None else row[rm.margin_key]
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise DataError(f"row {number}: column {rm.margin_key!r} holds {margin!r}, need a number")
    token_ids = []
    for key in (rm.chosen_key, rm.rejected_key):
        if not isinstance(row[key], str):
            raise DataError(f"row {number}: column {key!r} holds {type(row[key]).__name__}, need text")
        token_ids.append(np.asarray(encode_exchange(tokenizer, prompt, row[key]), np.int32))
    return Comparison(chosen=token_ids[0], rejected=token_ids[1], margin=float(margin))


class RmTrainer(pair_training.PairTrainer[ValueNetwork]):
    """Takes optimizer steps on batches of pairs, and scores held-out ones; every rank calls it.

    Args:
        network: sharded over `ranks`, without a bias.
    """

    def __init__(self, config: RmRunConfig, network: ValueNetwork, ranks: Ranks) -> None:
        super().__init__(config.rm, network, ranks)
        self._centring = config.rm.centring

    def step(self, step: int, pairs: Sequence[Comparison]) -> dict[str, float]:
        """Takes one optimizer step, counted from 1; returns its numbers, measured before it.

        `accuracy` is the share of pairs that are ordered correctly.

        Raises:
            NumericsError: too many steps in a row had no finite loss or gradient.
        """
        losses = [partial(self._loss, batch, pairs) for batch in self._batches(pairs)]
        (loss, num_right), numbers = self._update(losses, step=step)
        return {"loss": loss, "accuracy": num_right / len(pairs), **numbers}

    def accuracy(self, pairs: Sequence[Comparison]) -> float:
        """Returns the share of pairs that are ordered correctly."""
        return self._total(self._batches(pairs), lambda batch: _num_right(*self._scores(batch))) / len(pairs)

    def _batches(self, pairs: Sequence[Comparison]) -> list[MicroBatch]:
        """Returns this rank's micro-batches, with both answers of a pair in the same."""
        lengths = ((len(pair.chosen) + 1, len(pair.rejected) + 1) for pair in pairs)
        return self._cut(lengths, lambda index: _rows(index, pairs[index]))

    def _loss(self, batch: MicroBatch, pairs: Sequence[Comparison]) -> tuple[Tensor, Tensor]:
        """Returns the loss share; then, detached, this share and the number of correct pairs."""
        chosen, rejected = self._scores(batch)
        margins = [pairs[index].margin for index in batch.rows[::2]]
        margin = torch.tensor(margins, dtype=chosen.dtype, device=chosen.device)
        losses = -F.logsigmoid(chosen - rejected - margin)
        losses = losses + self._centring * (chosen + rejected) ** 2
        share = losses.sum() / len(pairs)
        return share, torch.stack([share.detach().double(), _num_right(chosen, rejected)])

    def _scores(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Returns the scores of better and of worse answers in a micro-batch; filler rows have none."""
        values = self.network(batch)
        own = values[: len(batch.rows)]
        # A filler's number stays in the graph: every rank takes part in the backward pass.
        own = own + 0.0 * values.sum()
        return own[0::2], own[1::2]


def _num_right(chosen: Tensor, rejected: Tensor) -> Tensor:
    return (chosen > rejected).sum().double()


def _rows(index: int, pair: Comparison) -> list[PackedRow]:
    """Makes both conversations prompts with a dummy answer, which is preceded by their last token's value."""
    return [
        PackedRow.unsampled(index, tokens, np.zeros(1, np.int32)) for tokens in (pair.chosen, pair.rejected)
    ]


def train(config: RmRunConfig, environment: RankEnvironment) -> None:
    """Trains and writes the folder; the main function of one rank.

    Raises:
        DataError, ModelError, ConfigError: the data, the model or the configuration is unusable.
        NumericsError: training diverged.
    """
    ranks = pair_training.form_ranks(config.learner, environment)
    pair_training.check(config)
    model, rm = config.model, config.rm
    require_text_alone(read_config(model.path))
    network = load_critic(
        model.path,
        ranks,
        Precision(compute=DTYPES[model.dtype]),
        seed=config.seed,
        options=LayerOptions.of(rm.memory, num_tokens=rm.max_token_len_per_gpu, ranks=ranks),
        random_weights=model.load_format == "random",
        has_bias=False,
    )
    pairs, num_left_out = read_comparisons(config, rm.train_files)
    val = read_comparisons(config, rm.val_files)[0] if rm.val_files else []
    pair_training.announce(network, rm, len(pairs), num_left_out, name="rm", ranks=ranks)
    trainer = RmTrainer(config, network, ranks)

    def take_step(step: int, indices: list[int]) -> str:
        return pair_training.in_words(trainer.step(step, [pairs[index] for index in indices]))

    def held_out() -> str:
        return f"accuracy {trainer.accuracy(val):.4f} on {len(val):,}"

    pair_training.complete(
        config, rm, trainer, len(pairs), take_step, held_out=held_out, name="rm", ranks=ranks
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line and trains; returns the exit code."""
    return pair_training.run_rank("rm", RmRunConfig, train, argv)


if __name__ == "__main__":
    sys.exit(main())
