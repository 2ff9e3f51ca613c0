"""Cuts a micro-batch that did not fit into memory in two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import OldLogProbs, PackedRow, TrainingBatch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """A micro-batch with the tokens that a covariance loss selected in it, (B, R) or None."""

    batch: TrainingBatch
    selected: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Halves:
    """A part and its two halves; `rows` are the places of each half's rows in the part's tables."""

    part: Part
    halves: tuple[Part, Part]
    rows: tuple[list[int], list[int]]

    @classmethod
    def of(cls, part: Part) -> Halves:
        """Halves by tokens, neighbours together; a single row stands beside a filler.

        Rows that no table has, as resampling left them out, are left out.
        """
        drawn = set(part.batch.batch.rows)
        sources = [row for row in part.batch.batch.sources if row.index in drawn]
        ends = list(accumulate(len(row.prompt_token_ids) + len(row.response_token_ids) for row in sources))
        first = max(1, sum(2 * end <= ends[-1] for end in ends)) if ends else 0
        cut = [_half(part, own) for own in (sources[:first], sources[first:])]
        return cls(part=part, halves=(cut[0][0], cut[1][0]), rows=(cut[0][1], cut[1][1]))

    def hand_back(self) -> None:
        """Gives the part the old log-probs that its halves took from their forward passes."""
        old = self.part.batch.old_log_probs
        if old.is_known:
            return
        table = torch.zeros(self.part.batch.batch.mask.shape, device=self.part.batch.batch.mask.device)
        for half, rows in zip(self.halves, self.rows, strict=True):
            own = half.batch.old_log_probs.table
            if rows:
                table[rows, : own.shape[1]] = own.to(table.dtype)
        old.or_take(table)


def _half(part: Part, sources: Sequence[PackedRow]) -> tuple[Part, list[int]]:
    parent = part.batch
    batch = parent.batch
    place_of = {row.index: place for place, row in enumerate(sources)}
    rows = [place for place, index in enumerate(batch.rows) if index in place_of]
    packed = pack(sources, batch.mask.device, share_prompts=batch.share_prompts)
    places = [place_of[batch.rows[row]] for row in rows]
    if places != list(range(len(sources))):
        packed = packed.with_rows(torch.tensor(places, device=batch.mask.device))
    width = packed.mask.shape[1]

    def cut(table: Tensor) -> Tensor:
        if not rows:
            return table.new_zeros(packed.mask.shape)
        return table[rows, :width]

    def cut_present(table: Tensor | None) -> Tensor | None:
        return None if table is None else cut(table)

    old = parent.old_log_probs
    return Part(
        batch=TrainingBatch(
            batch=packed,
            old_log_probs=OldLogProbs(cut(old.table)) if old.is_known else OldLogProbs(),
            ref_log_probs=cut_present(parent.ref_log_probs),
            values=cut_present(parent.values),
            scores=parent.scores[rows] if rows else parent.scores.new_zeros(1),
            advantages=cut(parent.advantages),
            returns=cut_present(parent.returns),
            weights=cut_present(parent.weights),
        ),
        selected=cut_present(part.selected),
    ), rows
