"""Fetches the log-probabilities of ended samples from the workers, many with one call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.core.samples.trajectory import Float32Array

_CLOSE_S = 1.0


Versions = Sequence[tuple[int, int]]
"""(First token, version) of each version that drew a sample."""

Fetched = tuple[bytes, Sequence[Versions]]
"""The float32 log-probabilities, sample after sample, and each sample's versions."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Ended:
    request_id: str
    start: int
    count: int
    result: asyncio.Future[tuple[Float32Array, Versions]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


Fetch = Callable[[list[str], list[int], list[int], list[str]], Awaitable[Fetched]]
"""Takes requests, the position of the first value and the number of values of each, and aborted requests."""


class LogProbs:
    """Makes one call at a time; samples that end meanwhile wait for the next call."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._waiting: list[_Ended] = []
        self._aborted: list[str] = []
        self._fetching: asyncio.Task[None] | None = None

    async def take(self, request_id: str, start: int, count: int) -> tuple[Float32Array, Versions]:
        """Returns log-probabilities and versions of a sample's tokens; raises the call's errors."""
        if not count:  # aborted, possibly before a worker knew of it
            return np.empty(0, np.float32), ()
        ended = _Ended(request_id=request_id, start=start, count=count)
        self._waiting.append(ended)
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.create_task(self._fetch_all(), name="log-probs")
        return await ended.result

    def forget(self, request_ids: Iterable[str]) -> None:
        """Makes the workers forget aborted requests with the next call."""
        self._aborted += request_ids

    async def close(self) -> None:
        """Fetches no more log-probs from the engine."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait([self._fetching], timeout=_CLOSE_S)

    async def _fetch_all(self) -> None:
        while self._waiting:
            samples, self._waiting = self._waiting, []
            aborted, self._aborted = self._aborted, []
            counts = [sample.count for sample in samples]
            try:
                ids, starts = [s.request_id for s in samples], [s.start for s in samples]
                packed, versions = await self._fetch(ids, starts, counts, aborted)
                values = np.frombuffer(packed, dtype=np.float32)
            except Exception as error:  # noqa: BLE001 - passed on to the waiting samples
                for sample in samples:
                    if not sample.result.done():
                        sample.result.set_exception(error)
                continue
            ends = np.cumsum(counts)
            for sample, end, told in zip(samples, ends, versions, strict=True):
                if not sample.result.done():
                    sample.result.set_result((values[end - sample.count : end], told))
