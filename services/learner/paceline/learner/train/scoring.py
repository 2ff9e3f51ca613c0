"""Plans, fetches and scores the chunks of a step on a rank: old and frozen networks' log-probs, and values.

    plan -> fetch -> pack -> (the first chunk that shares prompts: check) -> score

The steps are the same for a whole batch and for a single chunk. No gradient is computed. Compiled layers
still build a graph, which is dropped: without one the compiler generates other kernels, which round
differently, so the on-policy ratio would not be 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from paceline.core.training import BatchRow, TrainOrder
from paceline.learner.batch.pack import pack
from paceline.learner.batch.planning.arithmetic import Arithmetic, RowLength
from paceline.learner.batch.planning.plan import BatchPlan, Chunk, effective_budget, plan_batch, plan_chunk
from paceline.learner.batch.types import LogProbs, MicroBatch, PackedRow, ScoredBatch
from paceline.learner.model.decoder.experts import recorded_choices
from paceline.learner.model.flops import arithmetic_of
from paceline.learner.model.loading import forget_forward_passes
from paceline.learner.model.networks import PolicyNetwork
from paceline.learner.train.state.ahead import ScoredChunk
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.stopwatch import Stopwatch

Fetch = Callable[[Sequence[int]], dict[int, PackedRow]]
"""Fetches rows by their places in the batch; raises on every rank if any rank's rows are unusable."""


class Planner:
    """Plans a step, or a chunk of it."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.arithmetic: Arithmetic = arithmetic_of(learner.actor.network)

    def step(self, rows: Sequence[BatchRow]) -> BatchPlan:
        """Plans a complete batch; raises like `plan_batch`."""
        width = self._learner.config.prompts_per_chunk
        return plan_batch(lengths(rows), prompts_per_chunk=width, make=self._chunk)

    def chunk(self, rows: Sequence[BatchRow], first_row: int) -> Chunk:
        """Plans the chunk of these rows, which begins at place `first_row`; raises ConfigError."""
        return self._chunk(lengths(rows), first_row)

    def budget(self, rows: Sequence[RowLength]) -> int:
        """Returns the token budget of a chunk's micro-batches."""
        learner, longest = self._learner, max(row.num_budgeted for row in rows)
        given = learner.config.micro_batch_tokens
        return learner.memory.budget(effective_budget(given, learner.ranks.device.type, longest), longest)

    def _chunk(self, rows: Sequence[RowLength], first_row: int) -> Chunk:
        make = partial(
            plan_chunk,
            rows,
            first_row,
            num_data_ranks=self._learner.ranks.data.size,
            token_budget=self.budget(rows),
            arithmetic=self.arithmetic,
        )
        return self._learner.shared_prompts.choose(lambda share: make(share_prompts=share))


def lengths(rows: Sequence[BatchRow]) -> list[RowLength]:
    """Returns the lengths that a plan needs of rows."""
    return [
        RowLength(
            prompt_id=row.trajectory_id.prompt_id,
            num_prompt_tokens=row.num_prompt_tokens,
            num_response_tokens=row.num_response_tokens,
            num_patches=row.num_patches,
        )
        for row in rows
    ]


def critic_alone(learner: Learner, step: int) -> bool:
    """Returns whether this is a step of the critic's warm-up, which does not update the policy."""
    return learner.critic is not None and step <= learner.config.critic.warmup


def num_unscored(learner: Learner, step: int) -> int:
    """Returns the number of first chunks whose old log-probs come from the update itself."""
    config = learner.config
    is_audit = (step - 1) % config.actor.ratio_audit_freq == 0
    if is_audit or config.needs_all_old_log_probs or critic_alone(learner, step):
        return 0
    return config.actor.ppo_mini_batch_size // config.prompts_per_chunk


def score_chunks(
    learner: Learner,
    step: int,
    make: Callable[[Planner], Mapping[int, Chunk]],
    rows: Mapping[int, BatchRow],
    fetch: Fetch,
    stopwatch: Stopwatch,
) -> list[ScoredChunk]:
    """Scores chunks of a step except those already scored ahead; every rank calls it.

    Args:
        make: plans the chunks, by their numbers in the step.
        rows: rows of the chunks, by place in the batch.
    """
    chunks, ahead, own = _gather(learner, make, rows, fetch, stopwatch)
    first = num_unscored(learner, step)
    batches = [(number < first, batch) for number, parts in own.items() for batch in parts]
    scored = iter(
        score(
            learner,
            [batch for _, batch in batches],
            stopwatch,
            without_old=[is_unscored for is_unscored, _ in batches],
        )
    )
    return [
        ahead[number] or ScoredChunk(chunk=chunk, parts=tuple(next(scored) for _ in own[number]))
        for number, chunk in chunks.items()
    ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredStep:
    """A step's scored chunks, and their plan."""

    plan: BatchPlan
    chunks: Sequence[ScoredChunk]

    @property
    def parts(self) -> list[ScoredBatch]:
        """This rank's micro-batches, in the plan's order."""
        return [part for chunk in self.chunks for part in chunk.parts]

    def first(self, num_prompts: int) -> list[ScoredChunk]:
        """Returns the chunks of the first mini-batch, which has `num_prompts` prompts."""
        return [self.chunks[index] for index in self.plan.mini_batches(num_prompts)[0]]


def score_step(learner: Learner, order: TrainOrder, fetch: Fetch, stopwatch: Stopwatch) -> ScoredStep:
    """Scores all chunks of a step except those already scored ahead; every rank calls it."""
    chunks = score_chunks(
        learner,
        order.step,
        lambda planner: dict(enumerate(planner.step(order.rows).chunks)),
        dict(enumerate(order.rows)),
        fetch,
        stopwatch,
    )
    width = learner.config.prompts_per_chunk
    plan = BatchPlan(chunks=tuple(chunk.chunk for chunk in chunks), prompts_per_chunk=width)
    return ScoredStep(plan=plan, chunks=chunks)


def _gather(
    learner: Learner,
    make: Callable[[Planner], Mapping[int, Chunk]],
    rows: Mapping[int, BatchRow],
    fetch: Fetch,
    stopwatch: Stopwatch,
) -> tuple[Mapping[int, Chunk], Mapping[int, ScoredChunk | None], Mapping[int, Sequence[MicroBatch]]]:
    """Returns by number: the chunks, those that were scored ahead, and micro-batches of the others."""
    ranks, sharing, planner = learner.ranks, learner.shared_prompts, Planner(learner)
    while True:
        with stopwatch.phase("fetch"):
            chunks = make(planner)
            earlier = {
                number: learner.ahead.find(chunk, [rows[place] for place in chunk.rows])
                for number, chunk in chunks.items()
            }
            own = {
                number: chunk.micro_batches[ranks.data.rank]
                for number, chunk in chunks.items()
                if earlier[number] is None
            }
            # If one rank has nothing to fetch, no rank has.
            packed = fetch([row for parts in own.values() for part in parts for row in part]) if own else {}
            batches = {
                number: [
                    pack(
                        [packed[row] for row in part],
                        ranks.device,
                        share_prompts=chunks[number].share_prompts,
                    )
                    for part in parts
                ]
                for number, parts in own.items()
            }
        shared = next((number for number in own if chunks[number].share_prompts), None)
        is_refused = False
        if shared is not None and sharing.is_unchecked:
            with stopwatch.phase("shared_prompts"):
                learner.ahead.drop_gradient()  # the check would destroy the gradient
                budget = planner.budget(lengths([rows[place] for place in chunks[shared].rows]))
                is_refused = sharing.refuses(learner.actor, batches[shared][0].sources, ranks, budget)
        if not is_refused:
            return chunks, earlier, batches


def score(
    learner: Learner, batches: Sequence[MicroBatch], stopwatch: Stopwatch, *, without_old: Sequence[bool]
) -> list[ScoredBatch]:
    """Scores this rank's micro-batches by every network in use; every rank calls it.

    Micro-batches in `without_old` get no old log-probs: the update's forward pass computes them.
    """
    temperature, critic = learner.config.rollout.temperature, learner.critic
    log_probs: list[LogProbs] = [{"rollout": batch.rollout_log_probs} for batch in batches]
    to_score = [number for number, no in enumerate(without_old) if not no]
    with stopwatch.phase("old_log_prob"):
        tables = _old_log_probs(learner, [batches[number] for number in to_score])
    for number, table in zip(to_score, tables, strict=True):
        log_probs[number]["old"] = table
    for name, frozen in learner.frozen.items():
        with stopwatch.phase("ref"), frozen.present():
            tables = _log_probs_of(frozen.network, batches, temperature)
        for own, table in zip(log_probs, tables, strict=True):
            own[name] = table
    values: list[Tensor | None] = [None] * len(batches)
    if critic is not None:
        with stopwatch.phase("values"):
            values = [
                *_score_all(
                    critic.network,
                    batches,
                    lambda b: b.table(critic.network(b)),
                    with_graph=learner.config.actor.compiles,
                )
            ]
    return [
        ScoredBatch(batch=batch, log_probs=own, values=v)
        for batch, own, v in zip(batches, log_probs, values, strict=True)
    ]


def score_rest(learner: Learner, scored: Sequence[ScoredBatch]) -> None:
    """Computes old log-probs of micro-batches that no update computes; every rank calls it."""
    rest = [part for part in scored if "old" not in part.log_probs]
    for part, table in zip(rest, _old_log_probs(learner, [part.batch for part in rest]), strict=True):
        part.log_probs["old"] = table


def _old_log_probs(learner: Learner, batches: Sequence[MicroBatch]) -> list[Tensor]:
    config = learner.config
    return _log_probs_of(
        learner.actor.network, batches, config.rollout.temperature, with_graph=config.actor.compiles
    )


def _log_probs_of(
    network: PolicyNetwork, batches: Sequence[MicroBatch], temperature: float, *, with_graph: bool = False
) -> list[Tensor]:
    def log_probs(batch: MicroBatch) -> Tensor:
        # Layers whose routers record choices compile to different graphs, which the update uses.
        with recorded_choices(network.lm) if with_graph else contextlib.nullcontext():
            flat = network(batch, temperature).log_probs
        return batch.table(flat)

    return _score_all(network, batches, log_probs, with_graph=with_graph)


def _score_all(
    network: nn.Module,
    batches: Sequence[MicroBatch],
    call: Callable[[MicroBatch], Tensor],
    *,
    with_graph: bool = False,
) -> list[Tensor]:
    """Applies `call` to every micro-batch; leaves no gathered weights and no FSDP records."""
    if not batches:
        return []  # FSDP has no records of a network that never computed
    with torch.set_grad_enabled(with_graph):
        results = [call(batch).detach() for batch in batches]
    forget_forward_passes(network)
    return results
