"""Shared parts of `paceline sft`, `rm` and `dpo`: ranks, batches of pairs, optimizer, model folder."""

from __future__ import annotations

import argparse
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.config.load import load
from paceline.config.services import LearnerConfig
from paceline.config.training.tuning import DpoConfig, PairDataConfig, TuningConfig
from paceline.config.tuning import TuningRunConfig
from paceline.core.errors import DataError, ModelError, NumericsError, PacelineError
from paceline.data.prompts import load_tokenizer
from paceline.learner.batch.pack import pack
from paceline.learner.batch.planning.arithmetic import RowLength
from paceline.learner.batch.planning.plan import effective_budget, plan_chunk
from paceline.learner.batch.types import MicroBatch, PackedRow
from paceline.learner.checkpoint.state import State, state_of_trainable
from paceline.learner.checkpoint.tuning_checkpoints import TuningCheckpoints
from paceline.learner.distributed.catching_up import count_collectives
from paceline.learner.distributed.ranks import (
    RankEnvironment,
    Ranks,
    join_group,
    leave_group,
    open_store,
)
from paceline.learner.model.flops import arithmetic_of
from paceline.learner.model.folder import (
    ADAPTERS,
    Tensors,
    gathered_tensors,
    write_adapters,
    write_folder,
    write_from_ranks,
)
from paceline.learner.model.loading import forget_forward_passes
from paceline.learner.model.lora import is_adapter, with_adapters
from paceline.learner.model.networks import PolicyNetwork, ValueNetwork, num_parameters
from paceline.learner.model.self_test import check_model
from paceline.learner.train.state.learner import DTYPES
from paceline.learner.train.state.optimizer import Optimizer, PartLoss, Trainable
from paceline.learner.train.state.schedule import Schedule
from paceline.service.observability.logs import setup_logging
from paceline.service.process import die_with_parent

log = logging.getLogger(__name__)

_REPORTS = 20
"""About how many steps report a line, in addition to the first and the last."""
_MAX_SKIPPED = 10

C = TypeVar("C", bound=TuningRunConfig)
N = TypeVar("N", bound=PolicyNetwork | ValueNetwork)


def form_ranks(settings: LearnerConfig, environment: RankEnvironment) -> Ranks:
    """Forms the group of this rank."""
    environment.use_interface(environment.master_host)
    return join_group(settings, environment, open_store(environment, settings.collective_timeout_s))


def check(config: TuningRunConfig) -> None:
    """Runs the self-test of the model.

    Raises:
        ModelError: the test failed.
    """
    model, data = config.model, config.data
    longest = data.max_prompt_length + data.max_response_length
    outcome = check_model(model.path, longest=longest, trust_architecture=model.trust_architecture)
    log.info("self-test: %s", outcome)


def tokenizer_of(config: TuningRunConfig) -> Any:
    """Loads the tokenizer of the model.

    Raises:
        ModelError: the tokenizer is unusable, or has no end-of-sequence token.
    """
    tokenizer: Any = load_tokenizer(config.model.tokenizer_path or config.model.path)
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "the tokenizer has no end-of-sequence token, so answers could never end; set eos_token"
        )
    return tokenizer


def require_some(num_fitting: int, num_rows: int, data: PairDataConfig) -> None:
    """Raises DataError if no pair fits the length limits."""
    if not num_fitting:
        raise DataError(
            f"none of the {num_rows} pairs fits data.max_prompt_length={data.max_prompt_length} and "
            f"data.max_response_length={data.max_response_length}; raise them"
        )


def batch_indices(num_pairs: int, batch_size: int, seed: int, *, section: str = "sft") -> Iterator[list[int]]:
    """Yields endless batches; an epoch visits each pair at most once, in an order from (seed, epoch).

    Raises:
        DataError: there are fewer pairs than one batch needs.
    """
    if num_pairs < batch_size:
        raise DataError(
            f"{num_pairs} pairs cannot fill {section}.batch_size={batch_size}; lower it or add pairs"
        )
    epoch = 0
    while True:
        order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_pairs)
        for first in range(0, num_pairs - batch_size + 1, batch_size):
            yield [int(index) for index in order[first : first + batch_size]]
        epoch += 1


class PairTrainer(Generic[N]):
    """A base class of trainers, whose micro-batches do not separate a pair's rows; every rank calls it."""

    def __init__(self, tuning: TuningConfig, network: N, ranks: Ranks) -> None:
        self.network, self._ranks = network, ranks
        self._token_budget = tuning.max_token_len_per_gpu
        self._trainable = Trainable(
            network=network,
            collectives=count_collectives(network, ranks),
            accumulates=tuning.memory.accumulates,
            keeps_gathered=tuning.memory.keeps_gathered,
            optimizer=Optimizer(
                network,
                weight_decay=tuning.weight_decay,
                grad_clip=tuning.grad_clip,
                offloads=tuning.memory.offloads,
            ),
            schedule=Schedule(
                peak=tuning.lr,
                kind=tuning.lr_scheduler,
                total_steps=tuning.steps,
                warmup_ratio=tuning.warmup_steps_ratio,
            ),
        )
        self._trainable.optimizer.make_averages()
        self._num_skipped = 0

    def state(self) -> State:
        """Returns the state of network and optimizer."""
        return state_of_trainable("network", self._trainable)

    def go_on(self, numbers: Mapping[str, int]) -> None:
        """Continues from the `numbers` of an earlier process."""
        self._num_skipped = numbers["num_skipped"]

    @property
    def numbers(self) -> dict[str, int]:
        """Returns the numbers needed to continue a training, in addition to its state."""
        return {"num_skipped": self._num_skipped}

    def _update(self, losses: Sequence[PartLoss], *, step: int) -> tuple[list[float], dict[str, float]]:
        """Takes an optimizer step, counted from 1; returns the sums over ranks, grad_norm and lr.

        Raises:
            NumericsError: too many steps in a row had no finite loss or gradient.
        """
        outcome, sums = self._trainable.update(losses, step=step, ranks=self._ranks)
        self._num_skipped = 0 if outcome.taken else self._num_skipped + 1
        if self._num_skipped >= _MAX_SKIPPED:
            raise NumericsError(f"{_MAX_SKIPPED} steps in a row: {outcome.skip_reason}; lower the rate (lr)")
        return sums.tolist(), {"grad_norm": outcome.grad_norm, "lr": self._trainable.schedule.at(step)}

    def _cut(
        self, lengths: Iterable[tuple[int, ...]], make_rows: Callable[[int], list[PackedRow]]
    ) -> list[MicroBatch]:
        """Returns this rank's micro-batches of pairs.

        Args:
            lengths: numbers of prompt and response tokens, and of the patches of images if there are any.
        """
        rows = [
            RowLength(
                prompt_id=place,
                num_prompt_tokens=prompt,
                num_response_tokens=response,
                num_patches=sum(patches),
            )
            for place, (prompt, response, *patches) in enumerate(lengths)
        ]
        context, device = self._ranks.context, self._ranks.device
        budget = self._token_budget * (1 if context is None else context.size)
        chunk = plan_chunk(
            rows,
            0,
            num_data_ranks=self._ranks.data.size,
            token_budget=effective_budget(budget, device.type, max(row.num_budgeted for row in rows)),
            arithmetic=arithmetic_of(self.network),
        )
        return [
            pack([row for index in indices for row in make_rows(index)], device)
            for indices in chunk.micro_batches[self._ranks.data.rank]
        ]

    @torch.no_grad()
    def _total(self, batches: Iterable[MicroBatch], number_of: Callable[[MicroBatch], Tensor]) -> float:
        """Returns the sum of a number of each micro-batch, over all ranks."""
        total = torch.zeros(1, dtype=torch.float64, device=self._ranks.device)
        for batch in batches:
            total += number_of(batch)
        forget_forward_passes(self.network)
        return float(self._ranks.data.all_sum(total).item())


def in_words(progress: Mapping[str, float]) -> str:
    """Returns the numbers of a step as one line."""
    forms = {"loss": ".4f", "lr": ".2e"}
    return " ".join(f"{name} {value:{forms.get(name, '.3f')}}" for name, value in progress.items())


def take_steps(
    config: TuningRunConfig,
    section: TuningConfig,
    trainer: PairTrainer[N],
    num_pairs: int,
    take_step: Callable[[int, list[int]], str],
    *,
    name: str,
    ranks: Ranks,
) -> TuningCheckpoints:
    """Takes all steps, or those left of an interrupted training; every rank calls it.

    Args:
        take_step: takes step `number` on the pairs with these indices; returns a report line.

    Returns:
        The checkpoints, to be removed once the model is written.

    Raises:
        CheckpointError: the checkpoints belong to another training.
        DataError: there are too few pairs for a batch.
    """
    root = Path(section.output)
    checkpoints = TuningCheckpoints(
        root.with_name(root.name + ".checkpoints"),
        trainer.state(),
        identity={"config": _identity(config, section, name), "num_pairs": num_pairs},
        save_freq=section.save_freq,
        ranks=ranks,
    )
    done, numbers = checkpoints.load()
    if done:
        trainer.go_on(numbers)
        say(ranks, f"{name}: goes on after step {done}")
    order = batch_indices(num_pairs, section.batch_size, config.seed, section=name)
    for step, indices in enumerate(islice(order, done, section.steps), done + 1):
        line = take_step(step, indices)
        checkpoints.after(step, trainer.numbers)
        if step % max(1, section.steps // _REPORTS) == 0 or step in (1, section.steps):
            say(ranks, f"{name}: step {step}/{section.steps} {line}")
    return checkpoints


def _identity(config: TuningRunConfig, section: TuningConfig, name: str) -> dict[str, Any]:
    """Returns the settings that determine a training's numbers: without ranks and memory settings."""
    own = section.model_dump(
        mode="json", exclude={"output", "memory", "max_token_len_per_gpu", "save_freq", "val_files"}
    )
    return {**config.model_dump(mode="json", include={"data", "model", "seed"}), name: own}


def say(ranks: Ranks, line: str) -> None:
    """Prints a line, once for all ranks."""
    if ranks.world.rank == 0:
        print(line, flush=True)


def announce(
    network: PolicyNetwork | ValueNetwork,
    section: TuningConfig,
    num_pairs: int,
    num_left_out: int,
    *,
    name: str,
    ranks: Ranks,
) -> None:
    """Prints what is about to be trained, on how much and where."""
    loss = f" by {section.loss}" if isinstance(section, DpoConfig) else ""
    scores = "; the starting model scores them first" if isinstance(section, DpoConfig) else ""
    say(
        ranks,
        f"{name}: {num_parameters(network):,} parameters, {num_pairs:,} pairs ({num_left_out} over-long left "
        f"out), {section.steps} steps of {section.batch_size}{loss} on {ranks.world.size} "
        f"{ranks.device.type} ranks{scores}",
    )


def complete(
    config: TuningRunConfig,
    section: TuningConfig,
    trainer: PairTrainer[N],
    num_pairs: int,
    take_step: Callable[[int, list[int]], str],
    *,
    held_out: Callable[[], str],
    name: str,
    ranks: Ranks,
) -> None:
    """Takes the steps, reports on held-out pairs if there are any, and writes the model; leaves the group.

    Args:
        take_step: as in `take_steps`; raises as it does.
        held_out: returns the report on the pairs of `val_files`.
    """
    began = time.monotonic()
    checkpoints = take_steps(config, section, trainer, num_pairs, take_step, name=name, ranks=ranks)
    if section.val_files:
        say(ranks, f"{name}: {held_out()} held-out pairs")
    _write_model(config, trainer.network, ranks, section.output, key=f"{name}.output")
    checkpoints.remove()
    say(ranks, f"{name}: wrote {section.output} after {time.monotonic() - began:.1f} s")
    leave_group()


def _write_model(
    config: TuningRunConfig, network: PolicyNetwork | ValueNetwork, ranks: Ranks, output: str, *, key: str
) -> None:
    """Writes the trained model as a folder; adapters are merged, and also written to ADAPTERS.

    Args:
        ranks: the group; every rank calls it.
        key: the configuration key that names `output`.
    """
    model, lora = config.model, config.model.lora
    keep = ranks.world.rank == 0
    adapters = dict(gathered_tensors(network, keep=keep, only=is_adapter)) if lora else {}

    def write_all(tensors: Tensors, out: Path) -> None:
        write_folder(
            out,
            ((name.replace("value_head.", "score."), x) for name, x in tensors if not is_adapter(name)),
            source=Path(model.path),
            tokenizer_source=Path(model.tokenizer_path) if model.tokenizer_path else None,
            dtype=DTYPES[model.dtype],
            is_reward_model=isinstance(network, ValueNetwork),
        )
        if lora is not None:
            write_adapters(out / ADAPTERS, adapters, lora=lora, base=model.path)

    def write(tensors: Tensors) -> None:
        _replace_folder(Path(output), partial(write_all, tensors), key=key)

    with with_adapters(network) if lora else nullcontext():
        write_from_ranks(network, ranks, write)


def _replace_folder(out: Path, write: Callable[[Path], None], *, key: str) -> None:
    """Writes a folder next to `out`, then replaces `out` by it.

    Args:
        key: the configuration key that names `out`.

    Raises:
        ModelError: `out` holds files that do not belong to a model folder.
    """
    unfinished = out.with_name(f".{out.name}.partial")
    _remove(unfinished, key)
    write(unfinished)
    _remove(out, key)
    unfinished.rename(out)


def _remove(folder: Path, key: str) -> None:
    """Removes a model folder; refuses a folder that holds other files."""
    if not folder.exists():
        return
    strange = [
        path.name
        for path in folder.iterdir()
        if path.suffix not in (".json", ".safetensors", ".jinja", ".model", ".txt") and path.name != ADAPTERS
    ]
    if strange:
        raise ModelError(
            f"{folder} holds {', '.join(strange[:4])}, which does not belong to a model folder; set {key} to "
            "another path"
        )
    shutil.rmtree(folder)


def run_rank(
    name: str, kind: type[C], train: Callable[[C, RankEnvironment], None], argv: Sequence[str] | None
) -> int:
    """Runs a rank's process: reads the command line and trains; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m paceline.learner.{name}")
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (YAML)")
    arguments = parser.parse_args(argv)
    environment = RankEnvironment.read()
    die_with_parent()
    setup_logging(f"{name}-rank{environment.rank}", "INFO")
    try:
        train(load(kind, arguments.config), environment)
    except PacelineError as error:
        log.error("fatal: %s", error)
        return 1
    return 0
