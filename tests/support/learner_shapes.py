"""Rows of chosen lengths for a micro-batch."""

from __future__ import annotations

import numpy as np

from paceline.learner.batch.types import PackedRow
from support.learner_fakes import VOCAB_SIZE


def rows_with_holes(shape: list[list[tuple[int, int]]], seed: int = 0) -> list[PackedRow]:
    """Rows whose masks have holes."""
    rng, rows = np.random.default_rng(seed), []
    for group in shape:
        prompt = rng.integers(2, VOCAB_SIZE, group[0][0]).astype(np.int32)
        for _, length in group:
            mask = rng.integers(0, 2, length).astype(np.uint8)
            mask[-1] = 1
            row = PackedRow(
                index=len(rows),
                prompt_token_ids=prompt,
                response_token_ids=rng.integers(2, VOCAB_SIZE, length).astype(np.int32),
                response_mask=mask,
                response_log_probs=np.full(length, -1.0, np.float32),
            )
            rows.append(row)
    return rows
