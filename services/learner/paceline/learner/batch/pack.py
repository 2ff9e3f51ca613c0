"""Micro-batches as tensors: packed tokens for the forward pass, padded (B, R) tables for the losses.

B rows, R the longest response of the micro-batch, T all its tokens, n its response tokens. The model sees (1, T); the
numbers per response token come out flat, (n,), and `MicroBatch.table` spreads them over (B, R) for
`paceline.learner.algorithms`, whose functions look at whole sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.core.trajectory import Float32Array, Int32Array, UInt8Array
from paceline.learner.model.attention import PackedSequences


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRow:
    """One sequence. `index` is its place in the step's batch; -1 marks a row that only fills an empty micro-batch."""

    index: int
    prompt_token_ids: Int32Array
    response_token_ids: Int32Array
    response_mask: UInt8Array
    response_log_probs: Float32Array

    @property
    def num_tokens(self) -> int:
        """Prompt and response together."""
        return len(self.prompt_token_ids) + len(self.response_token_ids)


def filler_row() -> PackedRow:
    """Two tokens that count for nothing, for a rank that has no row where others have one."""
    return PackedRow(
        index=-1,
        prompt_token_ids=np.zeros(1, np.int32),
        response_token_ids=np.zeros(1, np.int32),
        response_mask=np.zeros(1, np.uint8),
        response_log_probs=np.zeros(1, np.float32),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """Tensors of one forward pass, on the model's device.

    Attributes:
        rows: place of each row in the step's batch, (B,) on the host; empty for a filler.
        input_ids: (1, T).
        position_ids: (1, T), from 0 in each sequence.
        packed: where the sequences begin.
        score_positions: (n,), places in T whose hidden state predicts a response token (one before it).
        targets: (n,), the response tokens.
        places: (B, R), which of the n numbers belongs there, n on padding.
        mask: (B, R) bool, True on tokens that the policy produced.
        rollout_log_probs: (B, R) as sampled, 0 on padding.
    """

    rows: tuple[int, ...]
    input_ids: Tensor
    position_ids: Tensor
    packed: PackedSequences
    score_positions: Tensor
    targets: Tensor
    places: Tensor
    mask: Tensor
    rollout_log_probs: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids.shape[1]

    def table(self, flat: Tensor) -> Tensor:
        """(n,) spread over (B, R), 0 on padding; differentiable."""
        return torch.cat([flat, flat.new_zeros(1)])[self.places]


def pack(rows: Sequence[PackedRow], device: torch.device) -> MicroBatch:
    """Packs rows in the given order; no rows make a filler micro-batch."""
    real = tuple(row.index for row in rows)
    rows = list(rows) or [filler_row()]
    prompts = np.array([len(row.prompt_token_ids) for row in rows])
    responses = np.array([len(row.response_token_ids) for row in rows])
    lengths = prompts + responses
    starts = np.cumsum(lengths) - lengths
    first = np.cumsum(responses) - responses  # of each row's numbers among the n
    steps = np.arange(responses.max())
    inside = steps < responses[:, None]  # (B, R)
    score_positions = (starts + prompts - 1)[:, None] + steps
    places = np.where(inside, first[:, None] + steps, responses.sum())
    mask = np.zeros(inside.shape, bool)
    log_probs = np.zeros(inside.shape, np.float32)
    mask[inside] = np.concatenate([row.response_mask for row in rows]) != 0
    log_probs[inside] = np.concatenate([row.response_log_probs for row in rows])
    tokens = np.concatenate([part for row in rows for part in (row.prompt_token_ids, row.response_token_ids)])
    positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)

    def put(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return MicroBatch(
        rows=real,
        input_ids=put(tokens.astype(np.int64)).unsqueeze(0),
        position_ids=put(positions.astype(np.int64)).unsqueeze(0),
        packed=PackedSequences.of([int(length) for length in lengths], device),
        score_positions=put(score_positions[inside].astype(np.int64)),
        targets=put(np.concatenate([row.response_token_ids for row in rows]).astype(np.int64)),
        places=put(places.astype(np.int64)),
        mask=put(mask),
        rollout_log_probs=put(log_probs),
    )
