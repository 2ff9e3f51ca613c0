"""`python -m paceline.learner.sft --config resolved.yaml`: supervised fine-tuning on prompt/answer pairs.

One process per rank. Networks, packing, micro-batches and optimizer are those of reinforcement learning; the
loss is the mean negative log-prob of the answers' tokens and their end of sequence.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from paceline.config.load import load
from paceline.config.run import SftRunConfig
from paceline.core.errors import DataError, ModelError, NumericsError, PacelineError
from paceline.core.trajectory import Int32Array
from paceline.data.prompts import encode_prompt, load_tokenizer
from paceline.data.rows import read_rows
from paceline.learner.batch.arithmetic import RowLength
from paceline.learner.batch.pack import pack
from paceline.learner.batch.plan import effective_budget, plan_batch
from paceline.learner.batch.types import MicroBatch, PackedRow
from paceline.learner.distributed.catching_up import count_collectives
from paceline.learner.distributed.host_memory import host_mesh
from paceline.learner.distributed.ranks import (
    RankEnvironment,
    Ranks,
    choose_device,
    form_group,
    leave_group,
    open_store,
    use_threads,
)
from paceline.learner.model.flops import arithmetic_of
from paceline.learner.model.folder import gather_tensors, write_folder
from paceline.learner.model.layers import LayerOptions
from paceline.learner.model.loading import Precision, load_policy
from paceline.learner.model.networks import PolicyNetwork, num_parameters
from paceline.learner.model.self_test import check_model
from paceline.learner.train.learner import DTYPES
from paceline.learner.train.optimizer import Optimizer, Schedule, Trainable
from paceline.service.logs import setup_logging
from paceline.service.process import die_with_parent

log = logging.getLogger(__name__)

_REPORTS = 20
_MAX_SKIPPED = 10


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pair:
    """Token ids of a prompt, and of its answer with the end of sequence."""

    prompt: Int32Array
    answer: Int32Array

    @property
    def num_tokens(self) -> int:
        """Prompt and answer together."""
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True, kw_only=True, slots=True)
class SftProgress:
    """One optimizer step; `loss` is the mean negative log-prob per answer token before it."""

    step: int
    loss: float
    grad_norm: float
    lr: float


def read_pairs(config: SftRunConfig) -> tuple[list[Pair], int]:
    """All pairs that fit the length limits, and how many do not.

    Raises:
        DataError: a file or column is missing, a row is unusable, or no pair fits.
        ModelError: the tokenizer is unusable.
    """
    sft, data = config.sft, config.data
    tokenizer: Any = load_tokenizer(config.model.tokenizer_path or config.model.path)
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "the tokenizer has no end-of-sequence token, so answers could never end; set eos_token"
        )
    rows = read_rows(sft.train_files, [data.prompt_key, sft.answer_key])
    answers = [row[sft.answer_key] for row in rows]
    for number, answer in enumerate(answers):
        if not isinstance(answer, str):
            raise DataError(
                f"row {number}: column {sft.answer_key!r} holds {type(answer).__name__}, need text"
            )
    encoded = tokenizer(answers, add_special_tokens=False)["input_ids"]
    pairs = []
    for row, answer_ids in zip(rows, encoded, strict=True):
        prompt = encode_prompt(tokenizer, row[data.prompt_key], data.prompt_format)
        if 0 < len(prompt) <= data.max_prompt_length and len(answer_ids) < data.max_response_length:
            pairs.append(
                Pair(
                    prompt=np.asarray(prompt, np.int32),
                    answer=np.asarray([*answer_ids, tokenizer.eos_token_id], np.int32),
                )
            )
    if not pairs:
        raise DataError(
            f"none of the {len(rows)} pairs fits data.max_prompt_length={data.max_prompt_length} and "
            f"data.max_response_length={data.max_response_length}; raise them"
        )
    return pairs, len(rows) - len(pairs)


def batch_indices(num_pairs: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Endless batches; every epoch visits each pair at most once, in an order drawn from (seed, epoch).

    Raises:
        DataError: there are fewer pairs than one batch needs.
    """
    if num_pairs < batch_size:
        raise DataError(f"{num_pairs} pairs cannot fill sft.batch_size={batch_size}; lower it or add pairs")
    epoch = 0
    while True:
        order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_pairs)
        for first in range(0, num_pairs - batch_size + 1, batch_size):
            yield [int(index) for index in order[first : first + batch_size]]
        epoch += 1


class SftTrainer:
    """Takes optimizer steps on batches of pairs; every rank calls it.

    Args:
        config: of the run.
        network: sharded over `ranks`.
        ranks: the group.
    """

    def __init__(self, config: SftRunConfig, network: PolicyNetwork, ranks: Ranks) -> None:
        sft = config.sft
        self._config, self._network, self._ranks = config, network, ranks
        self._trainable = Trainable(
            network=network,
            collectives=count_collectives(network, ranks),
            accumulates=sft.memory.accumulates,
            keeps_gathered=sft.memory.keeps_gathered,
            optimizer=Optimizer(
                network,
                weight_decay=sft.weight_decay,
                grad_clip=sft.grad_clip,
                host=host_mesh(ranks) if sft.memory.offloads else None,
            ),
            schedule=Schedule(
                peak=sft.lr,
                kind=sft.lr_scheduler,
                total_steps=sft.steps,
                warmup_ratio=sft.warmup_steps_ratio,
            ),
        )
        self._num_skipped = 0

    def step(self, step: int, pairs: Sequence[Pair]) -> SftProgress:
        """Takes one optimizer step; `step` counts from 1.

        Raises:
            NumericsError: too many steps in a row had no finite loss or gradient.
        """
        ranks = self._ranks
        lengths = [
            RowLength(prompt_id=i, num_prompt_tokens=len(pair.prompt), num_response_tokens=len(pair.answer))
            for i, pair in enumerate(pairs)
        ]
        longest = max(pair.num_tokens for pair in pairs)
        budget = effective_budget(self._config.sft.max_token_len_per_gpu, ranks.device.type, longest)
        plan = plan_batch(
            lengths,
            mini_batch_sizes=[len(pairs)],
            world_size=ranks.world_size,
            token_budget=budget,
            arithmetic=arithmetic_of(self._network),
        )
        num_tokens = sum(len(pair.answer) for pair in pairs)
        (chunk,) = plan.chunks
        batches = [
            pack([_row(index, pairs[index]) for index in rows], ranks.device)
            for rows in chunk.micro_batches[ranks.rank]
        ]

        def loss(batch: MicroBatch) -> tuple[Tensor, Tensor]:
            log_probs, _ = self._network(batch)
            share = -batch.table(log_probs).where(batch.mask, 0.0).sum() / num_tokens
            return share, share.detach().double().reshape(1)

        losses = [partial(loss, batch) for batch in batches]
        outcome, sums = self._trainable.update(losses, step=step, ranks=ranks)
        self._num_skipped = 0 if outcome.taken else self._num_skipped + 1
        if self._num_skipped >= _MAX_SKIPPED:
            raise NumericsError(f"{_MAX_SKIPPED} steps in a row: {outcome.skip_reason}; lower sft.lr")
        return SftProgress(
            step=step,
            loss=float(sums[0].item()),
            grad_norm=outcome.grad_norm,
            lr=self._trainable.schedule.at(step),
        )


def train(config: SftRunConfig, environment: RankEnvironment) -> None:
    """Trains and writes the folder; the main function of one rank.

    Raises:
        DataError, ModelError, ConfigError: the data, the model or the configuration is unusable.
        NumericsError: training diverged.
    """
    settings = config.learner
    environment.use_interface(environment.master_host)
    use_threads(settings.threads, environment)
    device = choose_device(settings.device, environment, settings.devices)
    store = open_store(environment, settings.collective_timeout_s)
    ranks = form_group(environment, store, device, settings.collective_timeout_s)
    model = config.model
    outcome = check_model(
        model.path,
        longest=config.data.max_prompt_length + config.data.max_response_length,
        trust_architecture=model.trust_architecture,
    )
    log.info("self-test: %s", outcome)
    network = load_policy(
        model.path,
        ranks,
        Precision(compute=DTYPES[model.dtype]),
        options=LayerOptions.of(config.sft.memory),
        random_seed=config.seed if model.load_format == "random" else None,
    )
    pairs, num_left_out = read_pairs(config)
    _say(
        ranks,
        f"sft: {num_parameters(network):,} parameters, {len(pairs):,} pairs ({num_left_out} over-long left "
        f"out), {config.sft.steps} steps of {config.sft.batch_size} on {ranks.world_size} "
        f"{device.type} ranks",
    )
    trainer = SftTrainer(config, network, ranks)
    order = batch_indices(len(pairs), config.sft.batch_size, config.seed)
    every = max(1, config.sft.steps // _REPORTS)
    began, num_tokens = time.monotonic(), 0
    for step in range(1, config.sft.steps + 1):
        batch = [pairs[index] for index in next(order)]
        progress = trainer.step(step, batch)
        num_tokens += sum(pair.num_tokens for pair in batch)
        if step % every == 0 or step in (1, config.sft.steps):
            rate = num_tokens / (time.monotonic() - began)
            _say(
                ranks,
                f"sft: step {step}/{config.sft.steps} loss {progress.loss:.4f} "
                f"grad_norm {progress.grad_norm:.3f} lr {progress.lr:.2e} {rate:,.0f} tokens/s",
            )
    _write(config, network, ranks)
    _say(ranks, f"sft: wrote {config.sft.output} after {time.monotonic() - began:.1f} s")
    leave_group()


def _write(config: SftRunConfig, network: PolicyNetwork, ranks: Ranks) -> None:
    """Rank 0 writes a folder beside the output, then replaces the output with it."""
    tensors = gather_tensors(network, keep=ranks.rank == 0)
    if ranks.rank != 0:
        return
    model, out = config.model, Path(config.sft.output)
    unfinished = out.with_name(f".{out.name}.partial")
    _remove(unfinished)
    tokenizer = Path(model.tokenizer_path) if model.tokenizer_path else None
    write_folder(
        unfinished, tensors, source=Path(model.path), tokenizer_source=tokenizer, dtype=DTYPES[model.dtype]
    )
    _remove(out)
    unfinished.rename(out)


def _remove(folder: Path) -> None:
    """Removes a model folder; refuses a folder that holds other files."""
    if not folder.exists():
        return
    strange = [
        path.name
        for path in folder.iterdir()
        if path.suffix not in (".json", ".safetensors", ".jinja", ".model", ".txt")
    ]
    if strange:
        raise ModelError(
            f"{folder} holds {', '.join(strange[:4])}, which no model folder does; set sft.output to "
            "another path"
        )
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _row(index: int, pair: Pair) -> PackedRow:
    count = len(pair.answer)
    return PackedRow(
        index=index,
        prompt_token_ids=pair.prompt,
        response_token_ids=pair.answer,
        response_mask=np.ones(count, np.uint8),
        response_log_probs=np.zeros(count, np.float32),
    )


def _say(ranks: Ranks, line: str) -> None:
    if ranks.rank == 0:
        print(line, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Reads the command line and trains; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.learner.sft", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (YAML)")
    arguments = parser.parse_args(argv)
    environment = RankEnvironment.read()
    die_with_parent()
    setup_logging(f"sft-rank{environment.rank}", "INFO")
    try:
        train(load(SftRunConfig, arguments.config), environment)
    except PacelineError as error:
        log.error("fatal: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
