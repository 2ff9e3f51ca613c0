"""Scores a batch before the update: old log-probs, those of frozen networks, and values.

No gradient is computed. Compiled layers still build a graph, which is dropped: without one the compiler
generates other kernels, which round differently, so the on-policy ratio would not be 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from paceline.learner.batch.types import LogProbs, MicroBatch, ScoredBatch
from paceline.learner.model.decoder.experts import recorded_choices
from paceline.learner.model.loading import forget_forward_passes
from paceline.learner.model.networks import PolicyNetwork
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.stopwatch import Stopwatch


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
            flat = network(batch, temperature)[0]
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
