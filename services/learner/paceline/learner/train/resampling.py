"""PF-PPO's batch: rows drawn with replacement after the advantages were made, repeated as tables and not as tokens.

A row that was drawn three times runs through the network once; its numbers stand three times in the tables that the losses
see, and its gradient comes three times from there. One that was not drawn leaves the tables. Every loss, mean and count is
then that of a batch in which the rows really are repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.config.run import RunConfig
from paceline.learner.algorithms.shaping import resample_indices
from paceline.learner.train.advantages import Prepared


def resample(
    config: RunConfig,
    prepared: Sequence[Prepared],
    *,
    scores: Sequence[float],
    group_ids: Sequence[int],
    step: int,
) -> tuple[list[Prepared], dict[str, float]]:
    """This rank's micro-batches with the rows that `algorithm.resample` draws, and its metrics.

    As many rows are drawn as the step has, from a generator seeded by (trainer.seed, step): the same on every rank.

    Args:
        config: of the run.
        prepared: this rank's micro-batches, fillers among them.
        scores: of all rows of the step.
        group_ids: prompt of all rows of the step.
        step: the training step.

    Raises:
        NumericsError: a score is not finite.
    """
    settings = config.algorithm.resample
    if settings.method == "none":
        return list(prepared), {}
    word = hashlib.blake2b(f"resample/{config.trainer.seed}/{step}".encode(), digest_size=8).digest()
    drawn = resample_indices(
        torch.tensor(scores, dtype=torch.float64),
        settings.method,
        settings.power,
        torch.tensor(group_ids, dtype=torch.int64),
        generator=torch.Generator().manual_seed(int.from_bytes(word, "big") >> 1),
    )
    counts = torch.bincount(drawn, minlength=len(scores))
    metrics = {
        "resample/distinct_share": float((counts > 0).sum()) / len(scores),
        "resample/largest_count": float(counts.max()),
        "resample/score_mean": sum(scores[index] for index in drawn.tolist()) / len(scores),
    }
    return [repeat_rows(part, counts) for part in prepared], metrics


def repeat_rows(part: Prepared, counts: Tensor) -> Prepared:
    """A micro-batch whose tables hold each row as often as `counts`, (rows of the step,), says; its tokens stay as they are."""
    rows = part.batch.rows
    if not rows:
        return part
    mine = counts[list(rows)]
    take = torch.arange(len(rows)).repeat_interleave(mine).to(part.advantages.device)

    def pick(table: Tensor | None) -> Tensor | None:
        return None if table is None else table[take]

    batch = replace(
        part.batch,
        rows=tuple(rows[index] for index in take.tolist()),
        places=part.batch.places[take],
        mask=part.batch.mask[take],
        rollout_log_probs=part.batch.rollout_log_probs[take],
    )
    return replace(
        part,
        batch=batch,
        old_log_probs=part.old_log_probs[take],
        ref_log_probs=pick(part.ref_log_probs),
        values=pick(part.values),
        advantages=part.advantages[take],
        returns=pick(part.returns),
        scores=pick(part.scores),
        selected=pick(part.selected),
        weights=pick(part.weights),
    )
