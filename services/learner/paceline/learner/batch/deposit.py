"""Leaves the learner's log-probs of a step beside the samples' blobs, for the saved trajectories."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from paceline.broker import names
from paceline.core.errors import BrokerError
from paceline.core.samples.trajectory import Float32Array
from paceline.core.training import BatchRow
from paceline.learner.batch.types import ScoredBatch
from paceline.wire import encode_log_probs

log = logging.getLogger(__name__)


class Store(Protocol):
    """Takes blobs by key, as `paceline.broker.redis.redis_blobs.BlobClient` does."""

    def put(self, blobs: Mapping[str, bytes]) -> None:
        """Stores blobs under their keys."""
        ...


def deposit_log_probs(store: Store, rows: Sequence[BatchRow], scored: Sequence[ScoredBatch]) -> None:
    """Stores this rank's log-probs, computed with the weights before the update.

    They are for people to look at, so a step does not fail without them.
    """
    blobs = {
        names.learner_log_probs(rows[index].blob_key): encode_log_probs(log_probs)
        for index, log_probs in _of_rows(scored)
    }
    try:
        store.put(blobs)
    except BrokerError as error:
        log.warning("the saved trajectories will lack the learner's log-probs: %s", error)


def _of_rows(scored: Sequence[ScoredBatch]) -> Iterator[tuple[int, Float32Array]]:
    """Yields each row's place in the batch and a log-prob per response token, 0 if it was not sampled."""
    for part in scored:
        if not part.batch.rows or "old" not in part.log_probs:
            continue
        table = part.log_probs["old"].float().where(part.batch.mask, 0.0).cpu().numpy()
        for source, log_probs in zip(part.batch.sources, table, strict=True):
            yield source.index, np.asarray(log_probs[: len(source.response_token_ids)], np.float32)
