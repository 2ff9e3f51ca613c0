"""A pool of scoring workers: items in, one result for each out, whatever the reward functions do."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from paceline.core.errors import ConfigError, PacelineError, ProtocolError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.reward.functions import frames
from paceline.reward.functions.process import Sandbox, SandboxOptions
from paceline.reward.scoring import RETRIED_KINDS, FunctionSpec, Verdict, check_names, failed

_log = logging.getLogger(__name__)

_BATCH_TARGET_S = 0.05  # long against the few hundred microseconds that a batch costs, short against a step
_MAX_BATCH_ITEMS = 256
_MAX_BATCH_CHARS = 4 * 1024 * 1024
_GUESSED_ITEM_S = 0.01
_PIPE_DRAIN_S = 5.0
_RESTART_PAUSES_S = (0.0, 0.5, 2.0)


@dataclass(slots=True)
class _Request:
    """One call of `score`: the results so far, and the future that its caller waits on."""

    results: list[Verdict | None]
    num_open: int
    done: asyncio.Future[None]

    def settle(self, index: int, result: Verdict) -> None:
        self.results[index] = result
        self.num_open -= 1
        if self.num_open == 0 and not self.done.done():
            self.done.set_result(None)


@dataclass(slots=True)
class _Job:
    request: _Request
    index: int
    item: ScoreItem
    attempt: int = field(default=0)


class ScorerPool:
    """Scores items in `num_workers` processes, each of which imports the functions once.

    An item that runs longer than `timeout_s` costs its worker's life: the worker is killed and replaced, and so is
    one that crashes. Only the item at fault carries the error; the others of its batch go to another worker.
    Errors that another attempt may cure (TIMEOUT, CRASHED, UNAVAILABLE) are tried again up to `max_retries` times.

    Args:
        functions: what is computed; see `FunctionSpec`.
        num_workers: worker processes.
        timeout_s: how long all functions together may take over one item.
        max_retries: further attempts after the first.
        start_timeout_s: how long a worker may take to import the functions.
        memory_limit_bytes: the address space of a worker; None leaves it unlimited.

    Raises:
        ConfigError: a number or the list of functions makes no sense.
    """

    def __init__(
        self,
        functions: Sequence[FunctionSpec],
        *,
        num_workers: int,
        timeout_s: float,
        max_retries: int = 1,
        start_timeout_s: float = 60.0,
        memory_limit_bytes: int | None = None,
    ) -> None:
        if not functions:
            raise ConfigError("reward.functions is empty: name at least one function, say exact_match")
        check_names([spec.name for spec in functions])
        if num_workers < 1:
            raise ConfigError(f"reward.num_workers is {num_workers}: at least one worker is needed")
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ConfigError(f"reward.timeout_s is {timeout_s}: write a positive number of seconds")
        if max_retries < 0:
            raise ConfigError(f"reward.max_retries is {max_retries}: write 0 or more")
        self._options = SandboxOptions(
            functions=tuple(functions), start_timeout_s=start_timeout_s, memory_limit_bytes=memory_limit_bytes
        )
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._item_s = min(_GUESSED_ITEM_S, timeout_s)
        self._numbers = itertools.count(1)
        self._queue: deque[_Job] = deque()
        self._queued = asyncio.Condition()
        self._requests: set[asyncio.Future[None]] = set()
        self._sandboxes: list[Sandbox] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._broken: BaseException | None = None
        self.num_replaced = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts the workers and waits until each has imported the functions.

        Raises:
            ConfigError: a function cannot be found, imported or called; nothing is left running.
            DeadlineError, PeerLostError: a worker hung or died while importing.
        """
        if self._tasks:
            raise ProtocolError("this scorer pool has been started already")
        starts = (Sandbox.start(self._options) for _ in range(self._num_workers))
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        self._sandboxes = [one for one in outcomes if isinstance(one, Sandbox)]
        errors = [one for one in outcomes if isinstance(one, BaseException)]
        if errors:
            await self.close()
            raise errors[0]
        for slot in range(self._num_workers):
            task = asyncio.create_task(self._serve_slot(slot), name=f"reward-worker-{slot}")
            task.add_done_callback(self._on_slot_end)
            self._tasks.append(task)

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        """One result for each item, in the items' order. Calls may overlap.

        There is no deadline here because every item has its own: the wait ends after all of them at the latest.

        Raises:
            RewardError: UNAVAILABLE, when workers cannot be replaced any more or the pool is closed meanwhile.
            ProtocolError: the pool has not been started.
        """
        if self._broken is not None:
            raise self._unavailable() from self._broken
        if not self._tasks:
            raise ProtocolError("this scorer pool is not running: call start() first")
        if not items:
            return []
        done = asyncio.get_running_loop().create_future()
        request = _Request(results=[None] * len(items), num_open=len(items), done=done)
        self._requests.add(done)
        try:
            async with self._queued:
                self._queue.extend(_Job(request, index, item) for index, item in enumerate(items))
                self._queued.notify_all()
            await done
        finally:
            self._requests.discard(done)
        return [result for result in request.results if result is not None]

    async def close(self) -> None:
        """Stops all workers. Calls of `score` that still wait end in a RewardError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._break(RewardError("the scorer pool was closed", kind=RewardErrorKind.UNAVAILABLE))
        await asyncio.gather(*(sandbox.stop(grace_s=1.0) for sandbox in self._sandboxes))
        self._tasks, self._sandboxes = [], []

    async def _serve_slot(self, slot: int) -> None:
        while True:
            jobs = await self._take()
            if not await self._run_batch(self._sandboxes[slot], jobs):
                await self._replace(slot)

    async def _take(self) -> dict[int, _Job]:
        """Waits for work, then takes this worker's share of it, numbered: about `_BATCH_TARGET_S` seconds' worth."""
        async with self._queued:
            while True:
                await self._queued.wait_for(lambda: self._queue)
                share = math.ceil(len(self._queue) / self._num_workers)
                wanted = max(1, min(share, _MAX_BATCH_ITEMS, int(_BATCH_TARGET_S / max(self._item_s, 1e-9))))
                jobs: dict[int, _Job] = {}
                chars = 0
                while self._queue and len(jobs) < wanted and chars < _MAX_BATCH_CHARS:
                    job = self._queue.popleft()
                    if not job.request.done.done():  # its caller may have gone
                        jobs[next(self._numbers)] = job
                        chars += len(job.item.response) + len(job.item.prompt)
                if jobs:
                    return jobs

    async def _run_batch(self, sandbox: Sandbox, jobs: dict[int, _Job]) -> bool:
        """Has a worker score the jobs and settles or requeues every one; False when the worker is lost."""
        frame = self._encode(jobs)
        if not jobs:
            return True
        sent = time.monotonic()
        deadline = sent + self._timeout_s
        killed = False
        reading = asyncio.create_task(_exchange(sandbox, frame), name="reward-read")
        try:
            while jobs:
                finished, _ = await asyncio.wait({reading}, timeout=max(0.0, deadline - time.monotonic()))
                if not finished:
                    if killed or sandbox.exited:  # something that outlived the worker holds its pipe
                        break
                    deadline = self._deadline(sandbox, jobs, sent)
                    if deadline <= time.monotonic():
                        sandbox.kill()
                        killed, deadline = True, time.monotonic() + _PIPE_DRAIN_S
                    continue
                self._settle_rows(jobs, reading.result())
                if jobs:
                    reading = asyncio.create_task(sandbox.receive(), name="reward-read")
        except (EOFError, ConnectionError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                _log.error("%s", error)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if not jobs:
            return True
        await sandbox.stop()
        await self._settle_lost(sandbox, jobs, killed)
        return False

    def _deadline(self, sandbox: Sandbox, jobs: dict[int, _Job], sent: float) -> float:
        """When the item that the worker is at must be done; for one that has not begun, counted from the sending."""
        number, started = sandbox.progress()
        return (max(started, sent) if number in jobs else sent) + self._timeout_s

    def _encode(self, jobs: dict[int, _Job]) -> bytes:
        rows = [_row(number, job.item) for number, job in jobs.items()]
        try:
            return frames.encode(rows)
        except (TypeError, ValueError, OverflowError):
            pass  # one item is at fault; the others must not suffer for it
        sound: list[object] = []
        for number, job in list(jobs.items()):
            row = _row(number, job.item)
            try:
                frames.encode(row)
                sound.append(row)
            except (TypeError, ValueError, OverflowError) as error:
                del jobs[number]
                message = f"the item's fields cannot be handed to a reward function: {error}"
                job.request.settle(
                    job.index, failed(job.item.trajectory_id, RewardErrorKind.WRONG_TYPE, message)
                )
        return frames.encode(sound)

    def _settle_rows(self, jobs: dict[int, _Job], rows: list[Any]) -> None:
        seconds = 0.0
        for row in rows:
            number, reward, components, error, item_s = _parse_row(row)
            job = jobs.pop(number, None)
            if job is None:
                raise ProtocolError(f"a scoring worker answered for item {number}, which it was not given")
            seconds += item_s
            if error is not None and error[0] in RETRIED_KINDS and job.attempt < self._max_retries:
                job.attempt += 1
                self._queue.append(job)
                continue
            result = Verdict(
                trajectory_id=job.item.trajectory_id,
                reward=reward,
                components=components,
                error=error,
                seconds=item_s,
            )
            job.request.settle(job.index, result)
        self._item_s += 0.5 * (seconds / max(len(rows), 1) - self._item_s)

    async def _settle_lost(self, sandbox: Sandbox, jobs: dict[int, _Job], killed: bool) -> None:
        """Blames the item that the lost worker was at, and puts the rest back at the head of the queue."""
        number, started = sandbox.progress()
        blamed = number if number in jobs else next(iter(jobs))
        job = jobs.pop(blamed)
        if job.attempt < self._max_retries:
            job.attempt += 1
            jobs[blamed] = job
        else:
            if killed:
                kind, message = RewardErrorKind.TIMEOUT, f"not scored within {self._timeout_s:g} s"
            else:
                kind, message = (
                    RewardErrorKind.CRASHED,
                    f"the worker process ended: {sandbox.describe_exit()}",
                )
            seconds = time.monotonic() - started if number == blamed else 0.0
            job.request.settle(job.index, failed(job.item.trajectory_id, kind, message, seconds))
        async with self._queued:
            self._queue.extendleft(reversed(jobs.values()))
            self._queued.notify_all()
        jobs.clear()

    async def _replace(self, slot: int) -> None:
        self._sandboxes[slot].release()
        self.num_replaced += 1
        last: PacelineError | None = None
        for pause_s in _RESTART_PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                self._sandboxes[slot] = await Sandbox.start(self._options)
                return
            except PacelineError as error:
                _log.warning("a reward worker could not be replaced: %s", error)
                last = error
        assert last is not None
        raise last

    def _on_slot_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        self._broken = self._broken or error
        self._queue.clear()
        for done in self._requests:
            if not done.done():
                done.set_exception(self._unavailable())

    def _unavailable(self) -> RewardError:
        return RewardError(f"no reward workers: {self._broken}", kind=RewardErrorKind.UNAVAILABLE)


async def _exchange(sandbox: Sandbox, frame: bytes) -> Any:
    await sandbox.send(frame)
    return await sandbox.receive()


def _row(number: int, item: ScoreItem) -> list[object]:
    return [
        number,
        item.trajectory_id,
        item.prompt,
        item.response,
        item.ground_truth,
        item.data_source,
        dict(item.extra),
    ]


def _parse_row(
    row: Any,
) -> tuple[int, float | None, dict[str, float], tuple[RewardErrorKind, str] | None, float]:
    """Reads a worker's result row, which code in the worker may have spoilt.

    Raises:
        ProtocolError: it is not what `paceline.reward.functions.child` writes.
    """
    try:
        number, reward, components, kind, message, seconds = row
        error = None if kind is None else (RewardErrorKind(kind), str(message))
        sound = isinstance(reward, float) and math.isfinite(reward) if error is None else reward is None
        if not sound or not isinstance(components, dict):
            raise ValueError("neither a reward nor an error")
        return int(number), reward, components, error, float(seconds)
    except (TypeError, ValueError) as fault:
        raise ProtocolError(f"a scoring worker sent a row that cannot be read: {fault}") from fault
