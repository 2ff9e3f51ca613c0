"""Describes a packed row's sequences to recurrent layers, which start a sequence from its prefix's state.

    tokens    P P P | S S | S S S | Q Q        first: P, Q        then: both S, from the state after P

Here P is the prefix of both sequences S, and Q is a sequence without a prefix.

A short convolution looks back over a few tokens. At the first tokens of a sequence, given by `begins`, some
of these lie in the prefix, or do not exist if there is no prefix. `looked_at` gives their places in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.learner.batch.blocks import SequenceBlock
from paceline.learner.batch.row_index import RowIndex


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceRun:
    """Sequences that are computed together.

    Attributes:
        tokens: (m,) int64, the places of the sequences' tokens in the row, one sequence after another.
        cu_seqlens: (num_sequences + 1,) int64 on the model's device, where each sequence begins among the m.
        cu_seqlens_on_host: `cu_seqlens` on the CPU.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    cu_seqlens_on_host: Tensor

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], device: torch.device) -> SequenceRun:
        """Makes a run from the sequences' starts in the row and their lengths."""
        lengths = torch.tensor([length for _, length in spans])
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        tokens = torch.cat([torch.arange(start, start + length) for start, length in spans])
        return cls(
            tokens=tokens.to(device, non_blocking=True),
            cu_seqlens=offsets.to(device, non_blocking=True),
            cu_seqlens_on_host=offsets,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChainedSequences:
    """All sequences of a packed row of T tokens.

    Attributes:
        first: sequences without a prefix.
        then: sequences with a prefix; None if there are none.
        prefixes: for each sequence of `then`, the index of its prefix in `first`.
        order: (T,), the place of each token among those of `first` and `then`.
        begins: (b,), the first tokens of each sequence, as many as a convolution looks back over.
        looked_at: (b * taps,), for each token of `begins`, it and the `taps` - 1 tokens before it; T stands
            for a token that does not exist.
    """

    first: SequenceRun
    then: SequenceRun | None
    prefixes: RowIndex | None
    order: Tensor
    begins: Tensor
    looked_at: RowIndex

    @classmethod
    def of(cls, blocks: Sequence[SequenceBlock], taps: int, device: torch.device) -> ChainedSequences:
        """Collects the sequences of all blocks; a convolution reads `taps` tokens, the current one last."""
        num_tokens = max(block.stop for block in blocks)
        spans = [
            (start, block.length, block.prefix_start, block.prefix_length)
            for block in blocks
            for start in range(block.start, block.stop, block.length)
        ]
        alone = [(start, length) for start, length, _, size in spans if not size]
        places = {start: place for place, (start, _) in enumerate(alone)}
        prefixed = [span for span in spans if span[3]]
        first, then, prefixes = SequenceRun.of(alone, device), None, None
        if prefixed:
            then = SequenceRun.of([span[:2] for span in prefixed], device)
            prefixes = RowIndex.of(torch.tensor([places[span[2]] for span in prefixed]), len(alone))
        order = torch.empty_like(tokens := torch.cat([run.tokens for run in (first, then) if run]))
        order[tokens] = torch.arange(num_tokens, device=device)
        begins, looked_at = _look_back(spans, taps, num_tokens)
        return cls(
            first=first,
            then=then,
            prefixes=prefixes.to(device) if prefixes else None,
            order=order,
            begins=begins.to(device, non_blocking=True),
            looked_at=RowIndex.of(looked_at, num_tokens + 1).to(device),
        )


def _look_back(
    spans: Sequence[tuple[int, int, int, int]], taps: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Returns the first tokens of sequences, and for each of them the last `taps` tokens up to itself."""
    begins, looked_at = [], []
    for start, length, prefix_start, prefix_length in spans:
        inside = np.arange(min(length, taps - 1))[:, None]
        place = inside + np.arange(1 - taps, 1)  # negative: in the prefix, before its end
        before = np.where(place + prefix_length >= 0, prefix_start + prefix_length + place, num_tokens)
        begins.append(start + inside[:, 0])
        looked_at.append(np.where(place >= 0, start + place, before).reshape(-1))
    return torch.from_numpy(np.concatenate(begins)), torch.from_numpy(np.concatenate(looked_at))
