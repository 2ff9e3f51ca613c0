"""Merges calls to a remote service that wait for their turn: few large calls in place of many small ones.

    ask -> queue --a turn is free--> call: the first waiting part, and others that fit -> answers

No part waits for others to come: while turns are free, every part is a call.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from paceline.core.errors import PacelineError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.reward.remote.parts import CallItems
from paceline.service.tasks import cancel

Results = Sequence[ScoreResult | PacelineError]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRequest:
    """A part, the parameters of its call, and until when the call may begin."""

    part: CallItems
    run_id: str
    step: int
    until: float

    @property
    def num_chars(self) -> int:
        """Returns the approximate size of its message."""
        return sum(item.num_chars for _, item in self.part.items)

    @property
    def ids(self) -> frozenset[str]:
        """Returns the ids of the trajectories that it asks about."""
        return frozenset(item.trajectory_id for _, item in self.part.items)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to a request: a result for each of its items, or the error of its call.

    `was_merged`: other requests were in the same call, and their items may have caused the error.
    """

    results: Results | PacelineError
    seconds: float
    was_merged: bool = False


@dataclass(eq=False, slots=True)
class _Waiting:
    request: CallRequest
    answer: asyncio.Future[Answer]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    call: asyncio.Task[None] | None = None
    mates: Sequence[_Waiting] = ()


class Merger:
    """Makes a bounded number of calls at once; merges the requests that wait meanwhile, as far as they fit.

    Merged requests have equal parameters and no trajectory in common.

    Args:
        make: makes one call; returns a result for each item.
        max_items: most items of a merged call; 0: none is merged.
        max_chars: most characters of a merged call.
    """

    def __init__(
        self,
        make: Callable[[Sequence[ScoreItem], CallRequest], Awaitable[Results]],
        *,
        concurrency: int,
        max_items: int,
        max_chars: int,
    ) -> None:
        self._make, self._concurrency = make, concurrency
        self._max_items, self._max_chars = max_items, max_chars
        self._queue: list[_Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, request: CallRequest) -> Answer:
        """Waits for a request's turn; returns the answer."""
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._begin()
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            if waiting.call is not None and all(mate.answer.done() for mate in waiting.mates):
                waiting.call.cancel()  # no request waits for it any more
            raise

    async def close(self) -> None:
        """Ends the calls under way and those that wait, with UNAVAILABLE."""
        error = RewardError("the connection was closed", kind=RewardErrorKind.UNAVAILABLE)
        queue, self._queue = self._queue, []
        _settle(queue, error, 0.0)
        await cancel(*self._calls)

    def _begin(self) -> None:
        """Makes calls while turns are free."""
        while len(self._calls) < self._concurrency:
            mates = self._next()
            if not mates:
                return
            call = asyncio.create_task(self._call(mates), name="remote call", context=mates[0].context)
            for waiting in mates:
                waiting.call, waiting.mates = call, mates
            self._calls.add(call)
            call.add_done_callback(self._end)

    def _end(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._begin()

    def _next(self) -> list[_Waiting]:
        """Takes from the queue the first request, and those that fit into the same call."""
        self._queue = [waiting for waiting in self._queue if not waiting.answer.done()]
        mates: list[_Waiting] = []
        rest: list[_Waiting] = []
        for waiting in self._queue:
            (mates if not mates or self._fits(waiting.request, mates) else rest).append(waiting)
        self._queue = rest
        return mates

    def _fits(self, request: CallRequest, mates: Sequence[_Waiting]) -> bool:
        requests = [mate.request for mate in mates]
        first = requests[0]
        together = [*requests, request]
        return (
            not any(part.is_cut or part.is_alone for part in (request.part, first.part))
            and (request.run_id, request.step) == (first.run_id, first.step)
            and sum(len(each.part.items) for each in together) <= self._max_items
            and sum(each.num_chars for each in together) <= self._max_chars
            and all(request.ids.isdisjoint(each.ids) for each in requests)
        )

    async def _call(self, mates: Sequence[_Waiting]) -> None:
        items = [item for mate in mates for _, item in mate.request.part.items]
        # Requests that may wait longer ask again.
        first = min((mate.request for mate in mates), key=lambda request: request.until)
        started = time.monotonic()
        try:
            results = await self._make(items, first)
        except PacelineError as error:
            _settle(mates, error, time.monotonic() - started)
        except asyncio.CancelledError:
            closed = RewardError("the connection was closed", kind=RewardErrorKind.UNAVAILABLE)
            _settle(mates, closed, time.monotonic() - started)
            raise
        except Exception as error:  # noqa: BLE001 - a defect: those who wait raise it
            for mate in mates:
                if not mate.answer.done():
                    mate.answer.set_exception(error)
        else:
            _settle(mates, results, time.monotonic() - started)


def _settle(mates: Sequence[_Waiting], results: Results | PacelineError, seconds: float) -> None:
    """Gives each waiting request its own results."""
    begin = 0
    for mate in mates:
        end = begin + len(mate.request.part.items)
        own = results if isinstance(results, PacelineError) else results[begin:end]
        begin = end
        if not mate.answer.done():
            mate.answer.set_result(Answer(results=own, seconds=seconds, was_merged=len(mates) > 1))
