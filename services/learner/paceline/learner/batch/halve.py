"""Splits a micro-batch that did not fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import PackedRow, TrainingBatch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Halves:
    """A micro-batch and its halves; `rows` are the places of each half's rows in the tables of the `part`."""

    part: TrainingBatch
    halves: tuple[TrainingBatch, TrainingBatch]
    rows: tuple[list[int], list[int]]

    @classmethod
    def of(cls, part: TrainingBatch) -> Halves:
        """Splits by tokens and keeps neighbours together; a single row is paired with a filler.

        Rows that are in no table, because resampling did not draw them, are left out.
        """
        drawn = set(part.batch.rows)
        sources = [row for row in part.batch.sources if row.index in drawn]
        ends = list(accumulate(len(row.prompt_token_ids) + len(row.response_token_ids) for row in sources))
        first = max(1, sum(2 * end <= ends[-1] for end in ends)) if ends else 0
        cut = [_half(part, own) for own in (sources[:first], sources[first:])]
        return cls(part=part, halves=(cut[0][0], cut[1][0]), rows=(cut[0][1], cut[1][1]))

    def hand_back(self) -> None:
        """Copies log-probs that the halves' forward passes computed back to the part."""
        for name in self.halves[0].log_probs.keys() - self.part.log_probs.keys():
            table = torch.zeros(self.part.batch.mask.shape, device=self.part.batch.mask.device)
            for half, rows in zip(self.halves, self.rows, strict=True):
                own = half.log_probs[name]
                if rows:
                    table[rows, : own.shape[1]] = own.to(table.dtype)
            self.part.log_probs[name] = table


def _half(part: TrainingBatch, sources: Sequence[PackedRow]) -> tuple[TrainingBatch, list[int]]:
    batch = part.batch
    place_of = {row.index: place for place, row in enumerate(sources)}
    rows = [place for place, index in enumerate(batch.rows) if index in place_of]
    packed = pack(sources, batch.mask.device, share_prompts=batch.share_prompts)
    places = [place_of[batch.rows[row]] for row in rows]
    if places != list(range(len(sources))):
        packed = packed.with_rows(torch.tensor(places, device=batch.mask.device))
    shape = packed.mask.shape

    def pick(table: Tensor) -> Tensor:
        if not rows:
            return table.new_zeros(shape[: table.dim()])
        return table[rows, : shape[1]] if table.dim() > 1 else table[rows]

    return part.with_rows(packed, pick), rows
