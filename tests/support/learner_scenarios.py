"""What groups of learner ranks do in tests, with results that can be compared over numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, PeerLostError, VersionMismatchError
from paceline.core.training import BatchRow, ChunkOrder, TrainOrder, TrainResult
from paceline.learner.batch.blobs import fetch_rows
from paceline.learner.batch.types import PackedRow, TrainingBatch
from paceline.learner.checkpoint.load import load, roll_back
from paceline.learner.checkpoint.write import CheckpointWriter
from paceline.learner.distributed.collectives import CommandError, attempt
from paceline.learner.distributed.command_loop import CommandLoop, CommandQueue
from paceline.learner.distributed.ranks import Ranks, leave_group
from paceline.learner.model.loading import as_fsdp, hugging_face_names
from paceline.learner.train import estimating
from paceline.learner.train.estimating import drawn as as_drawn
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.step import train_step
from paceline.learner.train.updating.losses import PolicyLoss
from paceline.learner.train.work_ahead import work_ahead
from support.learner_fakes import POLICY, DictBlobs, make_batch, run_config

GROUP_ESTIMATORS = ("grpo", "reinforce_plus_plus_baseline")
MORE_GROUP_ESTIMATORS = ("dr_grpo", "rloo", "opo", "gpg", "pass_at_k")


def take_step(learner: Learner, step: int, **batch: Any) -> TrainResult:
    """One training step on a made-up batch."""
    rows, blobs = make_batch(step=step, seed=1, **batch)
    order = TrainOrder(step=step, policy=POLICY, rows=rows)
    store = DictBlobs(blobs)
    return train_step(
        learner,
        order,
        lambda wanted: attempt(
            learner.ranks,
            lambda: fetch_rows(
                store,
                dict(enumerate(rows)),
                wanted,
                policy=POLICY,
                vocab_size=learner.vocab_size,
                has_teacher=learner.config.algorithm.teacher is not None,
            ),
        ),
    )


def numbers(result: TrainResult) -> dict[str, float]:
    """The metrics but for times."""
    return {
        name: value for name, value in result.metrics.items() if not name.startswith(("timing_s/", "perf/"))
    }


def train(learner: Learner, first: int, last: int) -> list[dict[str, float]]:
    """Steps first..last."""
    return [numbers(take_step(learner, step)) for step in range(first, last + 1)]


def config_of(model: str) -> RunConfig:
    """The run of all scenarios."""
    return run_config(Path(model))


def save(learner: Learner, folder: Path | str, *, step: int, controller_state: bytes = b"{}") -> None:
    """Writes a checkpoint and waits until it is complete."""
    CheckpointWriter(learner).save(folder, step=step, controller_state=controller_state).result(timeout=120)


def three_steps_with_a_checkpoint(ranks: Ranks, model: str, folder: str) -> list[dict[str, float]]:
    """Trains three steps and saves after the first; the others do not wait for it."""
    learner = Learner.build(config_of(model), ranks)
    metrics = train(learner, 1, 1)
    writer = CheckpointWriter(learner)
    written = writer.save(Path(folder), step=1, controller_state=b'{"cursor": 3}')
    metrics += train(learner, 2, 3)
    assert written.result(timeout=120) > 0
    return metrics


def resumed_steps(ranks: Ranks, model: str, folder: str) -> list[dict[str, float]]:
    """Steps two and three from the checkpoint."""
    learner = Learner.build(config_of(model), ranks)
    load(learner, Path(folder))
    return train(learner, 2, 3)


def remax_step(ranks: Ranks, model: str) -> dict[str, float]:
    """A step against greedy scores."""
    algorithm = {"adv_estimator": "remax", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}}
    learner = Learner.build(run_config(Path(model), algorithm=algorithm), ranks)
    return numbers(take_step(learner, 1, with_greedy=True))


def placed_on_tokens(
    ranks: Ranks, model: str, *estimators: str
) -> dict[str, tuple[dict[str, float], dict[int, list[float]]]]:
    """By estimator, a step with rewards on tokens: its metrics, and the advantages of this rank's rows.

    Every second prompt's samples are all worth 1.
    """
    rows, blobs = make_batch(step=1, seed=1)
    drawn = np.random.default_rng(0)
    placed = tuple(
        replace(
            row,
            reward=1.0 if row.trajectory_id.prompt_id % 2 else row.reward,
            token_rewards=tuple(enumerate(drawn.normal(size=row.num_response_tokens).tolist())),
        )
        for row in rows
    )
    outcomes = {}
    for name in estimators:
        advantages: dict[int, list[float]] = {}

        def note(part: TrainingBatch, *rest: Any, into: Any = advantages) -> Any:
            into |= dict(zip(part.batch.rows, part.advantages.tolist(), strict=False))
            return as_drawn(part, *rest)

        algorithm = {"adv_estimator": name, "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}}
        learner = Learner.build(run_config(Path(model), algorithm=algorithm), ranks)
        with (
            mock.patch(f"{__name__}.make_batch", return_value=(placed, blobs)),
            mock.patch.object(estimating, "drawn", note),
        ):
            outcomes[name] = numbers(take_step(learner, 1)), advantages
    return outcomes


def going_back(ranks: Ranks, model: str, folder: str) -> list[dict[str, float]]:
    """Step 3 after a rollback from 2 to 1, and by a fresh learner with that checkpoint and version 2."""
    learner = Learner.build(config_of(model), ranks)
    train(learner, 1, 1)
    save(learner, Path(folder), step=1)
    train(learner, 2, 2)
    roll_back(learner, Path(folder))
    fresh = Learner.build(config_of(model), ranks)
    load(fresh, Path(folder))
    fresh.version = learner.version
    return [numbers(take_step(trained, 3)) for trained in (learner, fresh)]


def one_rank_has_bad_rows(ranks: Ranks, model: str) -> list[str]:
    """Rank 1 finds a stale row: every rank reports it, nothing has changed, and the step can be repeated."""
    learner = Learner.build(config_of(model), ranks)

    def act() -> None:
        if ranks.world.rank == 1:
            raise VersionMismatchError("a stale row")

    try:
        attempt(ranks, act)
    except CommandError as error:
        said = f"{type(error.cause).__name__}: {error}"
    else:
        said = "nothing"
    return [said, str(learner.version), str(take_step(learner, 1).step)]


class NanGradient(torch.autograd.Function):
    """The identity, but for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * float("nan")


def one_rank_has_a_bad_gradient(ranks: Ranks, model: str) -> list[dict[str, float]]:
    """Two steps; in the first, the last rank's gradient of the first mini-batch is NaN."""
    learner = Learner.build(config_of(model), ranks)
    honest, poisoned_steps = PolicyLoss.__call__, {0} if ranks.world.rank == ranks.world.size - 1 else set()

    def poisoned(self: PolicyLoss, *arguments: Any) -> Any:
        loss, sums = honest(self, *arguments)
        if learner.version in poisoned_steps:
            poisoned_steps.remove(learner.version)
            loss = NanGradient.apply(loss)
        return loss, sums

    with mock.patch.object(PolicyLoss, "__call__", poisoned):
        return train(learner, 1, 2)


def one_rank_fails(ranks: Ranks) -> str:
    """Rank 1 fails for good while rank 0 waits for it in a collective; what each rank's loop ends with."""

    def fail(arguments: Any) -> float:
        if ranks.world.rank == 1:
            raise ZeroDivisionError("by nothing")
        return float(ranks.world.all_sum(torch.ones(1)).item())

    queue = CommandQueue() if ranks.world.rank == 0 else None
    future = None if queue is None else queue.submit("fail", {})
    try:
        CommandLoop(ranks, lambda: {"fail": fail}, queue).run()
    except (PeerLostError, ZeroDivisionError) as error:
        leave_group()  # what the end of the process would do: the connections break
        told = "" if future is None else f" / {future.exception(timeout=120)}"
        return f"{type(error).__name__}: {error}{told}"
    return "nothing"


def steps_that_stray(ranks: Ranks, model: str) -> list[str]:
    """What each rank's step ends with where an own algorithm goes on differently on rank 1."""
    said = []
    for how in ("well", "updates", "ends", "raises"):
        algorithm = {
            "type": "custom",
            "path": "support.own_steps:Straying",
            "options": {"how": how},
            "adv_estimator": "grpo",
            "use_kl_in_reward": False,
            "kl_ctrl": {"type": "fixed"},
        }
        with mock.patch("paceline.learner.train.state.learner.try_algorithm"):
            learner = Learner.build(run_config(Path(model), algorithm=algorithm), ranks)
        try:
            said.append(f"step {take_step(learner, 1).step}")
        except ConfigError as error:
            said.append(str(error))
    return said


def steps_with_work_ahead(ranks: Ranks, model: str) -> list[list[Any]]:
    """Two steps with nothing done ahead, and with what every rank can do; metrics and a sum of weights."""
    runs = []
    for memory in ({"accumulate": True}, {"accumulate": False, "keep_gathered": True}):
        for chunks in ((), ((1, False), (0, True), (1, True), (2, True), (5, False))):
            learner = Learner.build(
                run_config(
                    Path(model),
                    algorithm={
                        "adv_estimator": "grpo",
                        "use_kl_in_reward": False,
                        "kl_ctrl": {"type": "fixed"},
                    },
                    actor={"ppo_mini_batch_size": 4, "use_kl_loss": True, "memory": memory},
                    barrier={"work_ahead": "gradients", "prompts_per_chunk": 1},
                ),
                ranks,
            )
            results = []
            for step in (1, 2):
                work_on_chunks(learner, step, chunks)
                result = take_step(learner, step)
                assert (result.metrics["ahead/gradient_share"] > 0) == bool(chunks)
                metrics = {name: v for name, v in numbers(result).items() if not name.startswith("ahead/")}
                results += [metrics, weight_sums(learner)]
            runs.append(results)
    return runs


def work_on_chunks(learner: Learner, step: int, chunks: Sequence[tuple[int, bool]]) -> None:
    """Works ahead on chunks of `take_step`'s batch: numbers, and whether with the gradient."""
    rows, blobs = make_batch(step=step, seed=1)
    store, width = DictBlobs(blobs), learner.config.prompts_per_chunk * learner.config.rollout.n
    for number, with_gradient in chunks:
        own = dict(list(enumerate(rows))[number * width : (number + 1) * width])
        order = ChunkOrder(
            step=step,
            policy=POLICY,
            first_row=number * width,
            rows=tuple(own.values()),
            with_gradient=with_gradient,
        )

        def fetch(wanted: Sequence[int], own: dict[int, BatchRow] = own) -> dict[int, PackedRow]:
            return attempt(
                learner.ranks,
                lambda: fetch_rows(store, own, wanted, policy=POLICY, vocab_size=learner.vocab_size),
            )

        work_ahead(learner, order, fetch)


def weight_sums(learner: Learner) -> list[float]:
    """A number per parameter that a change of any weight changes."""
    as_fsdp(learner.actor.network).reshard()
    weights = [
        weight.full_tensor().detach().double() for _, weight in hugging_face_names(learner.actor.network)
    ]
    return [float((weight.flatten() * torch.arange(1, weight.numel() + 1)).sum()) for weight in weights]


def everything(ranks: Ranks, model: str, folder: str) -> list[Any]:
    """All scenarios in one set of processes, which take longer to start than the scenarios to run."""
    return [
        three_steps_with_a_checkpoint(ranks, model, folder),
        resumed_steps(ranks, model, folder),
        remax_step(ranks, model),
        placed_on_tokens(ranks, model, *GROUP_ESTIMATORS),
        going_back(ranks, model, f"{folder}_again"),
        steps_with_work_ahead(ranks, model),
        steps_that_stray(ranks, model),
        one_rank_has_a_bad_gradient(ranks, model),
        one_rank_has_bad_rows(ranks, model),
        one_rank_fails(ranks),
    ]
