"""`python -m paceline.learner.dpo --config resolved.yaml`: trains a policy on pairs of answers.

One process per rank. Network, packing, micro-batches and optimizer are those of reinforcement learning; the
losses are those of `paceline.algorithms.policy_losses.pairs`. There is no second model: the reference is the
starting model, and scores all pairs before the first step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from paceline.algorithms.policy_losses.pairs import PairScores, dpo, ipo, kto, simpo
from paceline.config.tuning import DpoRunConfig
from paceline.core.errors import DataError
from paceline.core.samples.trajectory import Int32Array
from paceline.data.prompts import encode_prompt
from paceline.data.rows import Row, read_rows
from paceline.learner import pair_training
from paceline.learner.batch.types import MicroBatch, PackedRow
from paceline.learner.distributed.ranks import RankEnvironment, Ranks
from paceline.learner.model.architectures import require_text_alone
from paceline.learner.model.decoder.layers import LayerOptions
from paceline.learner.model.loading import Precision, forget_forward_passes, load_policy, read_config
from paceline.learner.model.networks import PolicyNetwork
from paceline.learner.train.state.learner import DTYPES

PairLoss = Callable[[PairScores, float], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Preference:
    """Token ids of a prompt, of the better and of the worse answer, both with the end of sequence."""

    prompt: Int32Array
    chosen: Int32Array
    rejected: Int32Array


def read_preferences(config: DpoRunConfig, files: Sequence[str]) -> tuple[list[Preference], int]:
    """Returns all pairs that fit the length limits, and the number of pairs that do not.

    Raises:
        DataError: a file or column is missing, a row is unusable, or no pair fits.
        ModelError: the tokenizer is unusable.
    """
    own, data = config.dpo, config.data
    tokenizer = pair_training.tokenizer_of(config)
    rows = read_rows(files, [data.prompt_key, own.chosen_key, own.rejected_key])
    pairs = []
    for number, row in enumerate(rows):
        prompt = encode_prompt(tokenizer, row[data.prompt_key], data.prompt_format)
        chosen, rejected = (
            [
                *tokenizer(_answer(row, key, number), add_special_tokens=False)["input_ids"],
                tokenizer.eos_token_id,
            ]
            for key in (own.chosen_key, own.rejected_key)
        )
        longest = max(len(chosen), len(rejected))
        if 0 < len(prompt) <= data.max_prompt_length and longest <= data.max_response_length:
            ids = [np.asarray(tokens, np.int32) for tokens in (prompt, chosen, rejected)]
            pairs.append(Preference(prompt=ids[0], chosen=ids[1], rejected=ids[2]))
    pair_training.require_some(len(pairs), len(rows), data)
    return pairs, len(rows) - len(pairs)


def _answer(row: Row, key: str, number: int) -> str:
    """Returns an answer's text, which may be the last message of a conversation."""
    value = row[key]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        last = value[-1]
        if isinstance(last, Mapping) and last.get("role") == "assistant":
            value = last.get("content")
    if not isinstance(value, str):
        raise DataError(
            f"row {number}: column {key!r} holds {type(value).__name__}, need text, or a list of messages "
            "whose last is the assistant's"
        )
    return value


class DpoTrainer(pair_training.PairTrainer[PolicyNetwork]):
    """Takes optimizer steps on batches of pairs; every rank calls it.

    Args:
        network: sharded over `ranks`, with the starting model's weights.
        pairs: all pairs, held-out ones among them.
        batches: for each of the coming steps, the indices of its pairs.
        held_out: indices of pairs that are used only for `accuracy`.
    """

    def __init__(
        self,
        config: DpoRunConfig,
        network: PolicyNetwork,
        ranks: Ranks,
        pairs: Sequence[Preference],
        batches: Sequence[Sequence[int]],
        held_out: Sequence[int] = (),
    ) -> None:
        super().__init__(config.dpo, network, ranks)
        self._config, self._pairs = config, pairs
        self._references: Mapping[int, tuple[float, float]] = {}
        self._others: Mapping[tuple[int, int], float] = {}
        self._score_by_reference(batches, held_out)

    def step(self, step: int, indices: Sequence[int]) -> dict[str, float]:
        """Takes one optimizer step, counted from 1, on the pairs of these indices; returns its numbers.

        They are measured before it. `accuracy` is the share of the pairs whose better answer has gained more
        on the reference than the worse; `margin` is the mean difference of these gains, times beta.

        Raises:
            NumericsError: too many steps in a row had no finite loss or gradient.
        """
        loss_of = self._loss_of(self._reference_point(indices))
        losses = [partial(self._loss, batch, len(indices), loss_of) for batch in self._batches(indices)]
        (loss, num_right, margin), numbers = self._update(losses, step=step)
        count = len(indices)
        return {"loss": loss, "accuracy": num_right / count, "margin": margin / count, **numbers}

    def accuracy(self, indices: Sequence[int]) -> float:
        """Returns the share of the pairs whose better answer has gained more than the worse."""
        num_right = self._total(self._batches(indices), lambda batch: self._numbers(self._scores(batch))[0])
        return num_right / len(indices)

    def _score_by_reference(self, batches: Sequence[Sequence[int]], held_out: Sequence[int]) -> None:
        """Scores the pairs of the coming steps with the network, which is still the starting model."""
        kind = self._config.dpo.loss
        used = sorted({index for batch in [*batches, held_out] for index in batch})
        if kind != "simpo":
            sums = self._sums([row for index in used for row in _rows(index, self._pairs[index])])
            self._references = {
                index: (sums[2 * place], sums[2 * place + 1]) for place, index in enumerate(used)
            }
        if kind == "kto":
            wanted = list(dict.fromkeys(pair for batch in batches for pair in _shifted(batch)))
            sums = self._sums([self._other_row(*pair) for pair in wanted])
            self._others = dict(zip(wanted, sums, strict=True))

    def _reference_point(self, indices: Sequence[int]) -> float:
        """Returns KTO's reference point (mean log-ratio of answers to other prompts, at least 0); else 0."""
        if self._config.dpo.loss != "kto":
            return 0.0
        wanted = _shifted(indices)
        now = self._sums([self._other_row(*pair) for pair in wanted])
        gains = [sums - self._others[pair] for sums, pair in zip(now, wanted, strict=True)]
        return max(0.0, sum(gains) / len(gains))

    def _other_row(self, prompt: int, answer: int) -> PackedRow:
        return PackedRow.unsampled(prompt, self._pairs[prompt].prompt, self._pairs[answer].chosen)

    @torch.no_grad()
    def _sums(self, rows: Sequence[PackedRow]) -> list[float]:
        """Returns the policy's log-probs of rows, summed over their answers' tokens, on every rank."""
        lengths = ((len(row.prompt_token_ids), len(row.response_token_ids)) for row in rows)
        batches = self._cut(lengths, lambda place: [replace(rows[place], index=place)])
        sums = torch.zeros(len(rows), dtype=torch.float64, device=self._ranks.device)
        for batch in batches:
            own, _ = self._row_sums(batch)
            sums[list(batch.rows)] = own.double()
        forget_forward_passes(self.network)
        return self._ranks.data.all_sum(sums).tolist()

    def _batches(self, indices: Sequence[int]) -> list[MicroBatch]:
        """Returns this rank's micro-batches; both answers of a pair are in the same one, with its index."""
        pairs = [self._pairs[index] for index in indices]
        lengths = ((2 * len(pair.prompt) + len(pair.chosen), len(pair.rejected)) for pair in pairs)
        return self._cut(lengths, lambda place: _rows(indices[place], pairs[place]))

    def _row_sums(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Returns sums of log-probs and numbers of tokens per row of a micro-batch; none for a filler."""
        log_probs = self.network(batch).log_probs
        sums = batch.table(log_probs).where(batch.mask, 0.0).sum(-1)
        return sums[: len(batch.rows)], batch.mask.sum(-1)[: len(batch.rows)]

    def _scores(self, batch: MicroBatch) -> PairScores:
        sums, counts = self._row_sums(batch)
        known = [self._references.get(index, (0.0, 0.0)) for index in batch.rows[::2]]
        references = torch.tensor(known, dtype=sums.dtype, device=sums.device).reshape(-1, 2)
        return PairScores(
            chosen=sums[0::2],
            rejected=sums[1::2],
            ref_chosen=references[:, 0],
            ref_rejected=references[:, 1],
            chosen_tokens=counts[0::2],
            rejected_tokens=counts[1::2],
        )

    def _loss_of(self, reference_point: float) -> PairLoss:
        own = self._config.dpo
        losses: dict[str, PairLoss] = {
            "dpo": partial(dpo, label_smoothing=own.label_smoothing),
            "ipo": ipo,
            "simpo": partial(simpo, gamma=own.gamma),
            "kto": partial(kto, reference_point=reference_point),
        }
        return losses[own.loss]

    def _loss(self, batch: MicroBatch, num_pairs: int, loss_of: PairLoss) -> tuple[Tensor, Tensor]:
        """Returns a micro-batch's share of the loss, the number of its pairs in order, and their margins."""
        own, scores = self._config.dpo, self._scores(batch)
        losses = loss_of(scores, own.strength)
        if own.sft_coef:
            losses = losses - own.sft_coef * scores.chosen / scores.chosen_tokens
        share = losses.sum() / num_pairs
        return share, torch.cat([share.detach().double().reshape(1), self._numbers(scores)])

    def _numbers(self, scores: PairScores) -> Tensor:
        """Returns how many pairs are in order, and the sum of the margins of their implicit rewards."""
        own = self._config.dpo
        if own.loss == "simpo":
            better, worse = scores.chosen / scores.chosen_tokens, scores.rejected / scores.rejected_tokens
        else:
            better, worse = scores.gain_chosen, scores.gain_rejected
        margins = (own.strength * better - own.strength * worse).detach().double()
        return torch.stack([(margins > 0).sum().double(), margins.sum()])


def _shifted(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Returns each pair's index with that of the pair whose answer is scored for its prompt."""
    return list(zip(indices, [*indices[1:], *indices[:1]], strict=True))


def _rows(index: int, pair: Preference) -> list[PackedRow]:
    return [PackedRow.unsampled(index, pair.prompt, answer) for answer in (pair.chosen, pair.rejected)]


def train(config: DpoRunConfig, environment: RankEnvironment) -> None:
    """Trains and writes the folder; the main function of one rank.

    Raises:
        DataError, ModelError, ConfigError: the data, the model or the configuration is unusable.
        NumericsError: training diverged.
    """
    ranks = pair_training.form_ranks(config.learner, environment)
    pair_training.check(config)
    model, own = config.model, config.dpo
    require_text_alone(read_config(model.path))
    compute = DTYPES[model.dtype]
    network = load_policy(
        model.path,
        ranks,
        Precision(compute=compute) if model.lora is None else Precision(compute=compute, store=compute),
        options=LayerOptions.of(own.memory, num_tokens=own.max_token_len_per_gpu, ranks=ranks),
        random_seed=config.seed if model.load_format == "random" else None,
        lora=model.lora,
        adapter_seed=config.seed,
    )
    pairs, num_left_out = read_preferences(config, own.train_files)
    val = read_preferences(config, own.val_files)[0] if own.val_files else []
    pair_training.announce(network, own, len(pairs), num_left_out, name="dpo", ranks=ranks)
    order = pair_training.batch_indices(len(pairs), own.batch_size, config.seed, section="dpo")
    held_out = range(len(pairs), len(pairs) + len(val))
    batches = list(islice(order, own.steps))
    trainer = DpoTrainer(config, network, ranks, [*pairs, *val], batches, held_out)

    def take_step(step: int, indices: list[int]) -> str:
        return pair_training.in_words(trainer.step(step, indices))

    def report() -> str:
        return f"accuracy {trainer.accuracy(held_out):.4f} on {len(val):,}"

    pair_training.complete(
        config, own, trainer, len(pairs), take_step, held_out=report, name="dpo", ranks=ranks
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line and trains; returns the exit code."""
    return pair_training.run_rank("dpo", DpoRunConfig, train, argv)


if __name__ == "__main__":
    sys.exit(main())
