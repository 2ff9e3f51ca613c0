"""A pool of child processes that score with functions: one score per item, whatever the functions do."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Self

from paceline.config.reward import RewardConfig
from paceline.core.errors import ConfigError, PacelineError, ProtocolError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem, groups_of
from paceline.reward.functions.jobs import Job, ScoreCall, encode_batch, parse_row
from paceline.reward.functions.spec import FunctionSpec
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.scoring.scores import Score
from paceline.reward.scoring.shape import Shape
from paceline.service.children.process import ChildLimits, ChildProcess
from paceline.service.tasks import cancel

_log = logging.getLogger(__name__)

CHILD_MODULE = "paceline.reward.functions.child"
_BATCH_TARGET_S = 0.05  # long compared with a batch's overhead of a few 100 us, short compared with a step
_MAX_BATCH_ITEMS = 256
_MAX_BATCH_CHARS = 4 * 1024 * 1024
_GUESSED_ITEM_S = 0.01
_PIPE_DRAIN_S = 5.0
_RESTART_PAUSES_S = (0.0, 0.5, 2.0)
# Seconds of queued work per running process above which another process starts.
_BEHIND_S = 3.0


class _Loss(enum.Enum):
    """Why a process can no longer be used."""

    ENDED = enum.auto()
    TOO_SLOW = enum.auto()
    UNREADABLE = enum.auto()
    """The process sent an invalid result, and may already be at a later item than the one at fault."""


class FunctionPool:
    """Scores items in child processes, each of which imports the functions once; a `Scorer`.

    Further processes start one by one while the queue is long, and end after a time without work.

    When an item takes longer than `timeout_s`, its process is killed and replaced; a process that crashes is
    replaced as well. Only the item at fault gets the error; the others of its batch go to another process. An
    item gets one attempt; the caller decides whether to ask again. If a call for a group fails, all its items
    get the error.

    Args:
        functions: the functions; see `FunctionSpec`. Either all of them score items, or all of them groups.
        num_processes: child processes that always run.
        max_processes: largest number of processes; None: `num_processes`.
        timeout_s: longest time in seconds that all functions together may take for an item or a group.
        idle_s: time without work after which a further process ends.
        seed: determines the processes' random numbers, which differ between processes; None: not fixed.

    Raises:
        ConfigError: there is no function, or a number is out of its range.
    """

    def __init__(
        self,
        functions: Sequence[FunctionSpec],
        *,
        num_processes: int,
        max_processes: int | None = None,
        timeout_s: float,
        idle_s: float = 60.0,
        limits: ChildLimits = ChildLimits(),  # noqa: B008  it is frozen
        seed: str | None = None,
    ) -> None:
        if not functions:
            raise ConfigError(
                "reward.functions is empty: name at least one function, for example exact_match"
            )
        if num_processes < 1:
            raise ConfigError(f"reward.num_processes is {num_processes}: at least one process is needed")
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ConfigError(f"reward.timeout_s is {timeout_s}: write a positive number of seconds")
        self._functions = tuple(functions)
        self.names = [spec.name for spec in functions]
        self._scores_groups = any(spec.shape.group for spec in functions)
        self.queue_name = "group functions" if self._scores_groups else "functions"
        self._num_processes, self._max_processes = num_processes, max_processes or num_processes
        self._timeout_s, self._idle_s, self._limits = timeout_s, idle_s, limits
        self._item_s = min(_GUESSED_ITEM_S, timeout_s)
        self._numbers = itertools.count(1)
        self._queue: deque[Job] = deque()
        self._queued = asyncio.Condition()
        self._requests: dict[asyncio.Future[None], ScoreCall] = {}
        self._children: dict[int, ChildProcess] = {}
        self._slots, self._starts = itertools.count(), itertools.count()
        self._seed = seed
        self._tasks: set[asyncio.Task[None]] = set()
        self._growing: asyncio.Task[None] | None = None
        self._broken: BaseException | None = None
        self.num_replaced = 0

    @classmethod
    def configured(cls, settings: ScorerSettings) -> list[Self]:
        """Returns a pool of the configured functions, and one of those that score groups, if any."""
        config = settings.config
        specs = function_specs(config)
        forms = [[spec for spec in specs if spec.shape.group is group] for group in (False, True)]
        return [
            cls(
                form,
                num_processes=config.num_processes,
                max_processes=config.max_processes,
                timeout_s=config.timeout_s,
                limits=ChildLimits(
                    memory_bytes=config.memory_mib and config.memory_mib << 20, pass_env=config.pass_env
                ),
                seed=settings.seed,
            )
            for form in forms
            if form
        ]

    @property
    def num_unscored(self) -> int:
        """Returns how many items wait or are being scored; may be called from any thread."""
        return sum(request.num_open for request in tuple(self._requests.values()))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts the processes and waits until each has imported the functions.

        Raises:
            ConfigError: a function cannot be found, imported or called; nothing is left running.
            DeadlineError, PeerLostError: a process hung or died while importing.
        """
        if self._tasks:
            raise ProtocolError("this function pool has been started already")
        starts = (self._start_child() for _ in range(self._num_processes))
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        children = [outcome for outcome in outcomes if isinstance(outcome, ChildProcess)]
        for child in children:
            self._children[next(self._slots)] = child
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            await self.close()
            raise errors[0]
        for slot in self._children:
            self._begin(slot, idle_s=None)

    def _begin(self, slot: int, idle_s: float | None) -> None:
        task = asyncio.create_task(self._serve_slot(slot, idle_s), name=f"reward-process-{slot}")
        task.add_done_callback(self._on_slot_end)
        self._tasks.add(task)

    async def _start_child(self) -> ChildProcess:
        seed = None if self._seed is None else _process_seed(self._seed, self.queue_name, next(self._starts))
        functions = [{**asdict(spec), "arguments": dict(spec.arguments)} for spec in self._functions]
        setup = {"functions": functions, "seed": seed}
        names = ", ".join(spec.reference for spec in self._functions)
        return await ChildProcess.start(
            CHILD_MODULE, setup, role="reward", imports=names, limits=self._limits
        )

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """Returns one score per item, in the order of the items; functions do not see `run_id` and `step`.

        There is no deadline here because every item has its own.

        Raises:
            RewardError: UNAVAILABLE, when a process cannot be replaced or the pool is closed meanwhile.
            ProtocolError: the pool has not been started.
        """
        if self._broken is not None:
            raise self._unavailable() from self._broken
        if not self._tasks:
            raise ProtocolError("this function pool is not running: call start() first")
        if not items:
            return []
        done = asyncio.get_running_loop().create_future()
        request = ScoreCall(scores=[None] * len(items), num_open=len(items), done=done)
        self._requests[done] = request
        try:
            async with self._queued:
                self._queue.extend(self._jobs(request, items))
                self._queued.notify_all()
            self._grow_if_behind()
            await done
        finally:
            del self._requests[done]
        return [score for score in request.scores if score is not None]

    def _jobs(self, request: ScoreCall, items: Sequence[ScoreItem]) -> Iterable[Job]:
        if self._scores_groups:
            for places in groups_of(items):
                yield Job(request, places, [items[place] for place in places])
        else:
            for place, item in enumerate(items):
                yield Job(request, (place,), (item,))

    async def close(self) -> None:
        """Stops all processes of the pool. Calls of `score` that still wait end in a RewardError."""
        running = [*self._tasks, *([self._growing] if self._growing else [])]
        await cancel(*running)
        self._break(RewardError("the function pool was closed", kind=RewardErrorKind.UNAVAILABLE))
        await asyncio.gather(*(child.stop(grace_s=1.0) for child in self._children.values()))
        self._tasks, self._children = set(), {}

    def _grow_if_behind(self) -> None:
        """Starts another process if the running ones need too long for the queue."""
        is_growing = self._growing is not None and not self._growing.done()
        if is_growing or self._broken is not None or len(self._children) >= self._max_processes:
            return
        if len(self._queue) * self._item_s > _BEHIND_S * len(self._children):
            self._growing = asyncio.create_task(self._grow(), name="reward-growth")

    async def _grow(self) -> None:
        try:
            child = await self._start_child()
        except PacelineError as error:
            _log.warning("a further reward process does not start: %s", error)
            return
        slot = next(self._slots)
        self._children[slot] = child
        self._begin(slot, self._idle_s)
        _log.info("%d reward processes, with %d items in the queue", len(self._children), len(self._queue))

    async def _serve_slot(self, slot: int, idle_s: float | None) -> None:
        """Gives a process its work; ends the process after `idle_s` seconds without work, if not None."""
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    jobs = await self._take()
            except TimeoutError:
                break
            if not await self._run_batch(self._children[slot], jobs):
                await self._replace(slot)
            self._grow_if_behind()
        await self._children[slot].stop(grace_s=1.0)
        self._children.pop(slot).release()
        _log.info("%d reward processes", len(self._children))

    async def _take(self) -> dict[int, Job]:
        """Waits for work; takes and numbers a process's share, about `_BATCH_TARGET_S` seconds' worth."""
        async with self._queued:
            while True:
                await self._queued.wait_for(lambda: self._queue)
                share = math.ceil(len(self._queue) / len(self._children))
                wanted = max(1, min(share, _MAX_BATCH_ITEMS, int(_BATCH_TARGET_S / max(self._item_s, 1e-9))))
                jobs: dict[int, Job] = {}
                chars = 0
                while self._queue and len(jobs) < wanted and chars < _MAX_BATCH_CHARS:
                    if self._queue[0].is_suspect:
                        wanted = 1
                        if jobs:
                            break
                    job = self._queue.popleft()
                    if job.is_wanted:
                        jobs[next(self._numbers)] = job
                        chars += job.num_chars
                if jobs:
                    return jobs

    async def _run_batch(self, child: ChildProcess, jobs: dict[int, Job]) -> bool:
        """Scores the jobs in a process, settles or requeues each; returns False when the process is lost."""
        frame = encode_batch(jobs)
        if not jobs:
            return True
        loss = await self._exchange(child, frame, jobs)
        if not jobs:
            return True
        await child.stop()
        await self._settle_lost(child, jobs, loss)
        return False

    async def _exchange(self, child: ChildProcess, frame: bytes, jobs: dict[int, Job]) -> _Loss:
        """Sends a batch and settles jobs as results arrive, until none is left or the process is lost."""
        sent = time.monotonic()
        deadline = sent + self._timeout_s
        loss = _Loss.ENDED
        reading = asyncio.create_task(_send_and_receive(child, frame), name="reward-read")
        try:
            while jobs:
                finished, _ = await asyncio.wait({reading}, timeout=max(0.0, deadline - time.monotonic()))
                if finished:
                    self._settle_rows(jobs, reading.result())
                    if jobs:
                        reading = asyncio.create_task(child.receive(), name="reward-read")
                    continue
                # Otherwise a descendant that outlives the process would keep its pipe open.
                if loss is _Loss.TOO_SLOW or child.exited:
                    break
                deadline = self._deadline(child, jobs, sent)
                if deadline <= time.monotonic():
                    child.kill()
                    loss, deadline = _Loss.TOO_SLOW, time.monotonic() + _PIPE_DRAIN_S
        except (EOFError, ConnectionError):
            pass  # the process ended
        except ProtocolError as error:
            _log.error("%s", error)
            loss = _Loss.UNREADABLE
        finally:
            await cancel(reading)
        return loss

    def _deadline(self, child: ChildProcess, jobs: dict[int, Job], sent: float) -> float:
        """Returns the deadline of the child's current item; if none has begun, counted from the sending."""
        number, started = child.progress()
        if number not in jobs or not sent <= started <= time.monotonic():  # not begun, or forged
            started = sent
        return started + self._timeout_s

    def _settle_rows(self, jobs: dict[int, Job], rows: Any) -> None:
        if not isinstance(rows, list):
            raise ProtocolError(f"a reward process sent a {type(rows).__name__} instead of rows")
        seconds = 0.0
        for row in rows:
            number, scores = parse_row(row, jobs)
            seconds += scores[0].seconds
            jobs.pop(number).settle(scores)
        self._item_s += 0.5 * (seconds / max(len(rows), 1) - self._item_s)

    async def _settle_lost(self, child: ChildProcess, jobs: dict[int, Job], loss: _Loss) -> None:
        """Blames the item that the lost process was scoring, and puts the others back at the queue's head.

        If any of several items may have caused unreadable output, each of them gets a separate process.
        """
        if loss is not _Loss.UNREADABLE:
            self._blame(child, jobs, loss)
        elif len(jobs) == 1:
            _, job = jobs.popitem()
            job.fail(RewardErrorKind.CRASHED, "the reward process sent no readable result")
        for job in jobs.values():
            job.is_suspect |= loss is _Loss.UNREADABLE
        async with self._queued:
            self._queue.extendleft(reversed(jobs.values()))
            self._queued.notify_all()
        jobs.clear()

    def _blame(self, child: ChildProcess, jobs: dict[int, Job], loss: _Loss) -> None:
        number, started = child.progress()
        blamed = number if number in jobs else next(iter(jobs))
        job = jobs.pop(blamed)
        seconds = time.monotonic() - started if number == blamed and math.isfinite(started) else 0.0
        if loss is _Loss.TOO_SLOW:
            job.fail(RewardErrorKind.TIMEOUT, f"not scored within {self._timeout_s:g} s", seconds)
        else:
            message = f"the reward process ended: {child.describe_exit()}"
            job.fail(RewardErrorKind.CRASHED, message, seconds)

    async def _replace(self, slot: int) -> None:
        child = self._children[slot]
        child.release()
        self.num_replaced += 1
        _log.warning("a reward process ended: %s; replacement %d", child.describe_exit(), self.num_replaced)
        for pause_s in _RESTART_PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                self._children[slot] = await self._start_child()
                return
            except PacelineError as error:
                _log.warning("a reward process could not be replaced: %s", error)
                if pause_s == _RESTART_PAUSES_S[-1]:
                    raise

    def _on_slot_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        self._broken = self._broken or error
        self._queue.clear()
        for done in self._requests:
            if not done.done():
                done.set_exception(self._unavailable())

    def _unavailable(self) -> RewardError:
        return RewardError(f"no reward processes: {self._broken}", kind=RewardErrorKind.UNAVAILABLE)


def function_specs(config: RewardConfig) -> list[FunctionSpec]:
    """Returns the configured functions with names for their components."""
    return [
        FunctionSpec(
            name=name,
            reference=function.name,
            shape=Shape.configured(function),
            arguments=dict(function.kwargs),
        )
        for name, function in zip(config.function_names, config.functions, strict=True)
    ]


def _process_seed(seed: str, form: str, number: int) -> int:
    """Returns the seed (63 bits) of the `number`-th process that a pool starts."""
    text = f"{seed}/{form}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


async def _send_and_receive(child: ChildProcess, frame: bytes) -> Any:
    await child.send(frame)
    return await child.receive()
