"""Packs rows into a micro-batch: tokens without padding, and padded (B, R) tables for the losses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.learner.batch.types import MicroBatch, PackedRow, PackedSequences


def pack(rows: Sequence[PackedRow], device: torch.device) -> MicroBatch:
    """Packs rows in the given order; without rows, a filler micro-batch."""
    real = tuple(row.index for row in rows)
    rows = list(rows) or [_filler_row()]
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


def _filler_row() -> PackedRow:
    """Two masked tokens, for a rank that has no row where other ranks have some."""
    return PackedRow(
        index=-1,
        prompt_token_ids=np.zeros(1, np.int32),
        response_token_ids=np.zeros(1, np.int32),
        response_mask=np.zeros(1, np.uint8),
        response_log_probs=np.zeros(1, np.float32),
    )
